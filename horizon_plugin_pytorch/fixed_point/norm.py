"""Sizes of groups of integers: norms, variances; and division by a norm.

Sums are sums of integers, so no order of summation changes them. What follows, on one number a group, is a chain of
single IEEE float64 operations, each correctly rounded, so that every route gets the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.normalization import pieces
from horizon_plugin_pytorch.fixed_point.reduction import exact_sum, is_beyond_float32
from horizon_plugin_pytorch.fixed_point.rescaling import rescale_

# What is measured: the sum of squares, of squared deviations (times the count), of magnitudes; or one magnitude.
SQUARES, VARIANCE, MAGNITUDES, LARGEST, SMALLEST = "squares", "variance", "magnitudes", "largest", "smallest"


def is_wide(kind: str, count: int, largest: int) -> bool:
    """Can the sum over so many values pass 2**24?"""
    if kind in (LARGEST, SMALLEST):
        return False
    return is_beyond_float32(float(count) * (largest if kind == MAGNITUDES else largest**2))


def _measure(q: Tensor, dims: list[int], keepdim: bool, kind: str, is_double: bool) -> Tensor:
    if kind == LARGEST:
        return torch.abs(q).amax(dims, keepdim).double()
    if kind == SMALLEST:
        return torch.abs(q).amin(dims, keepdim).double()
    if kind == MAGNITUDES:
        return exact_sum(torch.abs(q), dims, keepdim, is_double).double()
    squares = q.double() if is_double else torch.mul(q, q)
    if is_double:
        squares.mul_(squares)
    measure = squares.sum(dims, keepdim).double()
    if kind == SQUARES:
        return measure
    count = 1
    for dim in dims:
        count *= q.shape[dim]
    total = exact_sum(q, dims, keepdim, is_double).double()
    return measure.mul_(count).sub_(total.mul_(total))


@operator(
    "norm(Tensor q, int[] dims, bool keepdim, str kind, bool is_root, float factor, bool is_double, int low, int high) "
    "-> Tensor"
)
def norm(
    q: Tensor,
    dims: list[int],
    keepdim: bool,
    kind: str,
    is_root: bool,
    factor: float,
    is_double: bool,
    low: int,
    high: int,
) -> Tensor:
    """``clamp(floor(m * factor + 0.5))`` with the measure ``m`` of each group, or its square root."""
    measure = _measure(q, dims, keepdim, kind, is_double)
    if is_root:
        measure.sqrt_()
    return measure.mul_(factor).add_(0.5).floor_().clamp_(low, high).float()


@operator(
    "divide_by_norm(Tensor q, int[] dims, str kind, float gain, float smallest, bool is_double, int low, int high) "
    "-> Tensor"
)
def divide_by_norm(
    q: Tensor, dims: list[int], kind: str, gain: float, smallest: float, is_double: bool, low: int, high: int
) -> Tensor:
    """``clamp(round(q * float32(gain / max(m, smallest))))`` with the norm ``m`` of each group."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for piece in pieces(q, dims):
        x, y = piece.of(q), piece.of(out)
        measure = _measure(x, dims, True, kind, is_double)
        if kind == SQUARES:
            measure.sqrt_()
        measure.clamp_(min=smallest)
        factor = torch.full_like(measure, gain).div_(measure)  # `gain / measure` would multiply by a reciprocal
        torch.mul(x, factor.float(), out=y).round_().clamp_(low, high)
    return out


@operator("cumsum(Tensor q, int dim, Tensor factor, bool is_double, int low, int high) -> Tensor")
def cumsum(q: Tensor, dim: int, factor: Tensor, is_double: bool, low: int, high: int) -> Tensor:
    """``clamp((cumsum(q) * M + 2**(n-1)) >> n)``."""
    return rescale_(torch.cumsum(q.double() if is_double else q, dim), factor, low, high)
