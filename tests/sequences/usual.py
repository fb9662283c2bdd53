"""Sequences that networks have and that ONNX Runtime rewrites: padding before layers, layers before sums, ..."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE = (2, 6, 7, 9)
ROWS = (2, 5, 9)


@dataclass(frozen=True)
class Usual:
    """A function of quantized tensors and of layers."""

    name: str
    function: Callable[..., Any]
    layers: Callable[[], list[nn.Module]]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, seed: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs that are to be quantized, and plain ones, of which there are none."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.rand(shape, generator=generator) * 4 - 2 for shape in self.shapes], []

    def module(self) -> nn.Module:
        """The function with its layers."""
        torch.manual_seed(0)
        return _Body(self.function, self.layers())


class _Body(nn.Module):
    def __init__(self, function: Callable[..., Any], layers: list[nn.Module]) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, quantized: list[Tensor], plain: list[Tensor]) -> Any:
        return self.function(*self.layers, *quantized)


USUAL: dict[str, Usual] = {}


def _usual(name: str, function: Callable[..., Any], *layers: Callable[[], nn.Module], shapes: tuple = (IMAGE,)) -> None:
    USUAL[name] = Usual(name, function, lambda: [layer() for layer in layers], shapes)


def conv(inputs: int = 6, outputs: int = 6, size: int = 3, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(inputs, outputs, size, **{"padding": size // 2, **settings})


def linear(inputs: int = 9, outputs: int = 9, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs, **settings)


def norm(channels: int = 6) -> nn.Module:
    layer = nn.BatchNorm2d(channels)
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.uniform_(layer.bias, -0.5, 0.5)
    layer.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    return layer.eval()


PADS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: F.pad(x, (1, 1, 1, 1)),
    "value": lambda x: F.pad(x, (1, 0, 2, 1), value=1.3),
    "channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "negative": lambda x: F.pad(x, (-1, 1, 1, -1)),
}
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: F.max_pool2d(x, 3, 2),
    "max-pad": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max-ceil": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "avg": lambda x: F.avg_pool2d(x, 3, 2),
    "avg-pad": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
}
for _pad, _padded in PADS.items():
    for _pool, _pooled in POOLS.items():
        _usual(f"pad-{_pad}-{_pool}", lambda x, p=_padded, q=_pooled: q(p(x)))
    _width = 8 if _pad == "channels" else 6
    for _groups in (1, 2):
        _usual(
            f"pad-{_pad}-conv-relu-{_groups}",
            lambda c, x, p=_padded: F.relu(c(p(x))),
            conv(_width, 6, padding=0, groups=_groups),
        )
    _usual(f"pad-{_pad}-twice", lambda x, p=_padded: F.pad(p(x), (1, 2)))
    _usual(f"relu-pad-{_pad}-max", lambda x, p=_padded: F.max_pool2d(p(F.relu(x)), 2))
    _usual(f"pad-{_pad}-dropout-max", lambda d, x, p=_padded: F.max_pool2d(d(p(x)), 2), nn.Dropout)
    _usual(f"pad-{_pad}-identity-avg", lambda d, x, p=_padded: F.avg_pool2d(d(p(x)), 2), nn.Identity)

# Layers and what is folded into them.
LAYER: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (conv(), IMAGE),
    "conv-no-bias": (conv(bias=False), IMAGE),
    "conv-1x1": (conv(size=1), IMAGE),
    "conv-depthwise": (conv(groups=6), IMAGE),
    "conv-transpose": (lambda: nn.ConvTranspose2d(6, 6, 3, 1, 1), IMAGE),
    "linear": (linear(), IMAGE),
    "linear-no-bias": (linear(bias=False), (5, 9)),
}
AFTER: dict[str, Callable[..., Any]] = {
    "add": lambda y, x: y + x,
    "add-relu": lambda y, x: F.relu(y + x),
    "reversed-add-relu": lambda y, x: F.relu(x + y),
    "sub": lambda y, x: x - y,
    "mul": lambda y, x: y * x,
    "mul-number": lambda y, x: y * 0.37,
    "add-number": lambda y, x: y + 0.4,
    "mul-add": lambda y, x: y * 1.3 + 0.2,
    "mul-add-tensor": lambda y, x: y * x + x,
    "relu": lambda y, x: F.relu(y),
    "relu-clamp": lambda y, x: F.relu(y).clamp(0.1, 0.9),
    "clamp-relu": lambda y, x: F.relu(y.clamp(-0.5, 0.5)),
    "relu6-relu": lambda y, x: F.relu(F.relu6(y)),
    "sigmoid-mul": lambda y, x: y * torch.sigmoid(y),
    "silu": lambda y, x: F.silu(y),
    "hardswish": lambda y, x: F.hardswish(y),
    "leaky": lambda y, x: F.leaky_relu(y, 0.1),
    "gelu": lambda y, x: F.gelu(y),
    "tanh": lambda y, x: torch.tanh(y),
    "softmax": lambda y, x: F.softmax(y, -1),
    "square-mean": lambda y, x: (y * y).mean(-1, keepdim=True),
    "mean-sub": lambda y, x: y - y.mean(-1, keepdim=True),
    "cat-slice": lambda y, x: torch.cat([y, x], 1)[:, 2:9],
    "split-cat": lambda y, x: torch.cat(y.split(2, 1)[::-1], 1),
    "transpose-reshape": lambda y, x: y.transpose(-1, -2).reshape(y.shape[0], -1),
    "reshape-transpose": lambda y, x: y.flatten(1).unsqueeze(1).transpose(1, 2),
    "transpose-matmul": lambda y, x: y @ x.transpose(-1, -2),
    "matmul-transposed": lambda y, x: x.transpose(-1, -2) @ y,
    "max-pool": lambda y, x: F.max_pool2d(y, 2),
    "twice": lambda y, x: y + F.relu(y),
}
for _name, (_make, _shape) in LAYER.items():
    for _after, _then in AFTER.items():
        if _after == "max-pool" and len(_shape) < 4:
            continue
        _usual(f"{_name}-{_after}", lambda f, x, z, t=_then: t(f(x), z), _make, shapes=(_shape, _shape))
    _usual(f"{_name}-{_name}", lambda f, g, x: g(f(x)), _make, _make, shapes=(_shape,))
    _usual(f"{_name}-relu-{_name}-add", lambda f, g, x: x + g(F.relu(f(x))), _make, _make, shapes=(_shape,))
for _groups in (1, 6):
    _usual(
        f"conv-bn-{_groups}-relu6", lambda c, n, x: F.relu6(n(c(x))), conv(bias=False, groups=_groups), lambda: norm()
    )
_usual("bn-conv", lambda n, c, x: c(n(x)), lambda: norm(), conv())
_usual("bn-relu-conv", lambda n, c, x: c(F.relu(n(x))), lambda: norm(), conv())
_usual("bn-bn", lambda n, m, x: m(n(x)), lambda: norm(), lambda: norm())
_usual("max-pool-bn", lambda n, x: n(F.max_pool2d(x, 2)), lambda: norm())

# Products of matrices.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "transpose-matmul": lambda x, y: x @ y.transpose(1, 2),
    "matmul-transpose": lambda x, y: (x @ y.transpose(1, 2)).transpose(1, 2),
    "both-transposed": lambda x, y: x.transpose(1, 2) @ y,
    "scaled": lambda x, y: (x * 0.35) @ (y * 0.35).transpose(1, 2),
    "scaled-after": lambda x, y: (x @ y.transpose(1, 2)) * 0.25,
    "divided-after": lambda x, y: (x @ y.transpose(1, 2)) / 3,
    "add": lambda x, y: x @ y.transpose(1, 2) + 0.5,
    "add-row": lambda x, y: x @ y.transpose(1, 2) + y[:, :1, :5],
    "softmax": lambda x, y: F.softmax((x @ y.transpose(1, 2)) * 0.25, -1) @ y,
    "relu": lambda x, y: F.relu(x @ y.transpose(1, 2)),
    "reshape": lambda x, y: (x @ y.transpose(1, 2)).reshape(1, 2, 5, 5).permute(0, 2, 1, 3),
    "squeeze": lambda x, y: (x.unsqueeze(1) @ y.transpose(1, 2).unsqueeze(1)).squeeze(1),
    "expand": lambda x, y: x @ y[:1].expand(2, 5, 9).transpose(1, 2),
    "chain": lambda x, y: x @ (y.transpose(1, 2) @ x),
}
for _name, _product in PRODUCTS.items():
    _usual(f"matmul-{_name}", _product, shapes=(ROWS, ROWS))


def _product_of(parts: Any) -> Tensor:
    return parts[0] * parts[1]


# What moves values; most of it is merged or dropped.
MOVES: dict[str, Callable[[Tensor], Any]] = {
    "reshape-reshape": lambda x: x.reshape(2, -1).reshape(2, 9, 7, 6),
    "transpose-transpose": lambda x: x.transpose(1, 2).transpose(2, 3),
    "transpose-back": lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2),
    "transpose-relu-back": lambda x: F.relu(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "transpose-pool-back": lambda x: F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1),
    "transpose-softmax-back": lambda x: F.softmax(x.permute(0, 2, 3, 1), -1).permute(0, 3, 1, 2),
    "transpose-mean": lambda x: x.permute(0, 2, 3, 1).mean((1, 2)),
    "transpose-pad": lambda x: F.pad(x.permute(0, 2, 3, 1), (1, 0, 0, 2)),
    "transpose-slice": lambda x: x.permute(0, 2, 3, 1)[:, 1:, ::2, -3:],
    "transpose-gather": lambda x: x.permute(0, 2, 3, 1)[:, [2, 0, 2]],
    "transpose-cat": lambda x: torch.cat([x.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1) * 0.5], -1),
    "transpose-argmax": lambda x: x.permute(0, 2, 3, 1).argmax(-1),
    "transpose-add": lambda x: x.permute(0, 2, 3, 1) + x.permute(0, 2, 3, 1)[:, :1, :1],
    "transpose-where": lambda x: torch.where(x.transpose(1, 2) > 0.3, x.transpose(1, 2), -x.transpose(1, 2)),
    "squeeze-unsqueeze": lambda x: x.unsqueeze(1).squeeze(1).unsqueeze(-1),
    "slice-slice": lambda x: x[:, 1:5][:, 1:3][..., ::2],
    "gather-gather": lambda x: x[:, [3, 1, 0]][:, [2, 0]],
    "gather-slice": lambda x: x[:, [3, 1, 0]][:, 1:],
    "select-select": lambda x: x[:, 2][:, 3],
    "select-stack": lambda x: torch.stack([x[:, 2], x[:, 0], x[:, 5]], 1),
    "split-cat": lambda x: torch.cat(x.split([1, 2, 3], 1), 1),
    "split-cat-turned": lambda x: torch.cat(x.split([1, 2, 3], 1)[::-1], 1),
    "chunk-mul": lambda x: _product_of(x.chunk(2, 1)),
    "unbind-stack": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "cat-slice": lambda x: torch.cat([x, x.flip(1)], 1)[:, 3:9],
    "cat-cat": lambda x: torch.cat([torch.cat([x, x * 0.5], 1), x], 1),
    "cat-split": lambda x: torch.cat([x, x.abs()], 1).split(4, 1)[1],
    "expand-add": lambda x: x + x[:, :1].expand(2, 6, 7, 9),
    "expand-mul": lambda x: x[:, :, :1].expand(2, 6, 7, 9) * x,
    "repeat-slice": lambda x: x.repeat(1, 2, 1, 1)[:, 3:8],
    "pixel-shuffles": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x.repeat(1, 2, 1, 1), 2), 2),
    "upsample-slice": lambda x: F.interpolate(x, scale_factor=2)[..., 1:-1, 1:-1],
    "flip-flip": lambda x: x.flip(2).flip(2).flip(3),
    "roll-roll": lambda x: x.roll(2, 3).roll(-1, 2),
    "shape-arithmetic": lambda x: x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3] // 9, -1),
    "sizes-of-another": lambda x: x[:, :, : x.shape[2] // 2].reshape(x.size(0), -1).view(x.size(0), 6, -1),
}
for _name, _move in MOVES.items():
    _usual(_name, _move)
    _usual(f"{_name}-of-conv", lambda c, x, m=_move: m(c(x)), conv())


# Element by element: sums with 0, products with 1, limits, comparisons, casts, divisions.
ELEMENTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "relu-clamp": lambda x, y: F.relu(x).clamp(-0.5, 1.0),
    "clamp-clamp": lambda x, y: x.clamp(-1.0, 1.0).clamp(0.2, 3.0),
    "relu-relu": lambda x, y: F.relu(F.relu(x)),
    "clamp-empty": lambda x, y: x.clamp(-3.0, -0.9).clamp(0.5, 1.0),
    "hardtanh-relu6": lambda x, y: F.relu6(F.hardtanh(x, -0.7, 0.9)),
    "add-zero": lambda x, y: (x + 0) * 1 - 0,
    "neg-neg": lambda x, y: x.neg().neg(),
    "abs-neg": lambda x, y: -(x.abs()),
    "div-mul": lambda x, y: (1 / (y.abs() + 1)) * x,
    "mul-div": lambda x, y: x * y / (y.abs() + 1.5),
    "add-add": lambda x, y: x + y + x,
    "add-mul": lambda x, y: (x + y) * y,
    "mul-mul": lambda x, y: x * 0.3 * y,
    "sub-square-mean": lambda x, y: ((x - y) ** 2).mean(-1),
    "not-where": lambda x, y: torch.where(~(x > y), x, y),
    "where-where": lambda x, y: torch.where(x > 0, torch.where(y > 0, x, y), y),
    "compare-cast-mul": lambda x, y: (x > y).float() * x,
    "compare-cast-sum": lambda x, y: (x > y).float().sum(-1),
    "compare-compare": lambda x, y: (x > y) & (x < 0.5) | ~(y >= 0.1),
    "cast-chain": lambda x, y: (x > y).float().bool().float() * y,
    "positions": lambda x, y: x.argmax(1).float().long() + y.argmin(1),
    "max-of-max": lambda x, y: x.amax(1).amax(-1),
    "max-min": lambda x, y: torch.maximum(torch.minimum(x, y), x * 0.5),
    "softmax-log": lambda x, y: torch.log(F.softmax(x, 1) + 0.01),
    "exp-sum-div": lambda x, y: x.exp() / x.exp().sum(1, keepdim=True),
    "sigmoid-mul": lambda x, y: torch.sigmoid(x) * y,
    "tanh-sigmoid": lambda x, y: torch.tanh(x) * torch.sigmoid(y),
    "gelu-by-hand": lambda x, y: x * 0.5 * (1 + torch.erf(x * 0.70710678)),
    "layer-norm": lambda x, y: F.layer_norm(x + y, (9,)),
    "layer-norm-by-hand": lambda x, y: (x - x.mean(-1, keepdim=True)) * y,
    "mean-mean": lambda x, y: x.mean(-1).mean(-1),
    "sum-sum": lambda x, y: x.sum(-1, keepdim=True).sum(2),
    "topk-gather": lambda x, y: y.gather(3, x.topk(3, -1).indices),
    "sort-slice": lambda x, y: x.sort(-1).values[..., :3] + y[..., :3],
    "cumsum-sub": lambda x, y: x.cumsum(1) - y,
    "masked-softmax": lambda x, y: F.softmax(x.masked_fill(y > 0, -1e9), -1),
    "dropout-identity": lambda x, y: F.dropout(x, 0.5, training=False).clone() + y,
}
for _name, _elements in ELEMENTS.items():
    _usual(f"elements-{_name}", _elements, shapes=(IMAGE, IMAGE))
