"""Sums over axes and windows, and resampling by integer matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32, rescale_


def weight_bits(input_bits: int) -> int:
    """Fraction bits of a resizing weight: as many as keep its error below one step of the input's format."""
    return 8 if input_bits <= 8 else 16


def exact_sum(q: Tensor, dims: list[int], keepdim: bool, is_double: bool) -> Tensor:
    """The sum of 16-bit integers over axes; `is_double` says that it can pass 2**24, and makes it float64.

    An axis that cannot pass it by itself is summed in float32 first: that is exact, and much faster.
    """
    if not is_double:
        return torch.sum(q, dims, keepdim)
    short = [d for d in dims if 1 < q.shape[d] < EXACT_FLOAT32 >> 15]
    if short:
        q = torch.sum(q, max(short, key=lambda d: q.shape[d]), keepdim=True)
    return torch.sum(q.double(), dims, keepdim)


@operator("sum(Tensor q, int[] dims, bool keepdim, Tensor factor, bool is_double, int low, int high) -> Tensor")
def sum(q: Tensor, dims: list[int], keepdim: bool, factor: Tensor, is_double: bool, low: int, high: int) -> Tensor:
    """``clamp((sum(q) * M + 2**(n-1)) >> n)``; a mean has the count in its factor."""
    return rescale_(exact_sum(q, dims, keepdim, is_double), factor, low, high)


@operator(
    "avg_pool2d(Tensor q, int[] kernel, int[] stride, int[] padding, bool ceil_mode, Tensor factor, bool is_double, "
    "int low, int high) -> Tensor"
)
def avg_pool2d(
    q: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    factor: Tensor,
    is_double: bool,
    low: int,
    high: int,
) -> Tensor:
    """The window's sum, requantized by a factor that holds the window's count: one, or one per output position."""
    total = F.avg_pool2d(q.double() if is_double else q, kernel, stride, padding, ceil_mode, True, divisor_override=1)
    return rescale_(total, factor, low, high)


@operator(
    "avg_pool3d(Tensor q, int[] kernel, int[] stride, int[] padding, bool ceil_mode, Tensor factor, bool is_double, "
    "int low, int high) -> Tensor"
)
def avg_pool3d(
    q: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    factor: Tensor,
    is_double: bool,
    low: int,
    high: int,
) -> Tensor:
    """As `avg_pool2d`, over three axes."""
    total = F.avg_pool3d(q.double() if is_double else q, kernel, stride, padding, ceil_mode, True, divisor_override=1)
    return rescale_(total, factor, low, high)


@operator("resample2d(Tensor q, Tensor rows, Tensor columns, Tensor factor, int low, int high) -> Tensor")
def resample2d(q: Tensor, rows: Tensor, columns: Tensor, factor: Tensor, low: int, high: int) -> Tensor:
    """``clamp((rows @ q @ columns * M + 2**(n-1)) >> n)`` with integer matrices: bilinear resize, adaptive pooling."""
    dtype = rows.dtype
    return rescale_(torch.matmul(rows, torch.matmul(q.to(dtype), columns)), factor, low, high)


@operator(
    "resample3d(Tensor q, Tensor planes, Tensor rows, Tensor columns, Tensor factor, int low, int high) -> Tensor"
)
def resample3d(q: Tensor, planes: Tensor, rows: Tensor, columns: Tensor, factor: Tensor, low: int, high: int) -> Tensor:
    """As `resample2d`, with a matrix for the third axis from the end too."""
    across = torch.matmul(rows, torch.matmul(q.to(rows.dtype), columns))
    total = torch.matmul(planes, across.flatten(-2)).unflatten(-1, across.shape[-2:])
    return rescale_(total, factor, low, high)


def bilinear_positions(source: int, target: int, ratio: float | None, align_corners: bool, bits: int = 8) -> Tensor:
    """Where the outputs of a resized axis lie in its input, in ``1 / 2**bits``.

    Args:
        ratio: source step per output step as torch uses it; None takes ``source / target``.
        bits: see `weight_bits`.

    >>> bilinear_positions(2, 3, None, False)
    tensor([  0., 128., 256.], dtype=torch.float64)
    """
    unit = 1 << bits
    index = torch.arange(target, dtype=torch.float64)
    if source == target:  # torch copies such an axis, whatever the ratio
        return index * unit
    if align_corners:
        position = index * ((source - 1) / (target - 1)) if target > 1 else index * 0
    else:
        step = source / target if ratio is None else ratio
        position = ((index + 0.5) * step - 0.5).clamp(min=0)
    whole = position.floor()
    return (whole * unit + torch.round((position - whole) * unit)).clamp_(max=(source - 1) * unit)


def bilinear_matrix(source: int, positions: Tensor, bits: int) -> Tensor:
    """Integer weights in ``1 / 2**bits`` that resize an axis, one row per output position; each row sums to 2**bits.

    >>> bilinear_matrix(2, bilinear_positions(2, 3, None, False), 8)
    tensor([[256.,   0.],
            [128., 128.],
            [  0., 256.]], dtype=torch.float64)
    """
    unit = 1 << bits
    first = (positions / unit).floor().long()
    weight = positions - first * unit
    matrix = torch.zeros(len(positions), source, dtype=torch.float64)
    row = torch.arange(len(positions))
    matrix.index_put_((row, first), unit - weight, accumulate=True)
    matrix.index_put_((row, (first + 1).clamp(max=source - 1)), weight, accumulate=True)
    return matrix


def adaptive_matrix(source: int, target: int) -> Tensor:
    """Ones where an input position falls into an output's window of adaptive pooling."""
    index = torch.arange(target)
    start = torch.div(index * source, target, rounding_mode="floor").unsqueeze(1)
    end = -torch.div(-(index + 1) * source, target, rounding_mode="floor").unsqueeze(1)
    position = torch.arange(source).unsqueeze(0)
    return ((position >= start) & (position < end)).double()


def is_beyond_float32(largest: float) -> bool:
    """Can a sum that reaches `largest` be wrong in float32?"""
    return largest >= EXACT_FLOAT32
