"""Quantize, dequantize, requantize, and sums and products of two tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horizon_plugin_pytorch.dtype import QuantDType
from horizon_plugin_pytorch.fixed_point.blocks import blockwise
from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.rescaling import multiplier_and_shift, rescale_

# 8-bit operands times 15-bit multipliers: two such products and a half sum exactly in float32.
_NARROW_BITS = 15
_WIDE_BITS = 24
_SUM_BITS = 36  # of 16-bit operands: their products and a half sum exactly in float64
_OFFSET_BITS = 51
_MOST_TRIED = 256  # inputs of an 8-bit tensor: few enough to try each


def along(values: Tensor, axis: int, dim: int) -> Tensor:
    """Shape per-channel values so that they broadcast along `axis` of a `dim`-dimensional tensor."""
    if values.numel() == 1 or axis < 0:
        return values.reshape(()) if dim == 0 else values
    shape = [1] * dim
    shape[axis] = -1
    return values.reshape(shape)


@operator("quantize(Tensor x, Tensor scale, int axis, int low, int high) -> Tensor")
def quantize(x: Tensor, scale: Tensor, axis: int, low: int, high: int) -> Tensor:
    """``clamp(round(x / scale))``, halves to even; NaN is 0, since no integer stands for it."""
    return torch.div(x, along(scale, axis, x.dim())).nan_to_num_().round_().clamp_(low, high)


@operator("dequantize(Tensor q, Tensor scale, int axis) -> Tensor")
def dequantize(q: Tensor, scale: Tensor, axis: int) -> Tensor:
    """``q * scale`` in float32; the zero of an integer has no sign, and becomes +0."""
    return torch.mul(q, along(scale, axis, q.dim())).add_(0.0)


@operator("requantize(Tensor q, Tensor factor, int axis, int low, int high) -> Tensor")
def requantize(q: Tensor, factor: Tensor, axis: int, low: int, high: int) -> Tensor:
    """``clamp((q * M + 2**(n-1)) >> n)`` with ``factor = M / 2**n``."""
    if factor.numel() == 1 and factor.dtype == torch.float64:
        return blockwise(lambda x: rescale_(x, factor, low, high), q)
    factor = along(factor, axis, q.dim())
    if factor.dtype == torch.float32:
        return torch.mul(q, factor).round_().clamp_(low, high)
    return rescale_(q.clone(), factor, low, high)


def choose_sum_factors(ratio_a: float, ratio_b: float, is_narrow: bool) -> tuple[float, float]:
    """Two factors with a common shift, ``Ma / 2**n`` and ``Mb / 2**n``, for a sum of two tensors."""
    bits = _NARROW_BITS if is_narrow else _SUM_BITS
    largest = max(abs(ratio_a), abs(ratio_b))
    shift = bits - math.frexp(largest)[1]
    shift = min(shift, 22 if is_narrow else 50)
    limit = (1 << bits) - 1

    def factor(ratio: float) -> float:
        return math.ldexp(max(-limit, min(limit, round(math.ldexp(ratio, shift)))), -shift)

    return factor(ratio_a), factor(ratio_b)


@operator("add(Tensor a, Tensor b, float factor_a, float factor_b, bool is_narrow, int low, int high) -> Tensor")
def add(a: Tensor, b: Tensor, factor_a: float, factor_b: float, is_narrow: bool, low: int, high: int) -> Tensor:
    """``clamp((a * Ma + b * Mb + 2**(n-1)) >> n)``; a negative factor subtracts.

    Bytes, of which the result has no more than 8 bits, give bytes.
    """
    if torch.int8 in (a.dtype, b.dtype):
        return blockwise(lambda x, y: _sum_(x.float() * factor_a, y.float(), factor_b, low, high).to(torch.int8), a, b)
    if not is_narrow:
        return blockwise(lambda x, y: _sum_(x.double() * factor_a, y, factor_b, low, high), a, b)
    return _sum_(a * factor_a, b, factor_b, low, high)


def _sum_(left: Tensor, right: Tensor, factor: float, low: int, high: int) -> Tensor:
    is_whole = left.shape == right.shape or left.shape == torch.broadcast_shapes(left.shape, right.shape)
    total = left.add_(right, alpha=factor) if is_whole else torch.add(left, right, alpha=factor)
    return total.add_(0.5).floor_().float().clamp_(low, high)


@operator("mul(Tensor a, Tensor b, Tensor factor, int low, int high) -> Tensor")
def mul(a: Tensor, b: Tensor, factor: Tensor, low: int, high: int) -> Tensor:
    """``clamp((a * b * M + 2**(n-1)) >> n)``."""
    if factor.dtype == torch.float32:
        return rescale_(a * b, factor, low, high)
    return blockwise(lambda x, y: rescale_(x.double() * y, factor, low, high), a, b)


def smallest_divisor(dtype: QuantDType) -> float:
    """The magnitude, in steps, that a divisor counts as at least: 1/256 of its format's range.

    >>> from horizon_plugin_pytorch.dtype import qint8, qint16
    >>> smallest_divisor(qint8), smallest_divisor(qint16)
    (0.5, 128.0)
    """
    return 2.0 ** (dtype.bits - 9)


def away_from_zero(x: Tensor, limit: Tensor | float) -> Tensor:
    """`x` with magnitudes below `limit` raised to it; 0 becomes positive.

    >>> away_from_zero(torch.tensor([-3.0, -0.1, 0.0]), 0.5)
    tensor([-3.0000, -0.5000,  0.5000])
    """
    signed = x + 0.0  # not -0
    return signed.abs().clamp(min=limit).copysign(signed)


def choose_quotient_factor(ratio: float) -> float:
    """The ratio of scales of a quotient as ``M / 2**n`` with a 20-bit ``M``."""
    multiplier, shift = multiplier_and_shift(torch.tensor([ratio], dtype=torch.float64))
    return math.ldexp(int(multiplier), -int(shift))


@operator("div(Tensor a, Tensor b, float factor, float smallest, int low, int high) -> Tensor")
def div(a: Tensor, b: Tensor, factor: float, smallest: float, low: int, high: int) -> Tensor:
    """``clamp(floor(a * M / 2**n / b + 1/2))``, with magnitudes of `b` below `smallest` raised to it; float64."""

    def quotient(x: Tensor, y: Tensor) -> Tensor:
        ratio = x.double().mul_(factor) / away_from_zero(y, smallest)
        return ratio.add_(0.5).floor_().float().clamp_(low, high)

    return blockwise(quotient, a, b)


@operator("affine(Tensor q, Tensor factor, Tensor offset, int axis, int low, int high) -> Tensor")
def affine(q: Tensor, factor: Tensor, offset: Tensor, axis: int, low: int, high: int) -> Tensor:
    """``clamp((q * M + B + 2**(n-1)) >> n)`` per channel; ``factor = M / 2**n``, ``offset = B / 2**n``, float64.

    Where `choose_affine` proved that float32 gives the same, `factor` is float32 and `offset` has the half in it.
    """
    dim = q.dim()
    factor, offset = along(factor, axis, dim), along(offset, axis, dim)
    if factor.dtype == torch.float32:
        return q.mul(factor).add_(offset).floor_().clamp_(low, high)
    return q.double().mul_(factor).add_(offset).add_(0.5).floor_().float().clamp_(low, high)


def choose_affine(
    ratio: Tensor, offset: Tensor, inputs: tuple[int, int] | None = None, low: int = 0, high: int = 0
) -> tuple[Tensor, Tensor]:
    """Multiplier and offset of each channel on a common power of two, exact in float64.

    The multiplier has 24 bits; fewer where an offset that dwarfs it needs the room, since ``q * M + B`` must stay
    below 2**52. Offsets are limited to +-2**32, far beyond every output range.

    Args:
        inputs: the smallest and largest input. Where there are few, float32 is tried on each, with outputs clamped to
            ``[low, high]``, and taken if it gives the same integers.

    >>> choose_affine(torch.tensor([0.0]), torch.tensor([50.25]))
    (tensor([0.], dtype=torch.float64), tensor([50.2500], dtype=torch.float64))
    """
    ratio = ratio.detach().double().reshape(-1)
    offset = offset.detach().double().reshape(-1).clamp(-(2.0**32), 2.0**32)
    by_ratio = _WIDE_BITS - torch.frexp(ratio)[1]
    by_offset = _OFFSET_BITS - torch.frexp(offset)[1]
    shift = torch.where(ratio == 0, by_offset, torch.minimum(by_ratio, by_offset)).clamp(max=50).double()
    multiplier, bias = torch.round(torch.ldexp(ratio, shift)), torch.round(torch.ldexp(offset, shift))
    exact = torch.ldexp(multiplier, -shift), torch.ldexp(bias, -shift)
    if inputs is None or inputs[1] - inputs[0] > _MOST_TRIED:
        return exact
    fast = exact[0].float(), (exact[1] + 0.5).float()
    q = torch.arange(inputs[0], inputs[1] + 1, dtype=torch.float32, device=ratio.device)
    q = q.unsqueeze(1).repeat(1, max(exact[0].numel(), exact[1].numel()))
    is_same = torch.equal(affine(q, *fast, 1, low, high), affine(q, *exact, 1, low, high))
    return fast if is_same else exact
