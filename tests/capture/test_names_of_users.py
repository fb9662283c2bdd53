"""Modules, buffers, parameters and attributes may have any name: of this package, of torch.fx, of Python."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.capture.graph_text import compare_graphs
from horizon_plugin_pytorch.errors import TraceError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    calibrate,
    convert,
    prepare,
)
from horizon_plugin_pytorch.quantization.explain import explain
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.utils.check_model import check_qat_model

OURS = ["march", "choices", "_generated_add_0", "_generated_quant_0", "_constant_0", "activation_post_process", "scale",
        "sites", "path", "module", "own_scales", "numbers_read", "wrapped_modules"]  # fmt: skip
TORCHS = ["graph", "code", "meta", "recompile"]
PYTHONS = ["class", "None", "a-b", "0"]


class Net(nn.Module):
    """One part of the model has the name."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant, self.fc, self.inner = QuantStub(), DeQuantStub(), nn.Linear(8, 8), nn.ModuleDict()
        self.name, self.kind = name, kind
        if kind == "module":
            self.add_module(name, nn.Linear(8, 8))
        elif kind == "buffer":
            self.register_buffer(name, torch.randn(8))
        elif kind == "parameter":
            self.register_parameter(name, nn.Parameter(torch.randn(8)))
        elif kind == "attribute":
            self.__dict__[name] = 2.0
        else:
            self.inner.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        if self.kind == "entry":
            return self.dequant(self.inner[self.name](x) + self.fc(x))
        part: Any = getattr(self, self.name)
        return self.dequant(part(x) + self.fc(x) if self.kind == "module" else self.fc(x) * part + x)


@pytest.mark.in_turns("kind", "name", of=2)
@pytest.mark.parametrize("kind", ["module", "buffer", "parameter", "attribute", "entry"])
@pytest.mark.parametrize("name", OURS + TORCHS + PYTHONS)
def test_any_name_is_free(name: str, kind: str) -> None:
    set_march(March.NASH_M)
    net, x = Net(name, kind).eval(), torch.randn(4, 8)
    setter = default_calibration_qconfig_setter
    runs = prepare(net, (x,), setter, out_dir=None)
    models = [runs]
    if name in TORCHS and kind not in ("attribute", "entry"):
        with pytest.raises(TraceError, match=f"`{name}` of `Net` has the name.*JIT_STRIP"):
            prepare(net, (x,), setter, method="symbolic", out_dir=None)
    elif not (name in TORCHS and kind == "attribute"):
        models.append(prepare(net, (x,), setter, method="symbolic", out_dir=None))
    for model in models:
        calibrate(model, [x], progress=False)
        model.load_state_dict(model.state_dict())
        with torch.no_grad():
            wanted, found = net(x), model(x)
            assert (found - wanted).norm() < 0.05 * wanted.norm()
            assert torch.equal(found, convert(copy.deepcopy(model))(x))
            assert torch.equal(found, pickle.loads(pickle.dumps(model))(x))


@pytest.mark.parametrize("name", ["graph", "march", "choices"])
def test_the_notes_of_a_prepared_model_are_found_whatever_it_has(name: str) -> None:
    set_march(March.NASH_M)
    x = torch.randn(4, 8)
    model = prepare(Net(name, "module").eval(), (x,), default_calibration_qconfig_setter, out_dir=None)
    assert isinstance(getattr(model, name), nn.Module)
    assert "fc" in explain(model, "fc")
    assert compare_graphs(model, copy.deepcopy(model)) == ""
    check_qat_model(model, (x,), save_results=False)


def test_words_of_python_below_numbered_modules() -> None:
    """The path of a module is then read by `getattr` in the code that torch makes, and by a word of Python after it."""

    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.levels = nn.ModuleList([nn.ModuleDict({"for": nn.Linear(8, 8), "form": nn.Linear(8, 8)})])

        def forward(self, x: Tensor) -> Tensor:
            level: Any = self.levels[0]
            return self.dequant(level["form"](level["for"](self.quant(x))) * level["for"].weight.shape[0])

    set_march(March.NASH_M)
    net, x = Numbered().eval(), torch.randn(4, 8)
    model = prepare(net, (x,), default_calibration_qconfig_setter, method="symbolic", out_dir=None)
    calibrate(model, [x], progress=False)
    with torch.no_grad():
        assert (model(x) - net(x)).norm() < 0.05 * net(x).norm()
        assert torch.equal(model(x), convert(copy.deepcopy(model))(x))


class Functions(nn.Module):
    """A part without modules."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x) * 0.5 + x


class Sum(nn.Module):
    """A part with a module for its sum only."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        return self.sum.add(nn.functional.relu(x) * 0.5, x)


class Parts(nn.Module):
    """A part that has no layers, below a name."""

    def __init__(self, name: str, part: type[nn.Module]) -> None:
        super().__init__()
        self.quant, self.dequant, self.inner, self.name = QuantStub(), DeQuantStub(), nn.ModuleDict(), name
        (self if name in TORCHS else self.inner).add_module(name, part())

    def forward(self, x: Tensor) -> Tensor:
        part: Any = getattr(self, self.name) if self.name in TORCHS else self.inner[self.name]
        return self.dequant(part(self.quant(x)))


@pytest.mark.in_turns("name", "method", "part", of=2)
@pytest.mark.parametrize("name", ["lambda", "class", "0", *TORCHS])
@pytest.mark.parametrize("method", ["jit", "jit-strip", "symbolic"])
@pytest.mark.parametrize("part", [Functions, Sum])
def test_a_name_that_only_generated_modules_are_below(part: type[nn.Module], name: str, method: str) -> None:
    """The graph of the model has no module there; the passes put one."""
    if method == "symbolic" and name in TORCHS:
        return  # refused, see above
    set_march(March.NASH_M)
    net, x = Parts(name, part).eval(), torch.randn(4, 8)
    model = prepare(net, (x,), default_calibration_qconfig_setter, method=method, out_dir=None)
    calibrate(model, [x], progress=False)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(model(x), convert(again)(x))
    assert (model(x) - net(x)).abs().max() < 0.05
