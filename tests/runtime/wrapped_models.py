"""Models with code that tracing does not enter, and what is asked of each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.fx_helper import wrap
from tests.routes import as_numbers

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
Code = Callable[[Any, Tensor], Any]


class Parts(nn.Module):
    """What the code of the tests may use."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.ff, self.ff2, self.fc = FloatFunctional(), FloatFunctional(), nn.Linear(8, 8)
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)])
        self.block = Block()
        self.norm, self.inner_dequant, self.inner_quant = nn.LayerNorm(8), DeQuantStub(), QuantStub()
        self.level = nn.Parameter(torch.randn(2, 4, 1, 1))
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.register_buffer("shift", torch.randn(8))
        self.head = nn.Softmax(1)
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.5, 2)

    def doubled(self, x: Tensor) -> Tensor:
        return self.conv(x) * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x) + x * 0.5)


class Single(Parts):
    """One wrapped method between the stubs."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.body = code

    def doubled(self, x: Tensor) -> Tensor:
        assert isinstance(self, Single) and self.__class__ is Single
        return super().doubled(x) + 1

    @wrap()
    def inner(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.inner(self.quant(x)))


def helper(net: Any, x: Tensor) -> Tensor:
    return net.ff.mul(x, x) - x


def in_place(s: Any, x: Tensor) -> Tensor:
    y = s.conv(x)
    y += x
    y.mul_(0.5)
    y[:, :1] = x[:, :1]
    return F.relu_(y)


def loop(s: Any, x: Tensor) -> Tensor:
    for layer in s.layers:
        x = F.relu(layer(x)) + x
    return x


def branch(s: Any, x: Tensor) -> Tensor:
    return s.conv(x) if x.shape[0] > 1 and x.dim() == 4 and isinstance(s.conv, nn.Conv2d) else x.flatten()


def several(s: Any, x: Tensor) -> Tensor:
    parts = list(x.chunk(2, 1))
    store = {"a": parts[0] * 2, "b": parts[1] + 1}
    return torch.cat(list(store.values()), 1)


def float_inside(s: Any, x: Tensor) -> Tensor:
    y = s.inner_dequant(s.conv(x))
    y = torch.special.erf(y) if y.dim() == 4 else y
    return s.inner_quant(y) + x


CODE: dict[str, Code] = {
    "modules": lambda s, x: s.ff.add(s.fc(x), x),
    "conv, bn and relu": lambda s, x: s.relu(s.bn(s.conv(x))),
    "functions": lambda s, x: torch.sigmoid(x) * x + 0.5,
    "methods of tensors": lambda s, x: x.mean(1, keepdim=True).sub(x).abs().clamp(0, 2),
    "cat and stack": lambda s, x: torch.cat([x, x * 2], 1).sum(1) + torch.stack([x, x]).mean((0, 2)),
    "matmul": lambda s, x: torch.matmul(x, x.transpose(2, 3)).softmax(-1),
    "resize and pool": lambda s, x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0, mode="bilinear"),
    "grid_sample": lambda s, x: F.grid_sample(x, torch.zeros(2, 2, 2, 2), align_corners=False),
    "layer norm": lambda s, x: s.norm(x) + F.layer_norm(x, (8,)),
    "parameter": lambda s, x: x * s.level.view(2, 4, 1, 1) + s.shift,
    "part of a parameter": lambda s, x: x + torch.split(s.level, 1)[1],
    "layer as a function": lambda s, x: F.linear(x, s.weight, s.shift),
    "weight of a layer": lambda s, x: F.conv2d(x, s.conv.weight, padding=1),
    "module of the user's": lambda s, x: s.block(x) + s.block(x * 0.5),
    "helper": lambda s, x: helper(s, x) + helper(s, x * 0.1),
    "in place": in_place,
    "loop": loop,
    "control flow": branch,
    "containers": several,
    "float inside": float_inside,
    "own positions": lambda s, x: x + torch.arange(8.0),
    "getattr by name": lambda s, x: getattr(s, "co" + "nv")(x),
    "mask": lambda s, x: torch.where(x > 0, x, x * 0.1),
    "casts": lambda s, x: (x.float() + 1).to(x.dtype).type_as(x),
    "nothing": lambda s, x: x,
    "maximum and pow": lambda s, x: torch.maximum(x, -x).pow(2) / 3,
    "the method of a base class": lambda s, x: s.doubled(x),
    "one module twice": lambda s, x: s.fc(s.fc(x)),
    "unused results": lambda s, x: x.max(1)[0] + x.topk(1, 1)[0].squeeze(1),
}


def near(net: nn.Module, qat: nn.Module, x: Tensor = X, limit: float = 0.1) -> None:
    with torch.no_grad():
        wanted, found = as_numbers(net(x)), as_numbers(qat(x))
    for a, b in zip(wanted, found, strict=True):
        assert float((a - b).norm() / a.norm().clamp_min(1e-6)) < limit


def train(qat: nn.Module, x: Tensor = X) -> list[nn.Parameter]:
    """A step of training; the parameters that have got a gradient."""
    qat.train()
    set_fake_quantize(qat, FakeQuantState.QAT)
    parameters = list(qat.parameters())
    optimizer = torch.optim.SGD(parameters, 1e-3)
    sum(y.float().pow(2).mean() for y in pytree.tree_leaves(qat(x.clone().requires_grad_()))).backward()
    optimizer.step()
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return [p for p in parameters if p.grad is not None]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    @wrap()
    def fold(self, x: Tensor) -> Tensor:
        return self.conv(x).mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fold(x) + x)


class Plain(Parts):
    """Code that a file can have."""

    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return F.relu(self.block(self.conv(x)) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.inner(self.quant(x)))
