"""Parts of a model without a qconfig: they run in float, as written, and refuse quantized tensors by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    calibrate,
    convert,
    convert_fx,
    get_default_qconfig,
    prepare,
    prepare_qat,
)
from horizon_plugin_pytorch.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    QconfigSetterBase,
    default_calibration_qconfig_setter,
)

METHODS = list(PrepareMethod)
X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
INT8 = get_default_qconfig()
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def block() -> nn.Sequential:
    found = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    nn.init.uniform_(found[1].running_mean, -0.3, 0.3)
    nn.init.uniform_(found[1].running_var, 0.5, 2)
    return found


class Net(nn.Module):
    """A float part `b` between two quantized ones, with stubs around it or without."""

    def __init__(self, part: nn.Module, has_stubs: bool = True) -> None:
        super().__init__()
        self.quant, self.quant2, self.dequant, self.dequant2 = QuantStub(), QuantStub(), DeQuantStub(), DeQuantStub()
        self.a, self.b, self.c, self.has_stubs = nn.Conv2d(3, 3, 1), part, nn.Conv2d(3, 3, 1), has_stubs

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(self.quant(x))
        x = self.quant2(self.b(self.dequant2(x))) if self.has_stubs else self.b(x)
        return self.dequant(self.c(x))


class Part(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.op, self.fc, self.relu = function, FloatFunctional(), nn.Linear(4, 4), nn.ReLU()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Excluding(QconfigSetterBase):
    """Gives `b` nothing."""

    def qconfig_for(self, operator: Any) -> Any:
        return None if operator.path.split(".")[0] == "b" else INT8


WAYS: dict[str, Any] = {
    "attribute": lambda net: {},
    "module_name": lambda net: {"qconfig_dict": {"": INT8, "module_name": [("b", None)]}},
    "setter by name": lambda net: {
        "qconfig_setter": (ModuleNameQconfigSetter({"b": None}), default_calibration_qconfig_setter)
    },
    "setter that leaves out": lambda net: {"qconfig_setter": Excluding()},
}
PARTS: dict[str, Any] = {
    "conv, bn and relu": lambda m, x: m.relu(m.bn(m.conv(x))),
    "conv and a sum": lambda m, x: m.conv(x) + x,
    "a FloatFunctional": lambda m, x: m.op.add(x, x),
    "a function": lambda m, x: torch.sigmoid(x),
    "numbers": lambda m, x: x * 2 + 1,
    "a sum that the layer before would fuse": lambda m, x: x + m.fc.weight,
    "a function without a quantized form": lambda m, x: torch.special.i0(x),
    "a write in place": lambda m, x: x.clone().add_(1),
    "a module used twice": lambda m, x: m.fc(m.fc(x)),
}


def prepared(net: nn.Module, method: PrepareMethod, way: str) -> nn.Module:
    if way == "attribute":
        net = copy.deepcopy(net)
        net.qconfig, net.b.qconfig = INT8, None
    return prepare(net, (X,), method=method, out_dir=None, **WAYS[way](net))


# Eager mode has no qconfig_dict; JIT is JIT_STRIP but for what it strips.
COMBINATIONS = [
    (method, way)
    for method in METHODS
    for way in WAYS
    if method is not PrepareMethod.JIT and (method, way) != (PrepareMethod.EAGER, "module_name")
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_stubs", [True, False])
def test_a_model_without_any_qconfig_is_the_float_model(method: PrepareMethod, has_stubs: bool) -> None:
    net = Net(block(), has_stubs).eval()
    model = prepare(net, (X,), method=method, out_dir=None)
    with torch.no_grad():
        assert torch.equal(model(X), net(X))
    assert [type(m).__name__ for m in model.b.children()] == ["Conv2d", "BatchNorm2d", "ReLU"]
    model.train()(X).sum().backward()
    assert not torch.equal(model.b[1].running_mean, net.b[1].running_mean)  # it goes on normalising


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("method", METHODS)
def test_functions_of_a_model_without_any_qconfig_are_left_alone(method: PrepareMethod, name: str) -> None:
    net = Net(Part(PARTS[name]), has_stubs=False).eval()
    with torch.no_grad():
        assert torch.equal(prepare(net, (X,), method=method, out_dir=None)(X), net(X))


@pytest.mark.parametrize(("method", "way"), COMBINATIONS)
def test_a_part_between_stubs_is_as_written(method: PrepareMethod, way: str) -> None:
    net = Net(block()).eval()
    model = prepared(net, method, way)
    assert [type(m).__name__ for m in model.b.children()] == ["Conv2d", "BatchNorm2d", "ReLU"]
    calibrate(model, [X], progress=False)
    with torch.no_grad():
        out, wanted = model(X), net(X)
        assert float((out - wanted).norm() / wanted.norm()) < 0.1
        assert torch.equal((convert_fx if method is PrepareMethod.SYMBOLIC else convert)(model)(X), out)


@pytest.mark.in_turns("method", "name", of=2)
@pytest.mark.parametrize(("method", "way"), COMBINATIONS)
@pytest.mark.parametrize("name", PARTS)
def test_a_float_part_refuses_quantized_tensors(method: PrepareMethod, way: str, name: str) -> None:
    """As documented: NotImplementedError, and not a word of example inputs that missed the line."""
    with pytest.raises(NotImplementedError) as raised:
        prepared(Net(Part(PARTS[name]), has_stubs=False).eval(), method, way)(X)
    assert "not met" not in str(raised.value)
    assert "DeQuantStub" in str(raised.value)


@pytest.mark.parametrize("method", METHODS)
def test_the_refusal_names_module_line_and_remedy(method: PrepareMethod) -> None:
    model = prepared(Net(Part(lambda m, x: m.fc(x)), has_stubs=False).eval(), method, "attribute")
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(NotImplementedError, match="`Linear` at `b.fc`.*is not implemented for QTensor") as raised:
            one(X)
        assert method is PrepareMethod.EAGER or "test_float_parts.py" in str(raised.value)
        assert "hybrid=True" in str(raised.value)


def test_the_refusal_survives_pickling() -> None:
    net = nn.Sequential(QuantStub(), nn.Linear(4, 4), nn.Linear(4, 4), DeQuantStub()).eval()
    net.qconfig, net[2].qconfig = INT8, None
    model = pickle.loads(pickle.dumps(prepare(net, (X,), out_dir=None)))
    with pytest.raises(NotImplementedError, match="`Linear` at `2`"):
        model(X)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("last", [True, False])
def test_the_first_or_last_layer_in_float(method: PrepareMethod, last: bool) -> None:
    """With a DeQuantStub before the last layer, or the QuantStub after the first one."""
    layers = [QuantStub(), nn.Conv2d(3, 3, 1), DeQuantStub(), nn.Conv2d(3, 3, 1)]
    net = nn.Sequential(*(layers if last else [layers[3], *layers[:3]])).eval()
    net.qconfig = INT8
    net[3 if last else 0].qconfig = None
    model = prepare(net, (X,), method=method, out_dir=None)
    calibrate(model, [X], progress=False)
    assert type(model.get_submodule("3" if last else "0")) is nn.Conv2d
    with torch.no_grad():
        assert float((model(X) - net(X)).abs().max()) < 0.1


def test_hybrid_lets_float_modules_take_quantized_tensors() -> None:
    net = Net(block(), has_stubs=False).eval()
    net.qconfig, net.b.qconfig = INT8, None
    model = prepare_qat(net, hybrid=True)  # in the QAT state, where the next layer takes real numbers
    assert float((model(X) - net(X)).abs().max()) < 0.1


def test_preparing_names_functions_that_stay_float() -> None:
    net = Net(Part(lambda m, x: F.gelu(x)), has_stubs=False).eval()
    net.qconfig, net.b.qconfig = INT8, None
    with pytest.warns(QuantizationWarning, match="gelu.*test_float_parts.py.*qconfig None but gets quantized"):
        prepare(net, (X,), out_dir=None)


class Wrapped(nn.Module):
    """A part whose code tracing does not enter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.op = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), FloatFunctional()

    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return self.op.add(self.bn(self.conv(x)), torch.sigmoid(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("method", METHODS)
def test_wrapped_code_of_a_float_part(method: PrepareMethod) -> None:
    net = Net(Wrapped()).eval()
    model = prepared(net, method, "attribute")
    assert all(type(model.b.get_submodule(name)).__module__.startswith("torch.nn") for name in ("conv", "bn"))
    calibrate(model, [X], progress=False)
    with torch.no_grad():
        assert float((model(X) - net(X)).abs().max()) < 0.1
    with pytest.raises(NotImplementedError, match="`Conv2d` at `b.conv`.*not implemented for QTensor"):
        prepared(Net(Wrapped(), has_stubs=False).eval(), method, "attribute")(X)


@pytest.mark.parametrize("method", [PrepareMethod.JIT_STRIP, PrepareMethod.SYMBOLIC])
def test_a_model_without_any_qconfig_and_own_scales(method: PrepareMethod) -> None:
    net = Net(Part(lambda m, x: m.fc(m.fc(x))), has_stubs=False).eval()
    with torch.no_grad():
        assert torch.equal(prepare(net, (X,), method=method, own_scales=True, out_dir=None)(X), net(X))


@pytest.mark.in_turns("method", "way", "name")
@pytest.mark.parametrize("method", [PrepareMethod.JIT_STRIP, PrepareMethod.SYMBOLIC])
@pytest.mark.parametrize("way", ["attribute", "module_name", "hybrid_dict"])
@pytest.mark.parametrize("name", [name for name in PARTS if name not in ("a FloatFunctional", "a write in place")])
def test_hybrid_puts_stubs_around_a_float_part(method: PrepareMethod, way: str, name: str) -> None:
    """The guides' step-wise quantization: `hybrid=True` lifts the restriction."""
    net = Net(Part(PARTS[name]), has_stubs=False).eval()
    configured: dict[str, Any] = {"qconfig_setter": default_calibration_qconfig_setter}
    if way == "hybrid_dict":
        configured["hybrid_dict"] = {"module_name": ["b"]}
    else:
        configured = WAYS[way](net)
    given = copy.deepcopy(net)
    if way == "attribute":
        given.qconfig, given.b.qconfig = INT8, None
    model = prepare(given, (X,), method=method, hybrid=True, out_dir=None, **configured)
    calibrate(model, [X], progress=False)
    with torch.no_grad():
        out, wanted = model(X), net(X)
        assert float((out - wanted).norm() / wanted.norm()) < 0.1
        assert torch.equal((convert_fx if method is PrepareMethod.SYMBOLIC else convert)(model)(X), out)
