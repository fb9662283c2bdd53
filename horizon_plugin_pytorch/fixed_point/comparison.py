"""Comparing and choosing between tensors of different scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.blocks import blockwise
from horizon_plugin_pytorch.fixed_point.library import operator

# An 8-bit integer times a 16-bit multiplier is exact in float32, a 16-bit one times 24 bits in float64.
_NARROW_BITS = 16
_WIDE_BITS = 24
RELATIONS = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}


def choose_comparison(scale_a: float, scale_b: float, is_narrow: bool) -> tuple[float, float]:
    """Factors for both operands of a comparison: the coarser grid is brought to the finer one, without rounding.

    >>> choose_comparison(0.75, 0.25, True), choose_comparison(0.25, 0.25, True), choose_comparison(0.25, 0.75, True)
    ((3.0, 1.0), (1.0, 1.0), (1.0, 3.0))
    """
    is_first = scale_a >= scale_b
    mantissa, exponent = math.frexp(scale_a / scale_b if is_first else scale_b / scale_a)
    bits = _NARROW_BITS if is_narrow else _WIDE_BITS
    factor = math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)
    return (factor, 1.0) if is_first else (1.0, factor)


@operator("compare(Tensor a, Tensor b, float factor_a, float factor_b, bool is_narrow, str relation) -> Tensor")
def compare(a: Tensor, b: Tensor, factor_a: float, factor_b: float, is_narrow: bool, relation: str) -> Tensor:
    """``a * Ma <relation> b * Mb`` on integers; one of the factors is 1."""
    if is_narrow:
        return RELATIONS[relation](_times(a, factor_a), _times(b, factor_b))
    return blockwise(lambda x, y: RELATIONS[relation](_times(x.double(), factor_a), _times(y.double(), factor_b)), a, b)


def _times(q: Tensor, factor: float) -> Tensor:
    return q if factor == 1 else q * factor


def on_grid_between(numbers: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Numbers in steps of a grid, for comparing with its integers: exact where a number lies on the grid (its float32
    values count), else halfway between its neighbours. Beyond the range, one step outside.

    >>> on_grid_between(torch.tensor([0.5, 0.3, -9.1, 1e9]), torch.tensor([0.25]), -128, 127)
    tensor([  2.0000,   1.5000, -36.5000, 128.0000])
    """
    value, step = numbers.float(), scale.detach().float()
    below = torch.floor(value.double() / step.double()).clamp(low - 1, high + 1).float()
    # The quotient may lie on the wrong side of an integer by its own rounding.
    below = below - (below * step > value).float()
    below = below + ((below + 1) * step <= value).float()
    return torch.where(below * step == value, below, below + 0.5).clamp(low - 1, high + 1)


@operator(
    "extremum(Tensor a, Tensor b, Tensor factor_a, Tensor factor_b, bool is_minimum, int low, int high) -> Tensor"
)
def extremum(a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, is_minimum: bool, low: int, high: int) -> Tensor:
    """The larger (or smaller) of two tensors after each is requantized; rounding keeps the order, so it comes last."""
    factor_a, factor_b = _alike(factor_a, factor_b)
    choose = torch.minimum if is_minimum else torch.maximum
    if factor_a.dtype == torch.float32:
        left, right = a * factor_a, b * factor_b
        return choose(left, right, out=left if left.shape == right.shape else None).round_().clamp_(low, high)

    def chosen(x: Tensor, y: Tensor) -> Tensor:
        scaled = choose(x.double().mul_(factor_a), y.double().mul_(factor_b))
        return scaled.add_(0.5).floor_().float().clamp_(low, high)

    return blockwise(chosen, a, b)


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors without axes, in float64 if one of them is; the value of a factor does not depend on its dtype."""
    a, b = a.reshape(()), b.reshape(())
    return (a, b) if a.dtype == b.dtype else (a.double(), b.double())
