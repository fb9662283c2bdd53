"""Every operator of the table in every form that a model can write it: module, function, method, Python operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub


@dataclass(frozen=True)
class Case:
    """One way to write one operator.

    Args:
        name: the test's name.
        make: makes the float module; its forward is written as a user writes it.
        shapes: shapes of the inputs.
        low, high: range of the inputs.
        steps8, steps16: largest distance from the float operator on the same inputs, in output steps.
        train_steps, train_steps16: largest distance between the training route and the exact integers, in output steps,
            for int8 and int16.
        is_smooth: the gradient exists everywhere, so its direction is compared with float's.
        has_weight: compare with float on rounded weights: what is left is the error of the arithmetic.
    """

    name: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((2, 6, 7, 9),)
    low: float = -2.0
    high: float = 2.0
    steps8: float = 0.51
    steps16: float = 0.51
    train_steps: float = 1.0
    train_steps16: float = 1.0
    is_smooth: bool = True
    has_weight: bool = False


class Body(nn.Module):
    """A function in a module of its own, so that what it calls has a scope."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


class Functional(nn.Module):
    """A FloatFunctional and what is called on it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.op = FloatFunctional()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.op, *inputs)


class OneInput(nn.Module):
    """QuantStub, the operator, DeQuantStub; gives the integers and the real values."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.quant, self.body, self.dequant = QuantStub(), body, DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        y = self.body(self.quant(x))
        return y, self.dequant(y)


class TwoInputs(nn.Module):
    """As `OneInput`, with two inputs."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.quant, self.other, self.body, self.dequant = QuantStub(), QuantStub(), body, DeQuantStub()

    def forward(self, x: Tensor, z: Tensor) -> Any:
        y = self.body(self.quant(x), self.other(z))
        return y, self.dequant(y)


def wrap(body: nn.Module, count: int) -> nn.Module:
    return OneInput(body) if count == 1 else TwoInputs(body)


def _cases(*cases: tuple, **common: Any) -> list[Case]:
    """Cases with common facts; a function becomes a `Body`."""
    out = []
    for name, what, *more in cases:
        facts = {**common, **(more[0] if more else {})}
        is_plain = isinstance(what, type) or getattr(what, "__name__", "") == "make"
        out.append(Case(name, what if is_plain else (lambda w=what: Body(w)), **facts))
    return out


def _module(cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return cls(*args, **kwargs)

    return make


def _functional(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return Functional(function)

    return make


def _batch_norm() -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        bn = nn.BatchNorm2d(6)
        nn.init.uniform_(bn.weight, -1.5, 1.5)
        nn.init.uniform_(bn.bias, -1.0, 1.0)
        bn.running_mean.uniform_(-1, 1)
        bn.running_var.uniform_(0.2, 2)
        return bn.eval()

    return make


def _layer_norm(make_norm: Callable[[], nn.LayerNorm]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        norm = make_norm()
        if norm.weight is not None:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        if norm.bias is not None:
            nn.init.uniform_(norm.bias, -0.5, 0.5)
        return norm

    return make


PAIR = ((2, 6, 5, 7), (2, 6, 5, 7))
MATRICES = ((2, 3, 5, 8), (2, 3, 8, 4))
GEMM = dict(has_weight=True, steps16=0.54)  # a multiplier has 20 bits: 3 % of a step at 32,767
POSITIVE = dict(low=0.3, high=4.0)
SCALAR = dict(steps8=0.51, steps16=0.51)

GEMMS = _cases(
    ("conv", _module(nn.Conv2d, 6, 8, 3)),
    ("conv-1x1-no-bias", _module(nn.Conv2d, 6, 4, 1, bias=False)),
    ("conv-stride-padding", _module(nn.Conv2d, 6, 8, 3, 2, 1)),
    ("conv-uneven-kernel", _module(nn.Conv2d, 6, 8, (1, 5), (2, 1), (0, 2))),
    ("conv-groups", _module(nn.Conv2d, 6, 4, 3, padding=1, groups=2)),
    ("conv-depthwise", _module(nn.Conv2d, 6, 12, 3, padding=1, groups=6)),
    ("conv-dilation", _module(nn.Conv2d, 6, 8, 3, padding=2, dilation=2)),
    ("conv-same", _module(nn.Conv2d, 6, 8, 3, padding="same")),
    ("conv-same-uneven", _module(nn.Conv2d, 6, 8, (2, 4), padding="same")),
    ("conv-same-dilation", _module(nn.Conv2d, 6, 8, (2, 3), padding="same", dilation=(3, 2))),
    ("conv-valid", _module(nn.Conv2d, 6, 8, 3, padding="valid")),
    ("conv-reflect", _module(nn.Conv2d, 6, 8, 3, padding=1, padding_mode="reflect")),
    ("conv-replicate", _module(nn.Conv2d, 6, 8, 3, padding=(2, 1), padding_mode="replicate")),
    ("conv-circular", _module(nn.Conv2d, 6, 8, 3, padding=(1, 2), padding_mode="circular")),
    ("conv-transpose", _module(nn.ConvTranspose2d, 6, 4, 2, 2)),
    ("conv-transpose-padding", _module(nn.ConvTranspose2d, 6, 4, 4, 2, 1)),
    ("conv-transpose-output-padding", _module(nn.ConvTranspose2d, 6, 4, 3, (2, 3), 1, output_padding=(1, 2))),
    ("conv-transpose-groups", _module(nn.ConvTranspose2d, 6, 4, 3, 2, 1, groups=2)),
    ("conv-transpose-depthwise", _module(nn.ConvTranspose2d, 6, 6, 3, 2, 1, 1, groups=6, bias=False)),
    ("conv-transpose-dilation", _module(nn.ConvTranspose2d, 6, 4, 3, dilation=2)),
    ("linear-2d", _module(nn.Linear, 12, 5), dict(shapes=((4, 12),))),
    ("linear-3d", _module(nn.Linear, 12, 5, bias=False), dict(shapes=((2, 3, 12),))),
    ("linear-4d", _module(nn.Linear, 9, 5)),
    ("linear-1d", _module(nn.Linear, 12, 5), dict(shapes=((12,),))),
    **GEMM,
)

ARITHMETIC = _cases(
    ("functional-add", _functional(lambda f, x, y: f.add(x, y))),
    ("functional-sub", _functional(lambda f, x, y: f.sub(x, y))),
    ("functional-mul", _functional(lambda f, x, y: f.mul(x, y))),
    ("functional-cat", _functional(lambda f, x, y: f.cat((x, y), dim=1))),
    ("functional-cat-default-dim", _functional(lambda f, x, y: f.cat([x, y]))),
    ("functional-add-relu", _functional(lambda f, x, y: f.add_relu(x, y)), dict(is_smooth=False)),
    ("torch-add", lambda x, y: torch.add(x, y)),
    ("torch-add-other", lambda x, y: torch.add(x, other=y)),
    ("method-add", lambda x, y: x.add(y)),
    ("method-add-in-place", lambda x, y: x.add_(y)),
    ("operator-add", lambda x, y: x + y),
    ("operator-iadd", lambda x, y: _in_place(x, y, "+")),
    ("torch-sub", lambda x, y: torch.sub(x, y)),
    ("method-sub", lambda x, y: x.sub(y)),
    ("operator-sub", lambda x, y: x - y),
    ("operator-isub", lambda x, y: _in_place(x, y, "-")),
    ("torch-mul", lambda x, y: torch.mul(x, y)),
    ("method-mul-in-place", lambda x, y: x.mul_(y)),
    ("operator-mul", lambda x, y: x * y),
    ("operator-imul", lambda x, y: _in_place(x, y, "*")),
    ("torch-cat", lambda x, y: torch.cat((x, y), 1)),
    ("torch-cat-dim", lambda x, y: torch.cat([x, y], dim=-1)),
    ("torch-concat", lambda x, y: torch.concat((x, y), dim=2)),
    ("cat-of-three", lambda x, y: torch.cat((x, y, x), 1)),
    ("add-broadcast", lambda x, y: x + y, dict(shapes=((2, 6, 5, 7), (1, 6, 1, 1)))),
    ("add-broadcast-left", lambda x, y: x + y, dict(shapes=((6, 1, 1), (2, 6, 5, 7)))),
    ("sub-broadcast-both", lambda x, y: x - y, dict(shapes=((2, 1, 5, 7), (1, 6, 1, 7)))),
    ("mul-broadcast", lambda x, y: x * y, dict(shapes=((2, 6, 5, 7), (2, 6, 1, 1)))),
    ("mul-broadcast-left", lambda x, y: x * y, dict(shapes=((2, 1, 5, 7), (2, 6, 5, 7)))),
    ("add-to-itself", lambda x, y: x + x),
    ("square", lambda x, y: x * x),
    shapes=PAIR,
    steps8=0.53,  # 15-bit factors of a common shift add up to 2 % of a step
    steps16=0.53,
)


def _in_place(x: Any, y: Any, operator: str) -> Any:
    if operator == "+":
        x += y
    elif operator == "-":
        x -= y
    elif operator == "*":
        x *= y
    elif operator == "/":
        x /= y
    return x


MATMULS = _cases(
    ("functional-matmul", _functional(lambda f, x, y: f.matmul(x, y))),
    ("functional-matmul-y-trans", _functional(lambda f, x, y: f.matmul(x, y, y_trans=True)),
     dict(shapes=((2, 3, 5, 8), (2, 3, 4, 8)))),
    ("functional-matmul-x-trans", _functional(lambda f, x, y: f.matmul(x, y, True, False)),
     dict(shapes=((2, 3, 8, 5), (2, 3, 8, 4)))),
    ("torch-matmul", lambda x, y: torch.matmul(x, y)),
    ("torch-bmm", lambda x, y: torch.bmm(x, y), dict(shapes=((3, 5, 8), (3, 8, 4)))),
    ("operator-matmul", lambda x, y: x @ y),
    ("method-matmul-transposed", lambda x, y: x.matmul(y.transpose(-2, -1)), dict(shapes=((2, 3, 5, 8), (2, 3, 4, 8)))),
    ("matmul-broadcast", lambda x, y: x @ y, dict(shapes=((2, 3, 5, 8), (8, 4)))),
    ("matmul-2d", lambda x, y: x @ y, dict(shapes=((5, 8), (8, 4)))),
    shapes=MATRICES,
)  # fmt: skip

SCALARS = _cases(
    ("functional-add-scalar", _functional(lambda f, x: f.add_scalar(x, 0.7))),
    ("functional-mul-scalar", _functional(lambda f, x: f.mul_scalar(x, -1.3))),
    ("add-number", lambda x: x + 3),
    ("number-add", lambda x: 0.25 + x),
    ("iadd-number", lambda x: _in_place(x, 1.5, "+")),
    ("sub-number", lambda x: x - 0.3),
    ("number-sub", lambda x: 1 - x, dict(steps8=1.03, steps16=1.03)),
    ("torch-rsub", lambda x: torch.rsub(x, 2.0), dict(steps8=1.03, steps16=1.03)),
    ("mul-number", lambda x: x * 0.37),
    ("number-mul", lambda x: -2 * x),
    ("imul-number", lambda x: _in_place(x, 0.5, "*")),
    ("div-number", lambda x: x / 3),
    ("idiv-number", lambda x: _in_place(x, 8, "/")),
    ("torch-div", lambda x: torch.div(x, 6.0)),
    ("method-div", lambda x: x.div(1.7)),
    ("operator-neg", lambda x: -x),
    ("torch-neg", lambda x: torch.neg(x)),
    ("method-neg", lambda x: x.neg()),
    ("torch-add-number", lambda x: torch.add(x, 0.1)),
    ("torch-mul-number", lambda x: torch.mul(x, 0.1)),
    **SCALAR,
)

REDUCTIONS = _cases(
    ("functional-sum", _functional(lambda f, x: f.sum(x, dim=1))),
    ("functional-sum-all", _functional(lambda f, x: f.sum(x))),
    ("functional-mean", _functional(lambda f, x: f.mean(x, dim=(2, 3), keepdim=True))),
    ("torch-sum", lambda x: torch.sum(x, 1)),
    ("torch-sum-dims", lambda x: torch.sum(x, dim=(1, -1), keepdim=True)),
    ("method-sum", lambda x: x.sum(-1, True)),
    ("method-sum-all", lambda x: x.sum()),
    ("torch-mean", lambda x: torch.mean(x, dim=[2, 3])),
    ("method-mean", lambda x: x.mean((-2, -1), keepdim=True)),
    ("method-mean-one", lambda x: x.mean(1)),
    ("method-mean-all", lambda x: x.mean()),
)

ACTIVATIONS = _cases(
    ("relu", _module(nn.ReLU)),
    ("relu-in-place", _module(nn.ReLU, inplace=True)),
    ("functional-relu", lambda x: F.relu(x)),
    ("functional-relu-in-place", lambda x: F.relu(x, inplace=True)),
    ("torch-relu", lambda x: torch.relu(x)),
    ("method-relu", lambda x: x.relu()),
    ("method-relu-in-place", lambda x: x.relu_()),
    ("relu6", _module(nn.ReLU6)),
    ("functional-relu6", lambda x: F.relu6(x)),
    is_smooth=False,
    low=-8.0,
    high=8.0,
    steps8=0.51,  # 6 is put on the grid
)

TABLES = _cases(
    ("sigmoid", _module(nn.Sigmoid), dict(low=-8.0, high=8.0)),
    ("torch-sigmoid", lambda x: torch.sigmoid(x)),
    ("method-sigmoid", lambda x: x.sigmoid()),
    ("functional-sigmoid", lambda x: F.sigmoid(x)),
    ("tanh", _module(nn.Tanh), dict(low=-4.0, high=4.0)),
    ("torch-tanh", lambda x: torch.tanh(x)),
    ("method-tanh", lambda x: x.tanh()),
    ("silu", _module(nn.SiLU), dict(low=-8.0, high=8.0)),
    ("functional-silu", lambda x: F.silu(x)),
    ("gelu", _module(nn.GELU), dict(low=-6.0, high=6.0)),
    ("gelu-tanh", _module(nn.GELU, approximate="tanh")),
    ("functional-gelu", lambda x: F.gelu(x)),
    ("functional-gelu-tanh", lambda x: F.gelu(x, approximate="tanh")),
    ("exp", _module(horizon_nn.Exp)),
    ("torch-exp", lambda x: torch.exp(x)),
    ("method-exp", lambda x: x.exp()),
    ("reciprocal", _module(horizon_nn.Reciprocal), POSITIVE),
    ("torch-reciprocal", lambda x: torch.reciprocal(x), POSITIVE),
    ("sqrt", _module(horizon_nn.Sqrt), POSITIVE),
    ("torch-sqrt", lambda x: torch.sqrt(x), POSITIVE),
    ("method-sqrt", lambda x: x.sqrt(), POSITIVE),
    ("rsqrt", _module(horizon_nn.Rsqrt), POSITIVE),
    ("torch-rsqrt", lambda x: torch.rsqrt(x), POSITIVE),
    steps16=1.51,  # a segment table is within one step of the function, then rounds
    train_steps16=2,
)

NORMS = _cases(
    ("batch-norm", _batch_norm()),
    ("softmax", _module(nn.Softmax, dim=1), dict(steps8=0.6, steps16=8)),
    ("softmax-last", _module(nn.Softmax, -1), dict(shapes=((2, 3, 5, 16),), low=-6.0, high=6.0, steps8=0.6, steps16=8)),
    ("torch-softmax", lambda x: torch.softmax(x, -1), dict(steps8=0.6, steps16=8)),
    ("functional-softmax", lambda x: F.softmax(x, dim=2), dict(steps8=0.6, steps16=8)),
    ("method-softmax", lambda x: x.softmax(dim=1), dict(steps8=0.6, steps16=8)),
    ("layer-norm", _layer_norm(lambda: nn.LayerNorm(24)), dict(shapes=((2, 5, 24),), steps8=0.7, steps16=16)),
    ("layer-norm-2-axes", _layer_norm(lambda: nn.LayerNorm((7, 9))), dict(steps8=0.7, steps16=16)),
    ("layer-norm-plain", _layer_norm(lambda: nn.LayerNorm(9, elementwise_affine=False)), dict(steps8=0.7, steps16=16)),
    ("layer-norm-no-bias", _layer_norm(lambda: nn.LayerNorm(9, bias=False)), dict(steps8=0.7, steps16=16)),
    ("layer-norm-dim", _layer_norm(lambda: horizon_nn.LayerNorm([6, 1, 1], dim=1)), dict(steps8=0.7, steps16=16)),
    ("layer-norm-ours", _layer_norm(lambda: horizon_nn.LayerNorm(9)), dict(steps8=0.7, steps16=16)),
    train_steps16=128,  # a step of an inner int16 value can be many steps of the result
)

POOLS = _cases(
    ("max-pool", _module(nn.MaxPool2d, 2), dict(is_smooth=False)),
    ("max-pool-padding", _module(nn.MaxPool2d, 3, 2, 1), dict(is_smooth=False)),
    ("max-pool-ceil", _module(nn.MaxPool2d, 2, 2, ceil_mode=True), dict(is_smooth=False)),
    (
        "max-pool-ceil-padding",
        _module(nn.MaxPool2d, 3, 2, 1, ceil_mode=True),
        dict(is_smooth=False, shapes=((1, 3, 8, 6),)),
    ),
    ("max-pool-dilation", _module(nn.MaxPool2d, (2, 3), 1, (1, 1), 2), dict(is_smooth=False)),
    ("functional-max-pool", lambda x: F.max_pool2d(x, 3, 2), dict(is_smooth=False)),
    ("functional-max-pool-named", lambda x: F.max_pool2d(x, kernel_size=2, ceil_mode=True), dict(is_smooth=False)),
    ("avg-pool", _module(nn.AvgPool2d, 2)),
    ("avg-pool-overlap", _module(nn.AvgPool2d, 3, 1)),
    ("avg-pool-padding", _module(nn.AvgPool2d, 3, 2, 1)),
    ("avg-pool-exclude-padding", _module(nn.AvgPool2d, 3, 2, 1, count_include_pad=False)),
    ("avg-pool-ceil", _module(nn.AvgPool2d, (2, 4), (2, 3), ceil_mode=True)),
    ("avg-pool-ceil-padding", _module(nn.AvgPool2d, 3, 2, 1, ceil_mode=True, count_include_pad=False)),
    ("avg-pool-ceil-include-padding", _module(nn.AvgPool2d, 3, 2, 1, ceil_mode=True), dict(shapes=((1, 3, 8, 6),))),
    ("avg-pool-divisor", _module(nn.AvgPool2d, 2, divisor_override=3)),
    ("functional-avg-pool", lambda x: F.avg_pool2d(x, 3, 2, 1)),
    ("adaptive-one", _module(nn.AdaptiveAvgPool2d, 1)),
    ("adaptive-uneven", _module(nn.AdaptiveAvgPool2d, (3, 4))),
    ("adaptive-larger", _module(nn.AdaptiveAvgPool2d, (9, 4))),
    ("adaptive-none", _module(nn.AdaptiveAvgPool2d, (None, 3))),
    ("functional-adaptive", lambda x: F.adaptive_avg_pool2d(x, (2, 2))),
    ("functional-adaptive-one", lambda x: F.adaptive_avg_pool2d(x, 1)),
)

# A weight is off by at most half a unit on each axis, times a difference of up to 255 (65,535) steps, before rounding.
BILINEAR = dict(steps8=1.5, steps16=1.5)
RESIZES = _cases(
    ("nearest", _module(horizon_nn.Interpolate, scale_factor=2, mode="nearest", recompute_scale_factor=True)),
    ("nearest-fraction", _module(horizon_nn.Interpolate, scale_factor=1.7, mode="nearest")),
    ("nearest-down", _module(horizon_nn.Interpolate, scale_factor=0.6, mode="nearest")),
    ("nearest-size", _module(horizon_nn.Interpolate, size=(10, 5), mode="nearest")),
    ("functional-nearest", lambda x: F.interpolate(x, scale_factor=2)),
    ("upsample-nearest", _module(nn.Upsample, scale_factor=3)),
    ("upsampling-nearest", _module(nn.UpsamplingNearest2d, scale_factor=2)),
    ("bilinear", _module(horizon_nn.Interpolate, scale_factor=2), BILINEAR),
    ("bilinear-recompute", _module(horizon_nn.Interpolate, scale_factor=2.3, recompute_scale_factor=True), BILINEAR),
    ("bilinear-fraction", _module(horizon_nn.Interpolate, scale_factor=2.3), BILINEAR),
    ("bilinear-two-factors", _module(horizon_nn.Interpolate, scale_factor=(1.5, 0.7)), BILINEAR),
    ("bilinear-down", _module(horizon_nn.Interpolate, scale_factor=0.4), BILINEAR),
    ("bilinear-corners", _module(horizon_nn.Interpolate, scale_factor=2, align_corners=True), BILINEAR),
    ("bilinear-size", _module(horizon_nn.Interpolate, size=(9, 4)), BILINEAR),
    ("bilinear-size-corners", _module(horizon_nn.Interpolate, size=(9, 4), align_corners=True), BILINEAR),
    ("bilinear-one-pixel", _module(horizon_nn.Interpolate, size=1, align_corners=True), BILINEAR),
    ("functional-bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False), BILINEAR),
    ("upsample-bilinear", _module(nn.Upsample, scale_factor=1.3, mode="bilinear"), BILINEAR),
    ("upsample-corners", _module(nn.Upsample, size=(13, 11), mode="bilinear", align_corners=True), BILINEAR),
    ("upsampling-bilinear", _module(nn.UpsamplingBilinear2d, scale_factor=2), BILINEAR),
    ("upsampling-bilinear-down", _module(nn.UpsamplingBilinear2d, scale_factor=0.7), BILINEAR),
)

SHAPES = _cases(
    ("reshape", lambda x: x.reshape(2, -1)),
    ("torch-reshape", lambda x: torch.reshape(x, (2, 3, -1))),
    ("view", lambda x: x.view(x.size(0), -1)),
    ("view-shape", lambda x: x.view(x.shape[0], x.shape[1], -1)),
    ("flatten-module", _module(nn.Flatten, 2)),
    ("flatten", lambda x: x.flatten(1)),
    ("torch-flatten", lambda x: torch.flatten(x, 1)),
    ("unflatten", lambda x: x.unflatten(1, (2, 3))),
    ("unflatten-module", _module(nn.Unflatten, 1, (2, 3))),
    ("permute", lambda x: x.permute(0, 2, 3, 1)),
    ("permute-negative", lambda x: torch.permute(x, (0, -1, 1, -2))),
    ("transpose", lambda x: x.transpose(1, -1)),
    ("torch-transpose", lambda x: torch.transpose(x, -2, -1)),
    ("split", lambda x: torch.split(x, 2, 1)[1]),
    ("split-sizes", lambda x: x.split([1, 3, 2], dim=1)[2]),
    ("split-all", lambda x: torch.cat(x.split(3, -1), 1)),
    ("chunk", lambda x: x.chunk(2, 1)[0]),
    ("torch-chunk", lambda x: torch.chunk(x, 4, dim=-2)[3]),
    ("slice", lambda x: x[:, 1:4, ::2, -5:]),
    ("index", lambda x: x[:, 2]),
    ("index-new-axis", lambda x: x[:, None, ..., 1]),
    ("select", lambda x: x.select(1, 3)),
    ("narrow", lambda x: x.narrow(2, 1, 3)),
    ("unbind", lambda x: x.unbind(1)[4]),
    ("pad", lambda x: F.pad(x, (1, 2, 0, 3))),
    ("pad-negative", lambda x: F.pad(x, (-1, 2))),
    ("pad-value", lambda x: F.pad(x, (1, 1), value=0.6)),
    ("pad-value-constant", lambda x: F.pad(x, [1, 1, 2, 0], "constant", -1.1)),
    ("pad-reflect", lambda x: F.pad(x, (2, 1, 1, 1), mode="reflect")),
    ("pad-replicate", lambda x: F.pad(x, (2, 1, 1, 1), mode="replicate")),
    ("pad-circular", lambda x: F.pad(x, (2, 1, 0, 3), mode="circular")),
    ("circular-pad-module", _module(nn.CircularPad2d, (1, 2, 1, 0))),
    ("zero-pad-module", _module(nn.ZeroPad2d, (1, 2, 3, 0))),
    ("constant-pad-module", _module(nn.ConstantPad2d, 1, 0.5)),
    ("replication-pad-module", _module(nn.ReplicationPad2d, 2)),
    ("reflection-pad-module", _module(nn.ReflectionPad2d, (1, 2, 1, 0))),
    ("squeeze", lambda x: x.squeeze(1), dict(shapes=((2, 1, 5, 1),))),
    ("squeeze-all", lambda x: torch.squeeze(x), dict(shapes=((2, 1, 5, 1),))),
    ("unsqueeze", lambda x: x.unsqueeze(-1)),
    ("torch-unsqueeze", lambda x: torch.unsqueeze(x, 0)),
    ("expand", lambda x: x.expand(2, 6, 5, 4), dict(shapes=((2, 6, 5, 1),))),
    ("expand-new-axis", lambda x: x.expand(3, -1, -1), dict(shapes=((6, 5),))),
    ("repeat", lambda x: x.repeat(1, 2, 1, 1)),
    ("repeat-new-axis", lambda x: x.repeat(2, 1, 1, 1, 1)),
    ("pixel-shuffle", _module(nn.PixelShuffle, 2), dict(shapes=((2, 8, 3, 5),))),
    ("functional-pixel-shuffle", lambda x: F.pixel_shuffle(x, 2), dict(shapes=((2, 8, 3, 5),))),
    ("pixel-unshuffle", _module(nn.PixelUnshuffle, 2), dict(shapes=((2, 2, 6, 4),))),
    ("channel-shuffle", _module(nn.ChannelShuffle, 3)),
    ("contiguous", lambda x: x.permute(0, 2, 3, 1).contiguous().view(2, -1)),
    ("flip", lambda x: x.flip(-1)),
    ("amax", lambda x: x.amax(1, keepdim=True)),
    ("torch-amax", lambda x: torch.amax(x, 1)),
    ("roll", lambda x: torch.roll(x, (1, -2), (2, 3))),
    ("dropout", _module(nn.Dropout, 0.5)),
    ("functional-dropout", lambda x: F.dropout(x, 0.5, training=False)),
    ("identity", _module(nn.Identity)),
)

CASES = [*GEMMS, *ARITHMETIC, *MATMULS, *SCALARS, *REDUCTIONS, *ACTIVATIONS, *TABLES, *NORMS, *POOLS, *RESIZES, *SHAPES]
