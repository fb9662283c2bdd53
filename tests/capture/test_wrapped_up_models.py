"""Models that something was done to before they are prepared: compiled, distributed, in another type, not yet made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import (
    HorizonError,
    QuantizationConfigError,
    QuantizationWarning,
    UnsupportedOperatorError,
)
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, QuantWrapper, convert, prepare
from tests.routes import calibrate, qconfig


def net() -> nn.Module:
    torch.manual_seed(0)
    return QuantWrapper(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))).eval()


def _compiled_part(leaf: bool) -> nn.Module:
    model = net()
    if leaf:
        model.module[0] = torch.compile(model.module[0], backend="eager")
    else:
        model.module = torch.compile(model.module, backend="eager")
    return model


def _compiled_in_place() -> nn.Module:
    model = net()
    model.compile(backend="eager")
    model.module[0].compile(backend="eager")
    return model


WRAPPERS: dict[str, Callable[[], Any]] = {
    "compiled": lambda: torch.compile(net(), backend="eager"),
    "compiled-in-place": _compiled_in_place,
    "compiled-part": lambda: _compiled_part(False),
    "compiled-layer": lambda: _compiled_part(True),
    "data-parallel": lambda: nn.DataParallel(net()),
    "both": lambda: nn.DataParallel(torch.compile(net(), backend="eager")),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["jit-strip", "symbolic", "eager"])
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.filterwarnings("ignore::horizon_plugin_pytorch.errors.QuantizationWarning")
def test_the_model_inside_is_prepared(name: str, method: str) -> None:
    set_march(March.NASH_M)
    x, found = torch.randn(4, 8), []
    for model in (WRAPPERS[name](), net()):
        inner = getattr(model, "module", model) if isinstance(model, nn.DataParallel) else model
        getattr(inner, "_orig_mod", inner).qconfig = qconfig()
        given = {} if method == "eager" else {"qconfig_dict": {"": qconfig()}}
        prepared = calibrate(prepare(model, (x,), method=method, out_dir=None, **given), (x,))
        with torch.no_grad():
            found.append((prepared(x), convert(prepared)(x), list(prepared.state_dict())))
    (a, b, keys), (c, d, plain_keys) = found
    assert torch.equal(a, c) and torch.equal(b, d) and torch.equal(a, b) and keys == plain_keys


@pytest.mark.slow
def test_what_was_around_the_model_is_told() -> None:
    set_march(March.NASH_M)
    with pytest.warns(QuantizationWarning, match="takes `QuantWrapper` out of DataParallel and torch.compile"):
        prepare(WRAPPERS["both"](), (torch.randn(4, 8),), qconfig_dict={"": qconfig()}, out_dir=None)


def _lazy() -> nn.Module:
    model = net()
    model.module[0] = nn.LazyLinear(8)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], torch.dtype, str]] = {
    "half": (lambda: net().half(), torch.float16, r"at `module.0` has weights of torch.float16.*model.float\(\)"),
    "double": (lambda: net().double(), torch.float64, r"at `module.0` has weights of torch.float64.*model.float\(\)"),
    "lazy": (_lazy, torch.float32, "at `module.0` is lazy and has no weights yet"),
    "meta": (lambda: net().to("meta"), torch.float32, "at `module.0` is on the meta device"),
}


@pytest.mark.parametrize("method", ["jit-strip", "symbolic", "eager"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_float_weights_is_refused_with_the_layer(name: str, method: str) -> None:
    set_march(March.NASH_M)
    make, dtype, message = REFUSED[name]
    model = make()
    model.qconfig = qconfig()
    given = {} if method == "eager" else {"qconfig_dict": {"": qconfig()}}
    with pytest.raises(QuantizationConfigError, match=message):
        prepare(model, (torch.randn(4, 8).to(dtype),), method=method, out_dir=None, **given)


class Lent(nn.Module):
    """A layer is called with another weight than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.fc = QuantStub(), DeQuantStub(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        lent = {"weight": self.fc.weight * 2, "bias": self.fc.bias}
        return self.dequant(torch.func.functional_call(self.fc, lent, (self.quant(x),)))


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_lent_weights_are_refused(method: str) -> None:
    set_march(March.NASH_M)
    with pytest.raises(HorizonError, match="another `weight` than its own|symbolic trace cannot follow `Lent`"):
        prepare(Lent().eval(), (torch.randn(2, 8),), qconfig_dict={"": qconfig()}, method=method, out_dir=None)


class Sized(nn.Module):
    """A transposed convolution that is told the size of its result."""

    def __init__(self, by_name: bool, act: nn.Module) -> None:
        super().__init__()
        self.quant, self.dequant, self.by_name, self.act = QuantStub(), DeQuantStub(), by_name, act
        self.up = nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.act(self.up(x, output_size=[8, 8]) if self.by_name else self.up(x, [8, 8])))


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("act", [nn.Identity, nn.ReLU])  # fused with the layer or not
def test_the_size_of_a_transposed_convolution_is_refused_with_a_remedy(act: Any, by_name: bool, method: str) -> None:
    set_march(March.NASH_M)
    x = torch.randn(1, 2, 4, 4)
    with pytest.raises(UnsupportedOperatorError, match=r"at `up` \(test_wrapped_up_models.py:\d+\).*output_padding"):
        prepare(Sized(by_name, act()).eval(), (x,), qconfig_dict={"": qconfig()}, method=method, out_dir=None)
