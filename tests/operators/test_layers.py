"""Layers with weights: what the cases of the operator table cannot say."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.limits import find_limits
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat import conv2d, linear
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    convert_fx,
    get_default_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import as_numbers, assert_one_arithmetic, calibrate, mismatches, prepared, qconfig, run_onnx

INT16_WEIGHT = get_default_qconfig(weight_qkwargs={"dtype": "qint16"})
BOTH = get_default_qconfig(activation_qkwargs={"dtype": "qint16"}, weight_qkwargs={"dtype": "qint16"})


class Weights(nn.Module):
    """Functional layers on parameters, a buffer, and a computed weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.quant, self.dequant, self.how = QuantStub(), DeQuantStub(), how
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4, 1, 1)), nn.Parameter(torch.randn(4))
        self.register_buffer("kernel", torch.ones(4, 1, 3, 3) / 9)
        self.relu, self.plus = nn.ReLU(), FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        if self.how == "fused":
            return self.dequant(self.relu(self.plus.add(F.conv2d(x, self.weight, self.bias), x)))
        if self.how == "twice":  # tied weights
            return self.dequant(F.conv2d(F.conv2d(x, self.weight, self.bias), self.weight))
        if self.how == "blur":
            return self.dequant(F.conv2d(x, self.kernel, padding=1, groups=4))
        if self.how == "computed weight":
            return self.dequant(F.conv2d(x, self.weight * 2))
        if self.how == "computed bias":
            return self.dequant(F.conv2d(x, self.weight, self.bias + 1))
        if self.how == "weight of the data":
            return self.dequant(F.linear(x, x[0, 0]))
        return self.dequant(F.conv2d(x, self.weight, groups=x.shape[0]))


X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("how", "classes"),
    [("fused", {conv2d.ConvAddReLU2d}), ("twice", {conv2d.Conv2d}), ("blur", {conv2d.Conv2d})],
)
def test_functional_layers_become_modules_that_share_the_weight(how: str, classes: set[type], tmp_path: Any) -> None:
    model = Weights(how)
    qat: Any = prepared(model, (X,))
    layers = [m for m in qat.modules() if isinstance(m, conv2d.Conv2d)]
    assert {type(m) for m in layers} == classes
    source = qat.kernel if how == "blur" else qat.weight
    assert all(layer.weight is source for layer in layers)
    assert isinstance(source, nn.Parameter) == (how != "blur")
    quantized = assert_one_arithmetic(qat, (X,), tmp_path)
    assert (quantized(X) - model(X)).abs().max() < 0.2
    with torch.no_grad():
        source.mul_(0.5)  # one write reaches every use
    assert mismatches(as_numbers(qat(X)), as_numbers(convert_fx(qat)(X))) == 0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("computed weight", ("conv2d", "its weight is computed", "parameter or a buffer")),
        ("computed bias", ("conv2d", "its bias is computed")),
        ("weight of the data", ("linear", "its weight is computed", "matmul")),
        ("groups", ("conv2d", "groups must be numbers")),
    ],
)
def test_computed_weights_are_refused_by_name(how: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedOperatorError) as error:
        prepare_qat_fx(Weights(how), {"": qconfig()})
    assert all(word in str(error.value) for word in (*words, "test_layers.py")), error.value


_EYE = [torch.eye(4).view(4, 4, 1, 1)]
_MADE: dict[str, Any] = {
    "made": lambda x: F.conv2d(x, torch.full((4, 1, 3, 3), 1 / 9), padding=1, groups=4),
    "of an array": lambda x: F.linear(x, torch.from_numpy(np.linspace(-0.3, 0.4, 12, dtype=np.float32).reshape(2, 6))),
    "of a list": lambda x: F.conv2d(x, _EYE[0]),
    "transposed": lambda x: F.conv_transpose2d(x, torch.ones(4, 1, 2, 2) * 0.25, stride=2, groups=4),
    "twice the same": lambda x: [x := F.conv2d(x, torch.eye(4).view(4, 4, 1, 1) * 0.5) for _ in range(2)][-1],
}


class Functional(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.function = QuantStub(), DeQuantStub(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.function(self.quant(x)))


@pytest.mark.parametrize("method", ["symbolic", "jit", "jit-strip"])
@pytest.mark.parametrize("function", _MADE.values(), ids=list(_MADE))
def test_weights_that_the_forward_makes(function: Any, method: str, tmp_path: Any) -> None:
    model = Functional(function).eval()
    qat = calibrate(prepare(model, (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None), (X,))
    assert_one_arithmetic(qat, (X,), tmp_path)
    assert (qat(X) - model(X)).abs().max() < 0.03 * model(X).abs().max()


def _in_turns(x: Tensor) -> Tensor:
    for factor in (0.5, 0.25):
        x = F.conv2d(x, torch.eye(4).view(4, 4, 1, 1) * factor)
    return x


def _by_chance(x: Tensor) -> Tensor:
    return F.conv2d(x, torch.randn(4, 4, 1, 1))


@pytest.mark.parametrize("method", ["jit", "jit-strip"])
@pytest.mark.parametrize(("function", "words"), [(_in_turns, "to different numbers"), (_by_chance, "its weight is")])
def test_one_layer_has_one_weight(function: Any, words: str, method: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=rf"conv2d.*test_layers.py:\d+.*{words}"):
        prepare(Functional(function).eval(), (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)


@pytest.mark.parametrize("march", [March.BERNOULLI2, March.BAYES, March.BAYES_E])
def test_int16_weights_that_the_chip_does_not_have_are_told(march: March, tmp_path: Any) -> None:
    """They stay what the user asked for, as in the guides, whose check flags them."""
    set_march(march)
    with pytest.warns(QuantizationWarning, match=f"int16 weights on {march}: module.0.*compiler"):
        qat = prepare_qat_fx(QuantWrapper(nn.Sequential(nn.Conv2d(1, 1, 1))), {"": INT16_WEIGHT})
    assert qat.module[0].weight_fake_quant.dtype == "qint16"
    assert_one_arithmetic(calibrate(qat, (torch.randn(1, 1, 4, 4),)), (torch.randn(1, 1, 4, 4),), tmp_path)
    eager = QuantWrapper(nn.ConvTranspose2d(2, 4, 2))
    eager.qconfig = INT16_WEIGHT
    with pytest.warns(QuantizationWarning, match="int16 weights"):
        layer: Any = prepare_qat(eager).module
    assert (layer.weight_fake_quant.dtype, layer.weight_fake_quant.ch_axis) == ("qint16", 1)


@pytest.mark.slow
@pytest.mark.parametrize("march", [March.NASH_E, March.NASH_M, March.NASH_P])
@pytest.mark.parametrize("layer", [nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.ConvTranspose2d(4, 2, 2)])
def test_nash_takes_int16_weights(march: March, layer: nn.Module, tmp_path: Any) -> None:
    set_march(march)
    qat = prepare_qat_fx(QuantWrapper(layer), {"": INT16_WEIGHT})
    assert qat.module.weight_fake_quant.dtype == "qint16"
    assert_one_arithmetic(calibrate(qat, (X,)), (X,), tmp_path, [(8 * X,)])


@pytest.mark.parametrize("march", [March.NASH_E, March.NASH_M])
def test_int16_input_and_weight_on_nash_m_name_the_rule(march: March) -> None:
    set_march(march)
    qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(4, 4, 1)), {"": BOTH})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantized = convert_fx(calibrate(qat, (X,)))
    messages = [str(w.message) for w in caught if issubclass(w.category, QuantizationWarning)]
    assert any("`module`" in m and "OE 3.5.0" in m for m in messages) == (march is March.NASH_M)
    assert torch.equal(quantized(X), qat(X))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(3, 4, 3, padding=1), (0, 3, 8)),
        (nn.Conv3d(3, 4, 3, padding=1), (0, 3, 4, 4, 4)),
        (nn.Conv1d(3, 4, 1), (2, 3, 1)),
        (nn.Conv3d(1, 1, 1), (1, 1, 1, 1, 1)),
        (nn.ConvTranspose1d(3, 4, 2, 2), (0, 3, 8)),
        (nn.BatchNorm3d(3), (0, 3, 2, 2, 2)),
        (nn.BatchNorm1d(3), (1, 3)),
    ],
)
def test_empty_and_smallest_inputs(layer: nn.Module, shape: tuple[int, ...]) -> None:
    qat = prepared(QuantWrapper(layer.eval()), (torch.randn(2, *shape[1:]),))
    x = torch.randn(shape)
    out = convert_fx(qat)(x)
    assert out.shape == layer(x).shape and torch.equal(out, qat(x))


def test_a_batch_norm_without_statistics_names_itself() -> None:
    for bn in (nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm3d(2, track_running_stats=False)):
        message = rf"{type(bn).__name__} at `module` \(test_layers.py:\d+\) has no running statistics"
        with pytest.raises(QuantizationConfigError, match=message):
            prepare_qat_fx(QuantWrapper(bn), {"": qconfig()})


@pytest.mark.parametrize("layer", [nn.Conv1d(2, 2, 1), nn.Conv3d(2, 2, 1), nn.Linear(2, 2), nn.BatchNorm1d(2)])
def test_what_bernoulli2_does_not_have(layer: nn.Module) -> None:
    set_march(March.BERNOULLI2)
    with pytest.raises(UnsupportedOperatorError, match="supported on bayes"):
        prepare_qat_fx(QuantWrapper(layer), {"": qconfig()})


LIMITS: list[tuple[nn.Module, tuple[int, ...], March, set[str]]] = [
    (nn.Conv2d(2, 2, 3), (1, 2, 8, 8), March.BAYES, set()),
    (nn.Conv2d(1, 1, 33), (1, 1, 40, 40), March.BAYES, {"kernel_size <= 31"}),
    (nn.Conv2d(1, 1, 3, 2, dilation=2), (1, 1, 9, 9), March.BAYES, {"dilation 1, or stride 1"}),
    (nn.Conv2d(1, 1, 1, dilation=17), (1, 1, 3, 3), March.BAYES, {"dilation <= 16"}),
    (nn.Conv2d(1, 16400, 1), (1, 1, 1, 1), March.BAYES, {"out_channels <= 8192, as output of the model 16384"}),
    (nn.Conv2d(80, 1, 29), (1, 80, 30, 30), March.BAYES, {"weights of an output channel < 65535"}),
    (nn.Conv2d(1, 1, 9), (1, 1, 9, 9), March.BERNOULLI2, {"kernel_size <= 7"}),
    (nn.Conv2d(1, 1, 3, dilation=3), (1, 1, 9, 9), March.BERNOULLI2, {"dilation 1 or 2 or 4"}),
    (nn.Conv2d(700, 1, 7), (1, 700, 7, 7), March.BERNOULLI2, {"weights of an output channel <= 32768"}),
    (nn.Conv3d(1, 1, 3, (1, 2, 2)), (1, 1, 4, 4, 4), March.BAYES, {"stride 1 or 2, the same on all axes"}),
    (nn.Conv3d(2, 2, 3, padding=1, groups=2), (1, 2, 4, 4, 4), March.BAYES, {"groups 1"}),
    (nn.Conv3d(1, 1, (10, 1, 20)), (1, 1, 10, 1, 20), March.BAYES, {"kernel D and H <= 9, W <= 8191"}),
    (nn.ConvTranspose2d(1, 1, 2, 2), (1, 1, 4, 4), March.BAYES, set()),
    (nn.ConvTranspose2d(1, 1, 2, 3), (1, 1, 4, 4), March.BAYES, {"kernel_size >= stride"}),
    (nn.ConvTranspose2d(1, 1, 4, 2, 3), (1, 1, 4, 4), March.BAYES, {"padding <= kernel_size / stride"}),
    (nn.ConvTranspose2d(1, 1, 3, 1), (1, 1, 4, 4), March.BERNOULLI2, {"2 <= stride <= 4"}),
    (nn.Linear(8193, 1), (1, 8193), March.BAYES, {"in_features <= 8192"}),
    (nn.BatchNorm2d(2049), (1, 2049, 1, 1), March.BERNOULLI2, {"num_features <= 2048"}),
]


@pytest.mark.parametrize(("layer", "shape", "march", "limits"), LIMITS, ids=lambda v: str(v)[:40])
def test_published_limits_are_found(layer: nn.Module, shape: tuple[int, ...], march: March, limits: set[str]) -> None:
    set_march(march)
    x = torch.randn(shape)
    quantized = convert_fx(prepared(QuantWrapper(layer.eval()), (x,)))
    assert {f.limit for f in find_limits(quantized, (x,), march) if f.operator not in ("quant", "dequant")} == limits


def test_an_added_tensor_limits_the_stride_on_bayes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.other, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
            self.conv, self.plus = nn.Conv2d(4, 4, 1, (1, 2)), FloatFunctional()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.dequant(self.plus.add(self.conv(self.quant(x)), self.other(y)))

    inputs = (X, X[..., ::2].contiguous())
    found = find_limits(convert_fx(prepared(Net(), inputs)), inputs, March.BAYES)
    assert [f.limit for f in found] == ["stride 1 or 2, the same on both axes, where a tensor is added"]


def test_int16_weights_break_a_limit_of_bayes() -> None:
    set_march(March.NASH_E)
    quantized = convert_fx(calibrate(prepare_qat_fx(QuantWrapper(nn.Linear(6, 4)), {"": INT16_WEIGHT}), (X,)))
    assert not find_limits(quantized, (X,), March.NASH_E)
    assert [f.limit for f in find_limits(quantized, (X,), March.BAYES)] == ["weight qint8"]


def test_fused_classes_are_named_where_they_are() -> None:
    for module in (conv2d, linear):
        for cls in module.FUSED:
            assert getattr(module, cls.__name__) is cls and cls.__module__ == module.__name__
            assert cls.quantized_class.__module__ == module.__name__.replace(".qat.", ".quantized.")


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_one_image_without_a_batch_axis(dtype: str, tmp_path: Any) -> None:
    body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 4, 2), nn.AvgPool2d(2))
    x = torch.randn(4, 12, 12)
    qat = prepared(QuantWrapper(body), (x,), dtype)
    quantized = convert_fx(qat)
    assert torch.equal(qat(x), quantized(x))
    assert torch.equal(run_onnx(export_quantized_onnx(quantized, x, tmp_path / "m.onnx"), (x,), "on")[0], quantized(x))


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_an_empty_batch_gives_an_empty_result(dtype: str) -> None:
    qat = prepared(QuantWrapper(nn.Conv2d(4, 8, 3)), (X,), dtype)
    assert convert_fx(qat)(X[:0]).shape == qat(X[:0]).shape == (0, 8, 4, 4)


@pytest.mark.filterwarnings("ignore::horizon_plugin_pytorch.errors.AccumulatorWarning")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(64, 64), (64, 64)),
        (nn.Conv2d(32, 8, 3, padding=1), (2, 32, 8, 8)),
        (nn.Conv2d(8, 8, 7, groups=8), (1, 8, 9, 9)),
        (nn.ConvTranspose2d(32, 4, 3, stride=2), (1, 32, 5, 5)),
    ],
)
@pytest.mark.parametrize("last", ["qint16", None])
def test_int16_weights_with_int16_inputs_lose_nothing(layer: nn.Module, shape: Any, last: Any, tmp_path: Any) -> None:
    """Their sums pass int32 on ordinary data."""
    torch.manual_seed(0)
    set_march(March.NASH_E)  # BAYES has int8 weights only
    both = get_default_qconfig(activation_qkwargs={"dtype": "qint16"}, weight_qkwargs={"dtype": "qint16"})
    nn.init.normal_(layer.weight, 0.5, 0.1)
    layer.bias = None
    config = {"": both} if last else {"": both, "module_name": [("module", both._replace(activation=None))]}
    model = prepare_qat_fx(QuantWrapper(layer), config)
    x = torch.rand(shape)
    set_fake_quantize(model.eval(), FakeQuantState.CALIBRATION)
    model(x)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    wanted = layer(x)
    assert float((model(x) - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    quantized = convert_fx(model)
    assert torch.equal(quantized(x), model(x))
    assert torch.equal(run_onnx(export_quantized_onnx(quantized, x, tmp_path / "m.onnx"), (x,), "on")[0], quantized(x))
