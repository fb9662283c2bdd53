"""`preserve_qat_mode`: modules that stay in their QAT form when a model is converted."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as tq
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning
from horizon_plugin_pytorch.nn import qat, quantized
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    calibrate,
    convert,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    fuse_modules,
    prepare,
    prepare_qat,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from horizon_plugin_pytorch.utils.quant_profiler import set_preserve_qat_mode
from tests.models import AddBlock

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
FX = [PrepareMethod.SYMBOLIC, PrepareMethod.JIT_STRIP]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second, self.act = AddBlock(), AddBlock(), nn.Sigmoid()
        self.softmax = nn.Softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.second(self.first(x, x), x)
        return self.dequant(self.softmax(self.act(y * y)).transpose(1, 2))


def prepared(net: nn.Module, method: PrepareMethod) -> nn.Module:
    if method is PrepareMethod.EAGER:
        net.qconfig = default_qat_8bit_fake_quant_qconfig
        model = prepare_qat(net)
    else:
        model = prepare(net, (X,), method=method, qconfig_dict={"": default_qat_8bit_fake_quant_qconfig}, out_dir=None)
    calibrate(model, [X], progress=False)
    return model


def kept(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, QATModule)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("first", ["first.add"]),  # the guide's: a container that is fused
        ("first.conv", ["first.add"]),  # what is said of the layer holds for what it is fused into
        ("quant", ["quant"]),
        ("act", ["act"]),
        ("dequant", ["dequant"]),
    ],
)
@pytest.mark.parametrize("method", FX, ids=str)
@torch.no_grad()
def test_what_is_marked_in_the_float_model_stays(method: PrepareMethod, path: str, expected: list[str]) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    net.get_submodule(path).preserve_qat_mode = True
    model = prepared(net, method)
    result = convert_fx(model)
    assert kept(result) == expected and torch.equal(result(X), model(X))
    if path.startswith("first"):
        assert isinstance(result.first.add, qat.ConvAddReLU2d)
        assert isinstance(result.second.add, quantized.ConvAddReLU2d)


@pytest.mark.parametrize("path", ["first.add", "_generated_mul_0", "act", "quant", "dequant", "softmax", "second", ""])
@pytest.mark.parametrize("method", FX, ids=str)
@torch.no_grad()
def test_what_is_marked_in_the_qat_model_stays(method: PrepareMethod, path: str) -> None:
    torch.manual_seed(0)
    model = prepared(Net().eval(), method)
    model.get_submodule(path).preserve_qat_mode = True
    result = convert(model)
    found = [name for name in kept(model) if not path or name == path or name.startswith(f"{path}.")]
    assert found and kept(result) == found and torch.equal(result(X), model(X))


@torch.no_grad()
def test_what_is_said_of_a_module_wins_over_what_is_said_of_those_around_it() -> None:
    model = prepared(Net().eval(), PrepareMethod.JIT_STRIP)
    model.preserve_qat_mode = True
    model.first.preserve_qat_mode = False
    result = convert(model)
    assert isinstance(result.first.add, quantized.ConvAddReLU2d) and isinstance(result.second.add, qat.ConvAddReLU2d)
    assert torch.equal(result(X), model(X))


@torch.no_grad()
def test_running_the_result_moves_no_scale_and_its_state_can_be_set() -> None:
    torch.manual_seed(0)
    model = prepared(Net().eval(), PrepareMethod.SYMBOLIC)
    set_fake_quantize(model, FakeQuantState.QAT)
    model.first.preserve_qat_mode = True
    result = convert(model)
    before = result.first.add.activation_post_process.scale.clone()
    exact = result(X)
    result(100 * X)
    assert torch.equal(result.first.add.activation_post_process.scale, before)
    for state in (FakeQuantState.QAT, FakeQuantState._FLOAT):  # as in training, and in float, among integers
        set_fake_quantize(result, state)
        assert float((result(X) - exact).abs().max()) < 0.05
    assert not torch.equal(result(X), exact)


def test_export_says_why_a_module_is_not_converted() -> None:
    model = prepared(Net().eval(), PrepareMethod.SYMBOLIC)
    model.first.preserve_qat_mode = True
    with pytest.raises(ExportError, match="`first.add` is still a QAT module.*preserve_qat_mode"):
        export_quantized_onnx(convert(model), X, io.BytesIO())


class Eager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.block = QuantStub(), DeQuantStub(), AddBlock()

    def forward(self, x: Tensor) -> Any:
        x = self.quant(x)
        return self.dequant(self.block(x, x))


@pytest.mark.parametrize("marked", ["conv", "add"])
@torch.no_grad()
def test_eager_mode(marked: str) -> None:
    torch.manual_seed(0)
    net = Eager().eval()
    net.block.get_submodule(marked).preserve_qat_mode = True
    fuse_modules(net, ["block.conv", "block.bn", "block.add", "block.relu"], inplace=True)
    model = prepared(net, PrepareMethod.EAGER)
    result = convert(model)
    assert isinstance(result.block.add, qat.ConvAddReLU2d if marked == "conv" else quantized.ConvAddReLU2d)
    assert torch.equal(result(X), model(X))


@torch.no_grad()
def _kept_by(model: nn.Module, **which: Any) -> list[str]:
    set_preserve_qat_mode(model, **which)
    result = convert(model)
    assert torch.equal(result(X), model(X))
    return kept(result)


@pytest.mark.in_turns("method", "which")
@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ({"types": (nn.Conv2d,)}, ["first.add", "second.add"]),  # fused ones as well
        ({"types": nn.Conv2d}, ["first.add", "second.add"]),
        ({"types": (qat.ConvAddReLU2d,)}, ["first.add", "second.add"]),
        ({"types": (FloatFunctional,)}, ["_generated_mul_0"]),
        ({"types": (tq.FloatFunctional,)}, ["_generated_mul_0"]),
        ({"types": (nn.Sigmoid,)}, ["act"]),  # one class serves many functions
        ({"types": (AddBlock,)}, ["first.add", "second.add"]),
        ({"prefixes": ("first.add",)}, ["first.add"]),  # where the fused module is
        ({"prefixes": "first"}, ["first.add"]),
        ({"prefixes": ("first.conv",)}, ["first.add"]),  # the layer's counts
        ({"prefixes": ("_generated_mul_0",), "types": (nn.Sigmoid,)}, ["act", "_generated_mul_0"]),
    ],
)
@pytest.mark.parametrize("method", FX, ids=str)
def test_prefixes_and_types_in_a_qat_model(method: PrepareMethod, which: dict[str, Any], expected: list[str]) -> None:
    torch.manual_seed(0)
    model = prepared(Net().eval(), method)
    assert _kept_by(model, **which) == expected
    assert _kept_by(model, **which, value=False) == []


@pytest.mark.parametrize("method", FX, ids=str)
def test_prefixes_and_types_in_a_float_model(method: PrepareMethod) -> None:
    net = Net().eval()
    set_preserve_qat_mode(net, types=(nn.Conv2d,))
    set_preserve_qat_mode(net, prefixes=("second",), value=False)
    assert kept(convert(prepared(net, method))) == ["first.add"]
    with pytest.warns(QuantizationWarning, match="of BatchNorm2d has no effect.*Set it on the Conv2d"):
        net = Net().eval()
        set_preserve_qat_mode(net, types=(nn.BatchNorm2d,))  # the guide: incorrect
        model = prepared(net, method)
    assert kept(convert(model)) == []


@pytest.mark.parametrize("method", FX, ids=str)
def test_what_is_set_where_it_has_no_effect_is_told(method: PrepareMethod) -> None:
    model = prepared(Net().eval(), method)
    with pytest.warns(QuantizationWarning, match="no module of 'mul_generated_mul_0'.*modules at '_generated_mul_0'"):
        set_preserve_qat_mode(model, prefixes=("mul_generated_mul_0",))  # as the guide names them
    with pytest.warns(QuantizationWarning, match="`first.bn` is fused into 'first.add'"):
        set_preserve_qat_mode(model, prefixes=("first.bn",))
    with pytest.warns(QuantizationWarning, match="`BatchNorm2d` at `first.bn` has no effect"):
        model.first.bn.preserve_qat_mode = True
    with pytest.warns(QuantizationWarning, match="no module of 'third', GELU"):
        set_preserve_qat_mode(model, prefixes=("third",), types=(nn.GELU,))
    with pytest.warns(QuantizationWarning, match="neither prefixes nor types"):
        set_preserve_qat_mode(model)
    assert kept(convert(model)) == []
    with pytest.raises(TypeError, match="prefixes are strings and types are classes, got 'Conv2d'"):
        set_preserve_qat_mode(model, types=("Conv2d",))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="converted already"):
        set_preserve_qat_mode(convert(model), types=(nn.Conv2d,))


@pytest.mark.slow
def test_the_layer_of_a_fused_module_can_be_marked_by_hand() -> None:
    for method in FX:
        model = prepared(Net().eval(), method)
        model.second.conv.preserve_qat_mode = True
        assert kept(convert(model)) == ["second.add"]
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        copied.first.conv.preserve_qat_mode = True
        assert kept(convert(copied)) == ["first.add", "second.add"]


class Limits(nn.Module):
    """Operators that keep the scale of their input, of what is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.linear = QuantStub(), DeQuantStub(), nn.Linear(6, 6)
        self.relu, self.relu6, self.tanh = nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.3, 0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.quant(x))
        parts = self.relu(x.mT), self.relu6(x[:, :2]), self.tanh(x)
        return torch.cat([self.dequant(part).flatten() for part in parts])


@pytest.mark.parametrize("uses_kernels", [True, False])
@pytest.mark.parametrize("name", ["relu", "relu6", "tanh"])
@pytest.mark.parametrize("method", PrepareMethod, ids=str)
def test_limits_that_are_kept_have_the_integers_of_those_that_are_not(
    method: PrepareMethod, name: str, uses_kernels: bool
) -> None:
    fp.use_integer_kernels(uses_kernels)
    model = prepared(Limits().eval(), method)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    model.get_submodule(name).preserve_qat_mode = True
    with torch.no_grad():
        assert torch.equal(convert(model)(X), model(X))


@pytest.mark.parametrize("name", ["attention.k_proj", "lstm.l0.ih", "lstm.l0.hh"])
@pytest.mark.parametrize("method", FX, ids=str)
def test_a_layer_on_a_part_of_its_owners_weight_is_kept(method: PrepareMethod, name: str) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.lstm = nn.LSTM(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x).flatten(1, 2)
            return self.dequant(self.lstm(self.attention(x, x, x)[0])[0])

    model = prepared(Parts().eval(), method)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    layers = [path for path, module in model.named_modules() if isinstance(module, QATModule)]
    (path,) = [path for path in layers if path == name] or [f"no {name} in {layers}"]
    model.get_submodule(path).preserve_qat_mode = True
    quantized = convert(model)
    with torch.no_grad():
        assert kept(quantized) == [path] and torch.equal(quantized(X), model(X))
        assert torch.equal(copy.deepcopy(quantized)(X), model(X))
