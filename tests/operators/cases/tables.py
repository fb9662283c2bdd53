"""Activations and functions of one variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as horizon_nn
from tests.operators.cases.base import Case, cases, module

POSITIVE = dict(low=0.3, high=4.0)
UNIT = dict(low=-0.95, high=0.95)

ACTIVATIONS = cases(
    ("relu", module(nn.ReLU)),
    ("relu-in-place", module(nn.ReLU, inplace=True)),
    ("functional-relu", lambda x: F.relu(x)),
    ("functional-relu-in-place", lambda x: F.relu(x, inplace=True)),
    ("torch-relu", lambda x: torch.relu(x)),
    ("method-relu", lambda x: x.relu()),
    ("method-relu-in-place", lambda x: x.relu_()),
    ("relu6", module(nn.ReLU6)),
    ("functional-relu6", lambda x: F.relu6(x)),
    is_smooth=False,
    low=-8.0,
    high=8.0,
    steps8=0.51,  # 6 is put on the grid
)

# A segment table is within one step of the function; the training route is rounded from the function itself.
TABLE: dict[str, Any] = dict(steps16=1.51, train_steps16=2)

MODULES = cases(
    ("sigmoid", module(nn.Sigmoid), dict(low=-8.0, high=8.0)),
    ("tanh", module(nn.Tanh), dict(low=-4.0, high=4.0)),
    ("silu", module(nn.SiLU), dict(low=-8.0, high=8.0)),
    ("silu-in-place", module(nn.SiLU, inplace=True)),
    ("gelu", module(nn.GELU), dict(low=-6.0, high=6.0)),
    ("gelu-tanh", module(nn.GELU, approximate="tanh")),
    ("exp", module(horizon_nn.Exp)),
    ("reciprocal", module(horizon_nn.Reciprocal), POSITIVE),
    ("sqrt", module(horizon_nn.Sqrt), POSITIVE),
    ("rsqrt", module(horizon_nn.Rsqrt), POSITIVE),
    ("rsqrt-epsilon", module(horizon_nn.Rsqrt, epsilon=0.1), POSITIVE),
    ("acos", module(horizon_nn.Acos), UNIT),
    ("acosh", module(horizon_nn.Acosh), dict(low=1.1, high=6.0)),
    ("asin", module(horizon_nn.Asin), UNIT),
    ("asinh", module(horizon_nn.Asinh), dict(low=-9.0, high=9.0)),
    ("atan", module(horizon_nn.Atan), dict(low=-9.0, high=9.0)),
    ("atanh", module(horizon_nn.Atanh), UNIT),
    ("logit", lambda x: torch.logit(x, 1e-2), dict(low=0.02, high=0.98)),
    ("logit-module", module(horizon_nn.Logit), dict(low=0.02, high=0.98)),
    ("cos", module(horizon_nn.Cos), dict(low=-6.0, high=6.0)),
    ("cosh", module(horizon_nn.Cosh)),
    ("erf", module(horizon_nn.Erf)),
    ("hard-log", module(horizon_nn.HardLog), POSITIVE),
    ("pow-2", module(horizon_nn.Pow, 2)),
    ("pow-3", module(horizon_nn.Pow, exponent=3)),
    ("pow-broken", module(horizon_nn.Pow, 1.7), POSITIVE),
    ("pow-negative", module(horizon_nn.Pow, -2, max_value=20.0), POSITIVE),
    ("selu", module(horizon_nn.Selu)),
    ("torch-nn-selu", module(nn.SELU, inplace=True)),
    ("sin", module(horizon_nn.Sin), dict(low=-6.0, high=6.0)),
    ("sinh", module(horizon_nn.Sinh)),
    ("tan", module(horizon_nn.Tan), dict(low=-1.3, high=1.3)),
    ("segment-lut", module(horizon_nn.SegmentLUT, torch.sinc)),
    ("segment-lut-evenly", module(horizon_nn.SegmentLUT, torch.sin, auto_divide_strategy="evenly", max_segments=32)),
    ("elu", module(nn.ELU, 0.7)),
    ("celu", module(nn.CELU, alpha=1.3)),
    ("softplus", module(nn.Softplus, beta=2), dict(low=-8.0, high=8.0)),
    ("mish", module(nn.Mish), dict(low=-6.0, high=6.0)),
    ("log-sigmoid", module(nn.LogSigmoid), dict(low=-6.0, high=6.0)),
    ("softsign", module(nn.Softsign)),
    ("tanhshrink", module(nn.Tanhshrink)),
    **TABLE,
)

# Kinks: where the input is rounded across one, the slope is another.
KINKED = cases(
    ("leaky-relu", module(nn.LeakyReLU, 0.2)),
    ("leaky-relu-in-place", module(nn.LeakyReLU, 0.1, inplace=True)),
    ("functional-leaky-relu", lambda x: F.leaky_relu(x, 0.3)),
    ("functional-leaky-relu-in-place", lambda x: F.leaky_relu(x, negative_slope=0.3, inplace=True)),
    ("functional-leaky-relu-underscore", lambda x: F.leaky_relu_(x)),
    ("hardsigmoid", module(nn.Hardsigmoid), dict(low=-5.0, high=5.0)),
    ("functional-hardsigmoid", lambda x: F.hardsigmoid(x)),
    ("hardswish", module(nn.Hardswish), dict(low=-5.0, high=5.0)),
    ("functional-hardswish", lambda x: F.hardswish(x, inplace=True)),
    ("softshrink", module(nn.Softshrink, 0.3)),
    ("functional-softshrink", lambda x: F.softshrink(x, 0.4)),
    ("hardshrink", module(nn.Hardshrink)),
    ("torch-hardshrink", lambda x: torch.hardshrink(x, lambd=0.7)),
    ("threshold", module(nn.Threshold, 0.5, 0.25)),
    ("functional-threshold", lambda x: F.threshold(x, 0.1, -0.2)),
    **TABLE,
    is_smooth=False,
)

FUNCTIONS = cases(
    ("functional-sigmoid", lambda x: F.sigmoid(x)),
    ("special-expit", lambda x: torch.special.expit(x)),
    ("functional-silu", lambda x: F.silu(x)),
    ("functional-silu-in-place", lambda x: F.silu(x, inplace=True)),
    ("functional-gelu", lambda x: F.gelu(x)),
    ("functional-gelu-tanh", lambda x: F.gelu(x, approximate="tanh")),
    ("functional-elu", lambda x: F.elu(x, 0.5)),
    ("functional-celu", lambda x: F.celu(x, alpha=0.8)),
    ("functional-selu", lambda x: F.selu(x)),
    ("functional-softplus", lambda x: F.softplus(x, beta=3, threshold=10)),
    ("functional-mish", lambda x: F.mish(x)),
    ("functional-logsigmoid", lambda x: F.logsigmoid(x)),
    ("functional-softsign", lambda x: F.softsign(x)),
    ("functional-tanhshrink", lambda x: F.tanhshrink(x)),
    ("operator-pow", lambda x: x**2),
    ("operator-pow-root", lambda x: x**0.5, POSITIVE),
    ("operator-pow-negative", lambda x: x**-1.5, POSITIVE),
    ("torch-pow", lambda x: torch.pow(x, exponent=3)),
    ("method-pow", lambda x: x.pow(2)),
    ("method-pow-in-place", lambda x: x.pow_(2)),
    ("number-pow", lambda x: 2**x),
    **TABLE,
)


def _spelled(name: str, **facts: Any) -> list[Case]:
    """A function as torch's function, as a tensor's method, and in place where torch has that."""
    spellings: list[tuple] = [(f"torch-{name}", lambda x: getattr(torch, name)(x))]
    spellings.append((f"method-{name}", lambda x: getattr(x, name)()))
    if hasattr(Tensor, f"{name}_") and name not in ("acosh", "asinh", "atanh"):  # torch's own lose their gradient
        spellings.append((f"method-{name}-in-place", lambda x: getattr(x, f"{name}_")()))
    return cases(*spellings, **{**TABLE, **facts})


SPELLED = [
    case
    for name, facts in {
        "sigmoid": {}, "tanh": {}, "exp": {}, "sqrt": POSITIVE, "rsqrt": POSITIVE, "reciprocal": POSITIVE,
        "log": POSITIVE, "log2": POSITIVE, "log10": POSITIVE, "log1p": POSITIVE, "acos": UNIT, "asin": UNIT,
        "arctan": {}, "atan": {}, "acosh": dict(low=1.1, high=6.0), "asinh": {}, "atanh": UNIT, "cos": {}, "cosh": {},
        "sin": {}, "sinh": {}, "tan": dict(low=-1.3, high=1.3), "erf": {}, "exp2": {}, "expm1": {}, "square": {},
    }.items()
    for case in _spelled(name, **facts)
]  # fmt: skip

# Results are whole numbers and the scale is 1, so they are exact; there is no gradient, as in torch.
WHOLE: dict[str, Any] = dict(low=-20.0, high=20.0, steps8=0.0, steps16=0.0)
ROUNDING = [
    *cases(
        ("ceil", module(horizon_nn.Ceil)),
        ("floor", module(horizon_nn.Floor)),
        ("floor-of-small", module(horizon_nn.Floor), dict(low=-0.3, high=0.3)),
        ("floor-of-large", module(horizon_nn.Floor), dict(low=-400.0, high=400.0, steps8=0.5)),  # a scale beyond 1
        ("round", module(horizon_nn.Round)),
        ("sign", module(horizon_nn.Sign)),
        ("trunc", module(horizon_nn.Trunc)),
        **WHOLE,
    ),
    *[c for name in ("ceil", "floor", "round", "sign", "trunc") for c in _spelled(name, **WHOLE, train_steps16=1)],
]

# On the grid of the input: nothing is rounded but the limits.
ON_GRID = cases(
    ("torch-abs", lambda x: torch.abs(x)),
    ("method-abs", lambda x: x.abs()),
    ("method-abs-in-place", lambda x: x.abs_()),
    ("operator-abs", lambda x: abs(x)),
    ("torch-absolute", lambda x: torch.absolute(x)),
    ("torch-clamp", lambda x: torch.clamp(x, -1.1, 0.9)),
    ("torch-clamp-min", lambda x: torch.clamp(x, min=-0.3)),
    ("torch-clip", lambda x: torch.clip(x, max=0.7)),
    ("method-clamp", lambda x: x.clamp(0.1, 1)),
    ("method-clamp-none", lambda x: x.clamp(None, 0.5)),
    ("method-clamp-in-place", lambda x: x.clamp_(min=0)),
    ("method-clamp-min", lambda x: x.clamp_min(-1)),
    ("method-clamp-max", lambda x: x.clamp_max(0.4)),
    ("clamp-beyond-the-range", lambda x: x.clamp(-50, 50)),
    ("clamp-outside-of-the-range", lambda x: x.clamp(3.0, 4.0)),
    ("clamp-crossed", lambda x: x.clamp(1.0, -1.0)),
    ("clamp-by-a-tensor", lambda x, y: torch.clamp(x, min=y), dict(shapes=((2, 6, 5, 7), (1, 6, 1, 1)))),
    ("clamp-by-tensors", lambda x, y: x.clamp(y, y.abs()), dict(shapes=((2, 6, 5, 7), (2, 1, 5, 7)))),
    ("clamp-by-constants", lambda x: torch.clamp(x, torch.linspace(-2, 0, 9), torch.linspace(0, 1, 9))),
    ("hardtanh", module(nn.Hardtanh)),
    ("hardtanh-in-place", module(nn.Hardtanh, -0.5, 1.5, inplace=True)),
    ("functional-hardtanh", lambda x: F.hardtanh(x, max_val=0.2)),
    ("nan-to-num", lambda x: torch.nan_to_num(x, 0.0)),
    is_smooth=False,
)


def _prelu(count: int) -> Any:
    def make() -> nn.Module:
        prelu = nn.PReLU(count)
        nn.init.uniform_(prelu.weight, -0.4, 0.8)
        prelu.weight.data[0] = 0.0 if count > 1 else 0.3
        return prelu

    return make


class _Slopes(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.linspace(-0.4, 0.8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class _FixedSlopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.linspace(-0.4, 0.8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.slopes)


OTHERS = [
    *cases(
        ("prelu", _prelu(1)),
        ("prelu-channels", _prelu(6)),
        ("prelu-channels-of-vectors", _prelu(6), dict(shapes=((5, 6),))),
        ("prelu-1d", _prelu(1), dict(shapes=((7,),))),
        ("functional-prelu", module(_Slopes, F.prelu)),
        ("functional-prelu-of-a-buffer", module(_FixedSlopes)),
        ("torch-prelu", module(_Slopes, torch.prelu)),
        ("tensor-prelu", module(_Slopes, lambda x, weight: x.prelu(weight))),
        is_smooth=False,
    ),
    *cases(
        ("glu", module(nn.GLU)),
        ("glu-channels", module(nn.GLU, dim=1)),
        ("functional-glu", lambda x: F.glu(x, 1)),
        shapes=((2, 6, 5, 8),),
        steps8=0.6,  # the gate is an int16 number
        steps16=3.0,  # an int16 gate is within 1.5 steps, and the product is rounded
        train_steps16=3,
    ),
    *cases(
        ("atan2", module(horizon_nn.Atan2)),
        ("torch-atan2", lambda y, x: torch.atan2(y, x)),
        ("torch-arctan2-broadcast", lambda y, x: torch.arctan2(y, x), dict(shapes=((2, 6, 5, 7), (6, 1, 1)))),
        ("method-atan2", lambda y, x: y.atan2(x)),
        ("atan2-of-other-scales", lambda y, x: torch.atan2(y * 0.01, x), dict(steps8=0.55)),
        ("atan2-to-the-right", lambda y, x: torch.atan2(x, y), dict(low=0.5, steps16=4.7, train_steps16=5)),
        shapes=((2, 6, 5, 7), (2, 6, 5, 7)),
        steps8=0.52,  # differences of logarithms in 16 bits: 1.7e-4 radians, whatever the scale
        steps16=2.3,
        train_steps16=3,
        is_smooth=False,  # at the negative x axis it jumps
    ),
]


CASES = [*ACTIVATIONS, *MODULES, *KINKED, *FUNCTIONS, *SPELLED, *ROUNDING, *ON_GRID, *OTHERS]
