"""Bad input: each mistake gets an error or a warning that says what happened, where, and what to do."""

from __future__ import annotations

import inspect
import threading
import warnings
from typing import Any

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
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.fx_helper import wrap
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.models import make
from tests.operators.cases.base import Body, bench
from tests.routes import calibrate, prepared

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
    for word in ("QuantWrapper", f"test_bad_input.py:{first + 1}", "wrap"):
        assert word in str(error.value), str(error.value)


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
    qat = calibrate(prepare_qat_fx(Half(), QCONFIG), (X, X))
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
