"""Functions and hooks that hold the model: in a copy of it they hold the copy, and what they write is read."""

from __future__ import annotations

import copy
import functools
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.capture.plain_model import copy_model
from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert
from tests.routes import calibrate, prepared_on

ROUTES = ("traced", "SYMBOLIC", "JIT_STRIP", "JIT")


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.gate = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)


class Functions(Body):
    """Attributes that are functions: of the model, of a layer, of one another, in lists, with defaults."""

    def __init__(self) -> None:
        super().__init__()
        gate = self.gate
        self.head = lambda x: self.conv(x)
        self.rest = [lambda x, gain=0.5: gate(x) * gain, functools.partial(lambda x, head: head(x), head=self.head)]
        self.table = {"by default": (lambda x, model=self: model.gate(x),)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.quant(x))
        for f in self.rest:
            x = f(x)
        return self.dequant(self.table["by default"][0](x))


class Extractor(Body):
    """Hooks that keep what the forward reads afterwards."""

    def __init__(self, has_closures: bool) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.conv.register_forward_hook(self._kept("conv") if has_closures else self._keep)
        self.gate.register_forward_pre_hook(lambda m, args: self.features.update(before=args[0]))

    def _kept(self, name: str) -> Any:
        def keep(m: nn.Module, args: tuple, out: Tensor) -> None:
            self.features[name] = out

        return keep

    def _keep(self, m: nn.Module, args: tuple, out: Tensor) -> None:
        self.features["conv"] = out

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(torch.relu(self.conv(self.quant(x))))
        return self.dequant(y + self.features["conv"] * self.features["before"])


FEATURES: dict[str, Any] = {}
STORE = SimpleNamespace(out=None)
LATEST: Any = None


def _keep_globally(m: nn.Module, args: tuple, out: Tensor) -> None:
    global LATEST
    FEATURES["kept"], STORE.out, LATEST = [out], out, out


class GlobalExtractor(Body):
    """A hook that keeps what the forward reads in globals: a dictionary, an object, a name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.register_forward_hook(lambda m, args, out: _keep_globally(m, args, out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(torch.relu(self.conv(self.quant(x))))
        return self.dequant((y + FEATURES["kept"][0]) * STORE.out + LATEST)


class Tap:
    """An object that is no module, with a hook and its handle."""

    def __init__(self, layer: nn.Module) -> None:
        self.out: Any = None
        self.handle = layer.register_forward_hook(self.keep)

    def keep(self, m: nn.Module, args: tuple, out: Tensor) -> None:
        self.out = out


class TappedExtractor(Body):
    def __init__(self) -> None:
        super().__init__()
        self.taps = [Tap(self.conv)]

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.gate(self.conv(self.quant(x))) + self.taps[0].out)


class Head:
    """An object that is no module and calls some."""

    def __init__(self, layers: Any, run: Any) -> None:
        self.layers, self.run = layers, run

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(self.layers[0](x))


class HeldByObjects(Body):
    def __init__(self) -> None:
        super().__init__()
        run = functools.partial(lambda x, layer: layer(x), layer=self.gate)
        self.head = SimpleNamespace(call=Head(deque([self.conv]), self.gate.forward), run=run)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.head.run(self.head.call(self.quant(x))))


class HookedWhileItRuns(Body):
    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handle = self.conv.register_forward_hook(lambda m, args, out: kept.append(out))
        y = self.gate(self.conv(self.quant(x)))
        handle.remove()
        return self.dequant(y + kept[0])


MODELS = {
    "functions": Functions,
    "hooks": functools.partial(Extractor, True),
    "methods as hooks": functools.partial(Extractor, False),
    "hooks that write globals": GlobalExtractor,
    "hooks of objects": TappedExtractor,
    "layers of objects": HeldByObjects,
    "hooks of the forward": HookedWhileItRuns,
}


@pytest.mark.in_turns("name", "route", of=2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("route", ROUTES)
def test_parts_of_the_prepared_model_are_used(route: str, name: str) -> None:
    torch.manual_seed(0)
    net, x, other = MODELS[name]().eval(), torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        want = net(other)
        net(x)  # what hooks keep is of another input now
        prepared = calibrate(prepared_on(route, net, (torch.cat([x, other]),), "qint16"), (torch.cat([x, other]),))
        got = prepared(other)
        assert float((got - want).norm() / want.norm()) < 0.02
        assert torch.equal(got, copy.deepcopy(prepared)(other))
        assert torch.equal(got, convert(copy.deepcopy(prepared))(other))
        assert torch.equal(net(other), want)
    assert all(type(value) is Tensor for value in getattr(net, "features", {}).values())


@pytest.mark.parametrize("route", ["traced", "JIT_STRIP"])
def test_a_layer_that_a_function_holds_is_trained(route: str) -> None:
    net, x = Functions().eval(), torch.randn(2, 4, 6, 6)
    prepared = calibrate(prepared_on(route, net, (x,)), (x,)).train()
    prepared(x).square().mean().backward()
    assert all(p.grad is not None for p in prepared.parameters())
    assert all(p.grad is None for p in net.parameters())


def test_what_is_not_of_the_model_stays_shared() -> None:
    seen: list[Any] = []
    net: Any = nn.Identity()
    net.count = lambda x: seen.append((x, net))
    copied: Any = copy_model(net, "prepare")
    copied.count(1)
    assert seen == [(1, copied)]
    net.plain = seen.append
    assert copy_model(net, "prepare").plain is not None


def test_functions_that_hold_themselves() -> None:
    net: Any = nn.Identity()
    net.depths = []

    def down(depth: int) -> None:
        net.depths.append(depth)
        if depth:
            down(depth - 1)

    net.down = down
    copied: Any = copy.deepcopy(copy_model(net, "prepare"))
    copied.down(2)
    assert copied.depths == [2, 1, 0] and net.depths == []


def test_hooks_of_others_are_not_called_by_tracing() -> None:
    net, x, seen = Extractor(True).eval(), torch.randn(2, 4, 6, 6), []
    net.conv.register_forward_hook(lambda m, args, out: seen.append(out))
    prepared_on("traced", net, (x,))
    assert seen == []


@pytest.mark.parametrize("route", ["traced", "JIT_STRIP", "eager"])
def test_handles_of_hooks_are_those_of_the_prepared_model(route: str) -> None:
    net: Any = HeldByObjects().eval()
    net.tap = Tap(net.conv)
    x = torch.randn(2, 4, 6, 6)
    prepared: Any = calibrate(prepared_on(route, net, (x,)), (x,))
    for model in (prepared, copy.deepcopy(prepared), convert(copy.deepcopy(prepared))):
        assert model.tap is not net.tap
        model.tap.out = None
        model(x)
        assert model.tap.out is not None
        model.tap.handle.remove()
        assert not model.conv._forward_hooks
    assert net.conv._forward_hooks


class ByNumbers(Body):
    """Hooks that need numbers: the forward reads what one of them writes, and not what the other does."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.seen = 1.0, []
        self.conv.register_forward_hook(self._measure)
        self.gate.register_forward_hook(self._log)

    def _measure(self, m: nn.Module, args: tuple, out: Tensor) -> None:
        self.level = float(out.abs().max())

    def _log(self, m: nn.Module, args: tuple, out: Tensor) -> None:
        self.seen.append(float(out.abs().max()))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.gate(self.conv(self.quant(x)))) / self.level


def test_a_hook_that_cannot_be_followed_is_named() -> None:
    with pytest.warns(
        QuantizationWarning, match=r"`ByNumbers._measure` \(test_kept_functions.py:\d+\) of `conv` with `level`"
    ) as told:
        prepared_on("traced", ByNumbers().eval(), (torch.randn(2, 4, 6, 6),))
    assert not any("_log" in str(w.message) for w in told)


LOG: dict[str, Any] = {}


class Logging(Body):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.quant(x))
        LOG["conv"] = y
        return self.dequant(self.gate(y))


def test_globals_hold_no_values_of_a_traced_forward() -> None:
    before = LOG["conv"] = torch.zeros(1)
    with pytest.warns(QuantizationWarning, match="its forward writes to `LOG`"):
        prepared_on("traced", Logging().eval(), (torch.randn(2, 4, 6, 6),))
    assert list(LOG.values()) == [before]
    prepared_on("traced", GlobalExtractor().eval(), (torch.randn(2, 4, 6, 6),))
    kept = (*FEATURES.get("kept", ()), STORE.out, LATEST)
    assert not any(isinstance(value, torch.fx.Proxy) for value in kept)
