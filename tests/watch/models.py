"""Models that call operators in every way, and the stages that a model goes through."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    fuse_modules,
    prepare,
    prepare_qat,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.fx_helper import wrap
from tests.routes import qconfig

ROUTES = ("jit", "jit-strip", "symbolic", "eager")
STAGES = ("float", "calibration", "qat", "validation", "converted")


@wrap()
def halved(x: Tensor) -> Tensor:
    """Code that tracing does not enter."""
    return (x * 0.5).flatten(1)


class Block(nn.Module):
    """A layer, its batch norm, a sum and an activation, which are fused."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.sum, self.relu = FloatFunctional(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return self.relu(self.sum.add(y, x))


class Eager(nn.Module):
    """What runs in eager mode too: no functions but those that move values."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem, self.block = nn.Conv2d(3, 4, 1), Block()
        self.shared, self.product = nn.Sigmoid(), FloatFunctional()
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.block(self.stem(self.quant(x)))
        y = self.product.mul(self.shared(x), self.shared(x))
        left, right = y.reshape(-1, 32).chunk(2, 1)
        return {"left": self.dequant(self.fc(self.drop(left))), "others": [self.dequant(right)]}


class Functions(Eager):
    """With functions, in loops and in wrapped code."""

    def forward(self, x: Tensor) -> Any:
        x = self.block(F.relu(self.stem(self.quant(x))))
        for _ in range(2):
            x = torch.cat([x, x + x], 1)[:, 1:5]
        left, right = halved(self.shared(x) * self.shared(x)).chunk(2, 1)
        return {"left": self.dequant(self.fc(self.drop(left))), "others": [self.dequant(right)]}


def net_of(route: str) -> nn.Module:
    """A float model that the route can prepare."""
    torch.manual_seed(0)
    return Eager() if route == "eager" else Functions()


def data(seed: int = 1) -> Tensor:
    """Two images."""
    return torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(seed))


def prepared(net: nn.Module, route: str, dtype: str = "qint8") -> nn.Module:
    """Prepared, not calibrated."""
    net = copy.deepcopy(net).eval()
    if route != "eager":
        return prepare(net, (data(),), qconfig_dict={"": qconfig(dtype)}, method=route, out_dir=None)
    if isinstance(net, Eager):
        net = fuse_modules(net, ["block.conv", "block.bn", "block.sum", "block.relu"])
    net.qconfig = qconfig(dtype)
    return prepare_qat(net)


def stages(route: str, net: nn.Module | None = None, dtype: str = "qint8") -> Iterator[tuple[str, nn.Module]]:
    """The model at each stage of its life; each is a model of its own."""
    net = net_of(route) if net is None else net
    yield "float", net.train()
    qat = prepared(net, route, dtype).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    yield "calibration", copy.deepcopy(qat)
    with torch.no_grad():
        qat(data())
    yield "qat", _in_state(qat, FakeQuantState.QAT).train()
    exact = _in_state(qat, FakeQuantState.VALIDATION)
    yield "validation", exact
    yield "converted", convert_fx(exact) if route == "symbolic" else convert(exact)


def at_stage(route: str, stage: str, net: nn.Module | None = None, dtype: str = "qint8") -> nn.Module:
    """The model at one stage."""
    return next(model for name, model in stages(route, net, dtype) if name == stage)


def _in_state(model: nn.Module, state: FakeQuantState) -> nn.Module:
    model = copy.deepcopy(model)
    set_fake_quantize(model, state)
    return model
