"""Bad input: each mistake gets an error or a warning that says what happened, where, and what to do."""

from __future__ import annotations

import inspect
import math
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import (
    AccumulatorWarning,
    CalibrationWarning,
    ConversionError,
    ExportError,
    HorizonError,
    MarchNotSetError,
    OperatorInputError,
    QuantizationWarning,
    TraceError,
    UnsupportedOperatorError,
)
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    convert,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    fuse_fx,
    get_default_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.fx_helper import wrap
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.models import make
from tests.operators.cases.base import Body, bench
from tests.routes import calibrate, prepared, run_onnx

QCONFIG = {"": default_qat_8bit_fake_quant_qconfig}
X = torch.randn(2, 4, 6, 6)


def _line(function: Any) -> str:
    """``file:line`` of the last line of a function."""
    lines, first = inspect.getsourcelines(function)
    return f"test_bad_input.py:{first + len(lines) - 1}"


def test_no_march() -> None:
    set_march(None)
    for verb in (lambda m: prepare_qat_fx(m, QCONFIG), prepare_qat):
        with pytest.raises(MarchNotSetError, match=r"set_march\(March\.BAYES\)"):
            verb(QuantWrapper(nn.Conv2d(4, 4, 1)))


class Gamma(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.lgamma(x)


def test_an_unsupported_function_is_named_with_its_place() -> None:
    model = QuantWrapper(nn.Sequential(nn.Conv2d(4, 4, 1), Gamma()))
    with pytest.raises(UnsupportedOperatorError) as error:
        prepare_qat_fx(model, QCONFIG)
    message = str(error.value)
    for word in ("torch.lgamma", "`module.1`", _line(Gamma.forward), "bayes", "DeQuantStub"):
        assert word in message, message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x: x.cumprod(1), ("torch.Tensor.cumprod", "DeQuantStub")),
        (lambda x: torch.div(x, x, rounding_mode="floor"), ("torch.div", "floor(x / y)")),
        (lambda x: x // 2, ("floordiv", "floor(x / y)")),
        (lambda x: torch.remainder(x, 2), ("torch.remainder", "DeQuantStub")),
        (lambda x: torch.where(x > 0), ("torch.where", "both alternatives")),
        (lambda x: F.avg_pool2d(x, x.shape[2:]), ("avg_pool2d", "kernel_size", "numbers")),
        (lambda x: F.softmax(x, 1, dtype=torch.float64), ("softmax", "dtype")),
        (lambda x: x.mean(1, dtype=torch.float64), ("mean", "leave dtype out")),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), ("interpolate", "bicubic", "bilinear")),
        (lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True), ("interpolate", "antialias")),
    ],
)
def test_unsupported_arguments_are_named(body: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedOperatorError) as error:
        prepare_qat_fx(QuantWrapper(Body(body)), QCONFIG)
    for word in (*words, "module"):
        assert word in str(error.value), str(error.value)


def test_an_unsupported_module_is_named_with_its_place() -> None:
    with pytest.raises(UnsupportedOperatorError) as error:
        prepare_qat_fx(QuantWrapper(nn.Sequential(nn.Conv2d(4, 4, 1), nn.RReLU())), QCONFIG)
    for word in ("RReLU", "`module.1`", "bayes"):
        assert word in str(error.value), str(error.value)


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_a_model_that_cannot_be_traced_names_the_line() -> None:
    first = inspect.getsourcelines(Branch.forward)[1]
    with pytest.raises(TraceError) as error:
        prepare_qat_fx(QuantWrapper(Branch()), QCONFIG)
    for word in ("QuantWrapper", f"test_bad_input.py:{first + 1}", "wrap", "`prepare(model, example_inputs, ...)`"):
        assert word in str(error.value), str(error.value)


@wrap()
def halves(x: Tensor) -> list[Tensor]:
    return [x[:, :2], x[:, 2:]]


UNKNOWN_LENGTHS = {
    "shape-in-numpy": (lambda x: x.reshape(np.array(x.shape).tolist()), "numpy cannot take tensors or sizes"),
    "value-as-number": (lambda x: x * float(x.max()), "take other numbers from the model's configuration"),
    "wrapped-list": (lambda x: torch.cat(list(halves(x)), 1), "of wrapped code, `parts[i]` for i in range(2)"),
}


@pytest.mark.parametrize("name", UNKNOWN_LENGTHS)
def test_what_tracing_does_not_know_has_a_remedy(name: str) -> None:
    function, remedy = UNKNOWN_LENGTHS[name]

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    with pytest.raises(TraceError) as error:
        prepare_qat_fx(QuantWrapper(Net()), QCONFIG)
    assert remedy in str(error.value) and "test_bad_input.py" in str(error.value), str(error.value)


def test_a_wrapped_module_is_not_traced() -> None:
    @wrap()
    class Hidden(Branch):
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.conv, self.post = QuantStub(), DeQuantStub(), nn.Conv2d(4, 4, 1), Hidden()

        def forward(self, x: Tensor) -> Tensor:
            return self.post(self.dequant(self.conv(self.quant(x))))

    qat = prepare_qat_fx(Net(), QCONFIG)
    assert qat(X).shape == X.shape


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (lambda x, y: x + y, "at `body._generated_add_0` (test_bad_input.py:"),
        (lambda x, y: torch.matmul(x, y[..., :3]), "at `body._generated_matmul_0` (test_bad_input.py:"),
        (lambda x, y: torch.cat((x, y), 1), "at `body._generated_cat_0` (test_bad_input.py:"),
    ],
)
def test_mismatched_shapes_name_module_line_and_shapes(body: Any, place: str) -> None:
    qat = prepared(bench(Body(body), 2), (X, X))
    other = torch.randn(2, 4, 7, 5)
    for model in (qat, convert_fx(qat)):
        with pytest.raises(OperatorInputError) as caught:
            model(X, other)
        assert place in str(caught.value) and "(2, 4, 6, 6)" in str(caught.value)


def test_a_wrong_number_of_channels_names_the_layer() -> None:
    qat = prepared(QuantWrapper(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())), (X,))
    for model in (qat, convert_fx(qat)):
        with pytest.raises(OperatorInputError, match=r"`ConvReLU2d` at `module.0`.*shapes \(2, 3, 6, 6\)"):
            model(torch.randn(2, 3, 6, 6))


@pytest.mark.parametrize("module", [nn.Linear(6, 6), nn.Softmax(1), nn.LayerNorm(6), nn.AdaptiveAvgPool2d(1)])
def test_an_operator_that_the_march_does_not_run_says_which_do(module: nn.Module) -> None:
    set_march(March.BERNOULLI2)
    with pytest.raises(UnsupportedOperatorError, match="on bernoulli2: it is supported on bayes, bayes-e, nash-e"):
        prepare_qat_fx(QuantWrapper(module), {"": default_qat_8bit_fake_quant_qconfig})


def test_a_module_that_never_saw_data_is_named() -> None:
    qat = prepare_qat_fx(QuantWrapper(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid())), QCONFIG)
    with pytest.warns(CalibrationWarning) as caught:
        convert_fx(qat)
    message = str(caught[0].message)
    assert all(path in message for path in ("quant", "module.0", "module.1")) and "CALIBRATION" in message
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_a_calibrated_model_converts_quietly() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("mobilenet", "unet"):
            model, inputs = make(name)
            convert_fx(prepared(model, inputs))(*inputs)


class Half(nn.Module):
    """One input has a QuantStub, the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.dequant(self.quant(x) + y)


def test_a_float_tensor_in_the_quantized_part_asks_for_a_stub() -> None:
    qat = prepare_qat_fx(Half(), QCONFIG)
    for state in FakeQuantState.CALIBRATION, FakeQuantState.QAT, FakeQuantState.VALIDATION:
        set_fake_quantize(qat.eval(), state)
        with pytest.raises(ConversionError, match=r"_generated_add_0.*\(2, 4, 6, 6\).*QuantStub"):
            qat(X, X)
    with pytest.raises(ConversionError, match=r"_generated_add_0.*QuantStub"):
        convert_fx(qat)(X, X)


def test_a_model_without_stubs_is_worth_a_warning() -> None:
    with pytest.warns(QuantizationWarning, match="no QuantStub"):
        prepare_qat_fx(nn.Sequential(nn.Conv2d(4, 4, 1)), QCONFIG)


def test_converting_a_float_model() -> None:
    with pytest.raises(TypeError, match="prepare_qat_fx"):
        convert_fx(nn.Conv2d(1, 1, 1))
    with pytest.raises(TypeError, match="prepare"):
        convert_fx(fuse_fx(QuantWrapper(nn.Conv2d(1, 1, 1))))
    with pytest.raises(TypeError, match="prepare_qat"):
        convert(QuantWrapper(nn.Conv2d(1, 1, 1)))


def test_converting_twice() -> None:
    model, inputs = make("mobilenet")
    with pytest.raises(TypeError, match="already"):
        convert_fx(convert_fx(prepared(model, inputs)))


def test_preparing_twice() -> None:
    qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(4, 4, 1)), QCONFIG)
    with pytest.raises(TypeError, match="already"):
        prepare_qat_fx(qat, QCONFIG)


def test_exporting_what_is_not_converted(tmp_path: Any) -> None:
    qat = prepared(QuantWrapper(nn.Conv2d(4, 4, 1)), (X,))
    with pytest.raises(ExportError, match="convert_fx"):
        export_quantized_onnx(qat, X, tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="convert_fx"):
        export_quantized_onnx(QuantWrapper(nn.Conv2d(4, 4, 1)), X, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_accumulators_beyond_int32_are_named_with_their_bound() -> None:
    torch.manual_seed(0)
    model = QuantWrapper(nn.Sequential(nn.Conv2d(1024, 2, 3))).eval()
    nn.init.constant_(model.module[0].weight, 1.0)
    x = torch.randn(1, 1024, 4, 4)
    qat = calibrate(prepare_qat_fx(model, {"": default_qat_8bit_weight_16bit_act_fake_quant_qconfig}), (x,))
    with pytest.warns(AccumulatorWarning) as caught:
        quantized = convert_fx(qat)
    message = str(caught[0].message)
    bound = 1024 * 9 * 127 * 32768
    assert "`module.0`" in message and f"{bound:.3g}" in message and "qint8" in message, message
    loud = torch.full_like(x, 1e6)
    with torch.no_grad():
        assert torch.isfinite(quantized(loud)).all() and torch.equal(quantized(loud), qat(loud))


def test_state_must_be_a_state() -> None:
    qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(4, 4, 1)), QCONFIG)
    with pytest.raises(TypeError, match="FakeQuantState.CALIBRATION"):
        set_fake_quantize(qat, "calibration")  # type: ignore[arg-type]
    set_fake_quantize(qat.module, FakeQuantState.VALIDATION)
    assert qat.module.is_exact and not qat.quant.is_exact


def test_a_model_that_cannot_be_copied_says_why() -> None:
    model = QuantWrapper(nn.Conv2d(4, 4, 1))
    model.lock = threading.Lock()
    with pytest.raises(HorizonError, match="cannot pickle '_thread.lock'"):
        prepare_qat_fx(model, QCONFIG)


@pytest.mark.parametrize(
    "function", [torch.sigmoid, lambda x: x.softmax(-1), lambda x: x.topk(2).values, lambda x: x.max(-1).values + 1.0]
)
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_nan_enters_the_quantized_part_as_zero_on_every_route(function: Any, dtype: str, tmp_path: Any) -> None:
    qat = prepared(QuantWrapper(Body(function)), (X,), dtype)
    broken, zero = X.clone(), X.clone()
    broken[0, 1, 2, 3], zero[0, 1, 2, 3] = torch.nan, 0.0
    with torch.no_grad():
        quantized = convert_fx(qat)
        expected = quantized(zero)
        assert torch.equal(quantized(broken), expected) and torch.equal(qat(broken), expected)
    graph = export_quantized_onnx(quantized, broken, tmp_path / "model.onnx")
    assert torch.equal(run_onnx(graph, (broken,), "on")[0], expected)


@pytest.mark.parametrize(
    "function",
    [lambda x: F.pad(x, (1, 1), value=100.0), lambda x: x.clamp(min=50.0), lambda x: F.hardtanh(x, -60.0, -50.0)],
)
def test_a_constant_beyond_an_inherited_range_is_said_once(function: Any) -> None:
    quantized = convert_fx(prepared(QuantWrapper(Body(function)), (X,)))
    with pytest.warns(QuantizationWarning, match="lies beyond the range of its input, whose scale is") as found:
        for _ in range(3):
            quantized(X)
    assert len(found) == 1


@pytest.mark.parametrize(
    "function", [lambda x: x.clamp(-50.0, 60.0), lambda x: F.pad(x, (1, 1), value=-math.inf), lambda x: F.relu6(x)]
)
@pytest.mark.filterwarnings("error::horizon_plugin_pytorch.errors.QuantizationWarning")
def test_limits_that_change_nothing_are_not_warned_of(function: Any) -> None:
    convert_fx(prepared(QuantWrapper(Body(function)), (X,)))(X)


@pytest.mark.parametrize("divisor", [0, 0.0, False])
def test_division_by_zero_is_refused_with_its_place(divisor: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"truediv.*test_bad_input.py.*divided by 0"):
        prepare_qat_fx(QuantWrapper(Body(lambda x: x / divisor)), QCONFIG)


def test_padding_with_nan_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="NaN: no integer stands for it"):
        prepared(QuantWrapper(Body(lambda x: F.pad(x, (1, 1), value=math.nan))), (X,))(X)


def test_integers_without_a_scale_are_called_integers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()

        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            return self.dequant(self.quant(x) * counts)

    with pytest.raises(ConversionError, match=r"got an integer tensor of shape .*quant\(x\.float\(\)\)"):
        prepared(Net(), (X, torch.ones(X.shape[-1], dtype=torch.int64)))


def test_a_window_of_the_whole_image_has_a_remedy() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant = QuantStub()

        def forward(self, x: Tensor) -> Tensor:
            y = self.quant(x)
            return F.avg_pool2d(y, y.shape[2:])

    with pytest.raises(Exception, match=r"adaptive_avg_pool2d\(x, 1\)"):
        prepare_qat_fx(Net(), {"": get_default_qconfig()})


def test_batch_norm_without_statistics_has_a_remedy() -> None:
    with pytest.raises(Exception, match="track_running_stats=True, or use InstanceNorm"):
        prepare_qat_fx(QuantWrapper(nn.BatchNorm2d(4, track_running_stats=False)), {"": get_default_qconfig()})
