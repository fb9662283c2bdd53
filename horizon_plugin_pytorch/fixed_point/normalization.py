"""Normalisation over groups of values: exact sums, one float64 factor for each group, one rounding for each value.

Sums are sums of integers, so they do not depend on the order of summation. What follows is a chain of single IEEE
operations (division, square root, multiplication, ...), each correctly rounded, so every route gets the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator

# Temporaries of a piece stay in the cache, and the calls for a piece cost little next to its work.
_PIECE = 1 << 18
SMALLEST_VARIANCE = 2.0**-64  # of a constant group without epsilon: its deviations are 0, whatever they are divided by


class Piece:
    """A stretch of one axis, and the same stretch of whatever broadcasts along that axis."""

    def __init__(self, axis: int, start: int, length: int) -> None:
        self.axis, self.start, self.length = axis, start, length  # the axis counts from the end

    def of(self, x: Tensor) -> Tensor:
        """The stretch of a tensor."""
        if x.dim() < -self.axis or x.shape[self.axis] == 1:
            return x
        return x.narrow(self.axis, self.start, self.length)


def pieces(q: Tensor, dims: list[int]) -> Iterator[Piece]:
    """Cut the longest axis that is not in `dims`, so that each piece holds whole groups."""
    free = [axis for axis in range(q.dim()) if axis not in dims]
    axis = max(free, key=lambda a: q.shape[a], default=0)
    length = q.shape[axis]
    step = length if axis in dims else max(_PIECE * length // max(q.numel(), 1), 1)
    for start in range(0, length if q.numel() else 0, max(step, 1)):
        yield Piece(axis - q.dim(), start, min(step, length - start))


def _over(number: float, x: Tensor) -> Tensor:
    """``number / x`` in one rounding: torch would multiply by the reciprocal."""
    return torch.full_like(x, number).div_(x)


def _divided_(x: Tensor, number: float) -> Tensor:
    """``x / number`` in one rounding on every device, likewise."""
    return x.div_(torch.full_like(x, number))


@operator(
    "normalize(Tensor q, int[] dims, Tensor? weight, Tensor? bias, float gain, float epsilon, bool is_centred, "
    "bool is_double, int low, int high) -> Tensor"
)
def normalize(
    q: Tensor,
    dims: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    gain: float,
    epsilon: float,
    is_centred: bool,
    is_double: bool,
    low: int,
    high: int,
) -> Tensor:
    """``clamp(round((q - mean) * r * weight + bias))`` with ``r = gain / sqrt(variance + epsilon)`` for each group.

    Args:
        dims: the axes of a group, counted from the front.
        weight, bias: float32, in output steps; they broadcast to `q`.
        epsilon: in squares of input steps.
        is_centred: subtract the mean; otherwise the mean of squares takes the place of the variance.
        is_double: sums of squares can pass 2**24.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    count = 1
    for axis in dims:
        count *= q.shape[axis]
    for piece in pieces(q, dims):
        x, y = piece.of(q), piece.of(out)
        wide = x.double() if is_double else x
        total = wide.sum(dims, keepdim=True).double() if is_centred else None
        value = torch.mul(wide, wide)
        variance = value.sum(dims, keepdim=True).double()
        if total is None:
            _divided_(variance, count)
        else:
            _divided_(variance.mul_(count).sub_(total * total), float(count) ** 2)
        factor = _over(gain, variance.add_(epsilon).clamp_(min=SMALLEST_VARIANCE).sqrt_()).float()
        if total is None:
            value = torch.mul(x, factor, out=None if is_double else value)
        else:
            value = torch.sub(x, _divided_(total, count).float(), out=None if is_double else value).mul_(factor)
        if weight is not None:
            value.mul_(piece.of(weight))
        if bias is not None:
            value.add_(piece.of(bias))
        torch.clamp(value.round_(), low, high, out=y)
    return out


LOWEST = -(2.0**17)  # below every integer of 16 bits


def _exponentials(x: Tensor, hidden: Tensor | None, table: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Steps below the largest value of each group, and their entries in the table; 0 where a position is left out."""
    if hidden is None:
        steps = torch.sub(x.amax(dim, keepdim=True), x).contiguous()
    else:
        largest = x.masked_fill(hidden, LOWEST).amax(dim, keepdim=True)
        steps = torch.sub(largest, x).masked_fill_(hidden, 0.0).contiguous()
    entries = table.index_select(0, steps.to(torch.int32).view(-1)).view(steps.shape)
    return steps, entries if hidden is None else entries.masked_fill_(hidden, 0.0)


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

    Args:
        dim: the axis, counted from the front.
        hidden: True at positions that are left out; it broadcasts to `q`.
        table: integers for ``exp`` of 0, -1, -2, ... input steps.
        is_double: the sum can pass 2**24.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for piece in pieces(q, [dim]):
        mask = None if hidden is None else piece.of(hidden)
        _, entries = _exponentials(piece.of(q), mask, table, dim)
        entries.mul_(_over(gain, _total(entries, dim, is_double)).float())
        torch.clamp(entries.round_(), low, high, out=piece.of(out))
    return out


# A sum of 16-bit entries is a 16-bit mantissa, from 2**15 up, times a power of two; larger sums do not occur.
_LEAST, _OCTAVES = 1 << 15, 40


def choose_logarithm(scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tables for ``log(total * scale)``: bounds of octaves, their inverse factors, their shares, those of a mantissa.

    >>> bounds, shrink, octaves, mantissas = choose_logarithm(1.0)
    >>> total = torch.tensor([100000.0], dtype=torch.float64)
    >>> float(logarithm(total, bounds, shrink, octaves, mantissas)) - math.log(100000) < 2e-5
    True
    """
    octave = torch.arange(_OCTAVES + 1, dtype=torch.float64)
    bounds = torch.ldexp(torch.full_like(octave[1:], _LEAST), octave[1:])
    middles = torch.arange(_LEAST, 2 * _LEAST, dtype=torch.float64).add_(0.5)
    return bounds, torch.ldexp(torch.ones_like(octave), -octave), octave * math.log(2), torch.log(middles * scale)


def logarithm(total: Tensor, bounds: Tensor, shrink: Tensor, octaves: Tensor, mantissas: Tensor) -> Tensor:
    """``log(total * scale)`` by table, in float64; within 2**-16."""
    octave = torch.bucketize(total, bounds, right=True)
    mantissa = total.clamp(min=_LEAST).mul_(shrink[octave]).floor_().sub_(_LEAST).long()
    return octaves[octave].add_(mantissas[mantissa])


@operator(
    "log_softmax(Tensor q, int dim, Tensor table, Tensor[] logarithm, float factor, float gain, bool is_double, "
    "int low, int high) -> Tensor"
)
def log_softmax(
    q: Tensor,
    dim: int,
    table: Tensor,
    tables: list[Tensor],
    factor: float,
    gain: float,
    is_double: bool,
    low: int,
    high: int,
) -> Tensor:
    """``clamp(round((max(q) - q) * factor - log(sum(e)) * gain))`` with ``e = table[max(q) - q]`` for each group.

    Args:
        tables: of the logarithm, see `choose_logarithm`.
        factor: minus the input's scale over the output's, a float32 number.
        gain: one over the output's scale.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for piece in pieces(q, [dim]):
        steps, entries = _exponentials(piece.of(q), None, table, dim)
        logs = logarithm(_total(entries, dim, is_double), *tables).mul_(gain).float()
        torch.clamp(steps.mul_(factor).sub_(logs).round_(), low, high, out=piece.of(out))
    return out
