"""Normalisation over groups of values: exact sums, one float64 factor for each group, one rounding for each value.

Sums are sums of integers, so they do not depend on the order of summation. What follows is a chain of single IEEE
operations (division, square root, multiplication, ...), each correctly rounded, so every route gets the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32

# Temporaries of a piece stay in the cache, and the calls for a piece cost little next to its work.
_PIECE = 1 << 18
SMALLEST_VARIANCE = 2.0**-64  # of a constant group without epsilon: its deviations are 0, whatever they are divided by


class Piece:
    """A stretch of one axis, and the same stretch of whatever broadcasts along that axis."""

    def __init__(self, axis: int, start: int, length: int) -> None:
        self.axis, self.start, self.length = axis, start, length  # the axis counts from the end

    def of(self, x: Tensor) -> Tensor:
        """The stretch of a tensor."""
        if x.dim() < -self.axis or x.shape[self.axis] in (1, self.length):
            return x
        return x.narrow(self.axis, self.start, self.length)


def pieces(q: Tensor, dims: list[int], times: int = 1) -> Iterator[Piece]:
    """Cut the longest axis that is not in `dims`, so that each piece holds whole groups.

    Args:
        times: larger pieces by this factor, for work without temporaries of its own.
    """
    free = [axis for axis in range(q.dim()) if axis not in dims]
    axis = max(free, key=lambda a: q.shape[a], default=0)
    length = q.shape[axis]
    step = length if axis in dims else max(times * _PIECE * length // max(q.numel(), 1), 1)
    for start in range(0, length if q.numel() else 0, max(step, 1)):
        yield Piece(axis - q.dim(), start, min(step, length - start))


class Scratch:
    """Memory for temporaries that the pieces of a call take in turn: mapping it anew costs more than the work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of that shape, with anything in it."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < shape.numel():
            buffer = self._buffers[name] = torch.empty(shape.numel(), dtype=dtype, device=self._device)
        return buffer[: shape.numel()].view(shape)

    def like(self, result: Tensor, name: str = "result") -> Tensor:
        """Where to compute a piece of the result: its own memory, if that has no gaps and no bytes."""
        is_room = result.is_contiguous() and result.is_floating_point()
        return result if is_room else self.take(name, result.shape)

    def floats(self, x: Tensor) -> Tensor:
        """Integers in float32; those that are bytes in other memory."""
        return x if x.is_floating_point() else self.take("floats", x.shape).copy_(x)


def _store(value: Tensor, low: int, high: int, out: Tensor) -> None:
    """Round and limit a piece of the result, in the memory where it was computed or in that of bytes."""
    if out.is_floating_point():
        torch.clamp(value.round_(), low, high, out=out)
    else:
        out.copy_(value.round_().clamp_(low, high))


@lru_cache
def _block(length: int, most: int) -> int:
    """The largest divisor of a length that is at most so large; 1 if there is none worth the trouble."""
    return next((b for b in range(min(length, most), 16, -1) if length % b == 0), 1)


def exact_sums(x: Tensor, dims: list[int], largest: int) -> Tensor:
    """Sums of integers over axes, in float64, with the axes kept; no integer is beyond `largest`.

    What cannot pass 2**24 is summed in float32 first, block by block of the last axis: that is exact, and faster.
    """
    count = 1
    for axis in dims:
        count *= x.shape[axis]
    if x.dtype == torch.float64 or count * largest < EXACT_FLOAT32:
        return x.sum(dims, keepdim=True).double()
    block = _block(x.shape[-1], (EXACT_FLOAT32 - 1) // largest)
    if x.dim() - 1 in dims and block > 1:
        x = x.unflatten(-1, (-1, block)).sum(-1)
    return x.double().sum(dims, keepdim=True)


def _over(number: float, x: Tensor) -> Tensor:
    """``number / x`` in one rounding: torch would multiply by the reciprocal."""
    return torch.full_like(x, number).div_(x)


def _divided_(x: Tensor, number: float) -> Tensor:
    """``x / number`` in one rounding on every device, likewise."""
    return x.div_(torch.full_like(x, number))


def folds(rank: int, dims: list[int], weight: Tensor | None, bias: Tensor | None, bits: int) -> bool:
    """Is a group (or one channel of it) one function ``x * a + b``, and that exact enough?

    The product's rounding is then ``2**-24`` of the mean rather than of the deviation, which 8-bit inputs can afford.
    """
    is_constant = all(p is None or p.shape[-1] == 1 for p in (weight, bias))
    return bits <= 8 and rank - 1 in dims and is_constant


def _scale_and_shift(
    out: Tensor, x: Tensor, factor: Tensor, mean: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> None:
    """``x * a + b`` with ``a = factor * weight`` and ``b = bias - mean * a``, computed in float64 for each group."""
    scale = (factor if weight is None else factor * weight.double()).float()
    torch.mul(x, scale, out=out)
    if mean is not None:
        shift = (mean * scale.double()).neg_()
        out.add_((shift if bias is None else shift + bias.double()).float())
    elif bias is not None:
        out.add_(bias)


def _in_steps(
    out: Tensor, x: Tensor, factor: Tensor, mean: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> None:
    """``(x - mean) * factor * weight + bias``, one operation after the other."""
    if mean is None:
        torch.mul(x, factor.float(), out=out)
    else:
        torch.sub(x, mean.float(), out=out).mul_(factor.float())
    if weight is not None:
        out.mul_(weight)
    if bias is not None:
        out.add_(bias)


@operator(
    "normalize(Tensor q, int[] dims, Tensor? weight, Tensor? bias, float gain, float epsilon, bool is_centred, "
    "int bits, int low, int high) -> Tensor"
)
def normalize(
    q: Tensor,
    dims: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    gain: float,
    epsilon: float,
    is_centred: bool,
    bits: int,
    low: int,
    high: int,
) -> Tensor:
    """``clamp(round((q - mean) * r * weight + bias))`` with ``r = gain / sqrt(variance + epsilon)`` for each group.

    Bytes, of which the result has no more than 8 bits, give bytes.

    Args:
        dims: the axes of a group, counted from the front.
        weight, bias: float32, in output steps; they broadcast to `q`.
        epsilon: in squares of input steps.
        is_centred: subtract the mean; otherwise the mean of squares takes the place of the variance.
        bits: of the input's format.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    count = 1
    for axis in dims:
        count *= q.shape[axis]
    shift, least = epsilon * float(count) ** 2, SMALLEST_VARIANCE * float(count) ** 2
    is_folded = folds(q.dim(), dims, weight, bias, bits)
    scratch = Scratch(q.device)
    for piece in pieces(q, dims, 2 if bits <= 8 else 1):
        x, y = scratch.floats(piece.of(q)), piece.of(out)
        value = scratch.like(y)
        wide = x if bits <= 8 else scratch.take("wide", x.shape, torch.float64).copy_(x)
        total = exact_sums(wide, dims, 1 << (bits - 1)) if is_centred else None
        squares = torch.mul(wide, wide, out=value if bits <= 8 else wide)
        spread = exact_sums(squares, dims, 1 << (2 * bits - 2)).mul_(count)  # the variance, times the count squared
        if total is not None:
            spread.sub_(total * total)
        factor = _over(gain * count, spread.add_(shift).clamp_(min=least).sqrt_())
        mean = None if total is None else _divided_(total, count)
        finish = _scale_and_shift if is_folded else _in_steps
        finish(
            value,
            x,
            factor,
            mean,
            None if weight is None else piece.of(weight),
            None if bias is None else piece.of(bias),
        )
        _store(value, low, high, y)
    return out


LOWEST = -(2.0**17)  # below every integer of 16 bits


def _steps(x: Tensor, hidden: Tensor | None, dim: int, out: Tensor) -> Tensor:
    """Steps below the largest value of each group; 0 where a position is left out."""
    shown = x if hidden is None else x.masked_fill(hidden, LOWEST)
    torch.sub(shown.amax(dim, keepdim=True), x, out=out)
    return out if hidden is None else out.masked_fill_(hidden, 0.0)


def _steps_of_bytes(x: Tensor, dim: int) -> Tensor:
    """The same of bytes, as uint8: a difference of two of them is right modulo 256."""
    return torch.sub(x.amax(dim, keepdim=True), x).view(torch.uint8)


def _exponentials(steps: Tensor, hidden: Tensor | None, table: Tensor, scratch: Scratch, out: Tensor) -> Tensor:
    """Their entries in the table; 0 where a position is left out. `out` may be the memory of the steps."""
    index = scratch.take("index", steps.shape, torch.int32).copy_(steps)
    torch.index_select(table, 0, index.view(-1), out=out.view(-1))
    return out if hidden is None else out.masked_fill_(hidden, 0.0)


def _as_groups(q: Tensor, dim: int) -> tuple[Tensor, int]:
    """Axes before and after `dim` as one each, so that they can be cut anywhere; without them if they are 1."""
    if dim == q.dim() - 1:
        return q.reshape(-1, q.shape[dim]), 1
    return q.flatten(dim + 1).flatten(0, dim - 1) if dim else q.flatten(1), min(dim, 1)


def _total(entries: Tensor, dim: int, is_double: bool) -> Tensor:
    """The sum of each group; 1 for a group of which everything is left out."""
    return (entries.double() if is_double else entries).sum(dim, keepdim=True).double().clamp_(min=1.0)


@operator(
    "softmax(Tensor q, int dim, Tensor? hidden, Tensor table, float gain, bool is_double, int low, int high) -> Tensor"
)
def softmax(
    q: Tensor, dim: int, hidden: Tensor | None, table: Tensor, gain: float, is_double: bool, low: int, high: int
) -> Tensor:
    """``clamp(round(e * r))`` with ``e = table[max(q) - q]`` and ``r = gain / sum(e)`` for each group.

    Bytes, of which the result has no more than 8 bits and no position is left out, give bytes.

    Args:
        dim: the axis, counted from the front.
        hidden: True at positions that are left out; it broadcasts to `q`.
        table: integers for ``exp`` of 0, -1, -2, ... input steps.
        is_double: the sum can pass 2**24.
    """
    shape, is_of_bytes = q.shape, q.dtype == torch.int8
    if hidden is None:
        q, dim = _as_groups(q, dim)
    out, scratch = torch.empty(q.shape, dtype=q.dtype, device=q.device), Scratch(q.device)
    for piece in pieces(q, [dim]):
        y, mask = piece.of(out), None if hidden is None else piece.of(hidden)
        room = scratch.like(y)
        steps = _steps_of_bytes(piece.of(q), dim) if is_of_bytes else _steps(piece.of(q), mask, dim, room)
        entries = _exponentials(steps, mask, table, scratch, room)
        entries.mul_(_over(gain, _total(entries, dim, is_double)).float())
        _store(entries, low, high, y)
    return out.view(shape)


_MANTISSA = 1 << 15
OCTAVES = 40  # a sum of 16-bit entries never has more
LOG_2 = math.log(2)


def choose_logarithm(scale: float) -> Tensor:
    """The table of `logarithm`: ``log(m * scale)`` for m from 2**15 to 2**16.

    >>> total = torch.tensor([1e5, 1e9], dtype=torch.float64)
    >>> bool((logarithm(total, choose_logarithm(1.0)) - total.log()).abs().max() < 2**-16)
    True
    """
    return torch.log(torch.arange(_MANTISSA, 2 * _MANTISSA, dtype=torch.float64).add_(0.5).mul_(scale))


def logarithm(total: Tensor, table: Tensor) -> Tensor:
    """``log(total * scale)`` for integers from 2**15 up: a table for the first 16 bits, and a multiple of log(2)."""
    mantissa, exponent = torch.frexp(total.clamp(min=_MANTISSA))
    index = mantissa.mul_(2 * _MANTISSA).floor_().sub_(_MANTISSA).long()
    return exponent.double().sub_(16.0).mul_(LOG_2).add_(table.take(index))


@operator(
    "log_softmax(Tensor q, int dim, Tensor table, Tensor logarithms, float factor, float gain, bool is_double, "
    "int low, int high) -> Tensor"
)
def log_softmax(
    q: Tensor,
    dim: int,
    table: Tensor,
    logarithms: Tensor,
    factor: float,
    gain: float,
    is_double: bool,
    low: int,
    high: int,
) -> Tensor:
    """``clamp(round((max(q) - q) * factor - log(sum(e)) * gain))`` with ``e = table[max(q) - q]`` for each group.

    Args:
        logarithms: see `choose_logarithm`.
        factor: minus the input's scale over the output's, a float32 number.
        gain: one over the output's scale.
    """
    shape = q.shape
    q, dim = _as_groups(q, dim)
    out, scratch = torch.empty(q.shape, dtype=q.dtype, device=q.device), Scratch(q.device)
    for piece in pieces(q, [dim]):
        y = piece.of(out)
        steps = _steps(piece.of(q), None, dim, scratch.like(y))
        entries = _exponentials(steps, None, table, scratch, scratch.take("entries", y.shape))
        logs = logarithm(_total(entries, dim, is_double), logarithms).mul_(gain).float()
        torch.clamp(steps.mul_(factor).sub_(logs).round_(), low, high, out=y)
    return out.view(shape)
