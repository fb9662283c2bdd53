"""Recording runs a model in training mode too, unless its code cannot tell the modes apart."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from horizon_plugin_pytorch.capture.mode_blind import is_mode_blind
from horizon_plugin_pytorch.capture.recording import record_runs

X = torch.randn(2, 3, 4, 4)


class Net(nn.Module):
    """Adds something in training mode, and finds out about the mode in the way that `asks` gives."""

    def __init__(self, asks: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.0)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.bn(self.conv(x)))
        return torch.sigmoid(x) if self.asks(self, x) else x


def in_training(module: nn.Module) -> bool:
    return module.training


helpers = types.ModuleType("helpers")
helpers.inner = types.ModuleType("helpers.inner")  # type: ignore[attr-defined]
helpers.inner.in_training = in_training  # type: ignore[attr-defined]


class Mode:
    """An object that knows about modes."""

    def of(self, module: nn.Module) -> bool:
        return in_training(module)

    def __call__(self, module: nn.Module, x: Tensor) -> bool:
        return self.of(module)


def decorated(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


COUNT = [0]


def counted(module: nn.Module, x: Tensor) -> bool:
    """Another branch in the second forward, whatever the mode."""
    COUNT[0] += 1
    return COUNT[0] % 2 == 0


def counting() -> Callable[[nn.Module, Tensor], bool]:
    met: list[int] = []

    def asks(module: nn.Module, x: Tensor) -> bool:
        met.append(len(met))
        return len(met) % 2 == 0

    return asks


ASKS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "attribute": lambda module, x: module.training,
    "by name": lambda module, x: getattr(module, "training"),  # noqa: B009
    "function": lambda module, x: in_training(module),
    "function of a module": lambda module, x: helpers.inner.in_training(module),
    "partial": functools.partial(lambda of, module, x: of(module), in_training),
    "default": lambda module, x, of=in_training: of(module),
    "object": Mode(),
    "bound method": Mode().__call__,
    "class": lambda module, x: Mode().of(module),
    "decorated": decorated(torch.no_grad()(lambda module, x: module.training)),
    "gradients": lambda module, x: torch.is_grad_enabled(),
    "gradients of a tensor": lambda module, x: x.requires_grad,
    "values": lambda module, x: bool(x.mean().abs() < 1e-5),  # as a batch norm in training mode gives
    "array": lambda module, x: abs(x.detach().numpy().mean()) < 1e-5,
    "length": lambda module, x: len(x[x > 1e9]) == 0 and len(x.flatten()[x.flatten() > 1.8]),
    "state": counted,
    "state in a closure": counting(),
}


@pytest.mark.parametrize("way", ASKS)
def test_a_model_that_can_tell_the_modes_apart_runs_in_both(way: str) -> None:
    _, runs, _ = record_runs(Net(ASKS[way]), (X,))
    assert len(runs) == 2


@pytest.mark.parametrize("way", [way for way in ASKS if way != "length"])
def test_branches_of_training_mode_are_recorded(way: str) -> None:
    COUNT[0] = 0
    net = Net(ASKS[way])
    with torch.no_grad():  # no mean of the bias in eval mode
        net.conv.bias.fill_(1.0)
    graph, _, _ = record_runs(net, (X,))
    assert any(node.target is torch.sigmoid for node in graph.nodes)


class Switch(Net):
    def train(self, mode: bool = True) -> Switch:
        self.asks = (lambda module, x: True) if mode else (lambda module, x: False)
        return super().train(mode)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.conv.register_forward_hook(lambda module, args, out: torch.sigmoid(out) if module.training else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@pytest.mark.parametrize("make", [lambda: Switch(ASKS["attribute"]), Hooked], ids=["train", "hook"])
def test_what_train_changes_and_hooks_are_read(make: Callable[[], nn.Module]) -> None:
    graph, runs, _ = record_runs(make(), (X,))
    assert len(runs) == 2 and any(node.target is torch.sigmoid for node in graph.nodes)


class Block(nn.Module):
    """Ordinary code: functions, shapes, types, containers, other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.1)
        self.act, self.parts = F.relu, [functools.partial(torch.add, alpha=2)]

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = self.act(self.drop(self.bn(self.conv(x.to(torch.float32)))))
        y = self.parts[0](x, y).reshape(n, c, h * w).reshape(x.size())
        if y.dtype != x.dtype or len(y) != n:
            raise ValueError("another shape or type")
        return y[:, :, : h // 2] if h > 2 else y


def test_code_that_cannot_tell_the_modes_apart_runs_once() -> None:
    net = nn.Sequential(Block(), Block())
    assert len(record_runs(net, (X,))[1]) == 1


def test_a_dropout_in_place_writes_in_training_alone() -> None:
    assert not is_mode_blind(nn.Sequential(nn.Linear(2, 2), nn.Dropout(inplace=True)))


def test_a_function_that_somebody_put_into_a_class_of_torch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    monkeypatch.setattr(nn.Sequential, "__len__", lambda self: 2)
    assert is_mode_blind(net)
    monkeypatch.setattr(nn.Sequential, "__len__", lambda self: 2 - self.training * 0)
    assert not is_mode_blind(net)
