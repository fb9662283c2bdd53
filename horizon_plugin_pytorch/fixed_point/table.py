"""Functions of one variable by table.

With an 8-bit input every one of the 256 entries is the function rounded to nearest. With a 16-bit input the table is
made of up to 64 segments, each a power of two wide and cut into 64 equal intervals between whose ends the value is
interpolated on integers; segments are halved where the function bends, until the error is small. At run time both
are one look-up: a segment table is expanded once to its 65,536 values.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_plugin_pytorch.dtype import QuantDType
from horizon_plugin_pytorch.fixed_point.library import operator

MOST_SEGMENTS = 64
INTERVALS = 64
_INPUT_BITS = 16
_INTERVAL_BITS = 6


@dataclass(frozen=True)
class SegmentTable:
    """An int16 table: where segments start (in steps from the lowest input), their widths, their entries.

    `worst_error` is the largest distance, in output steps, between the table and the function over all inputs.
    """

    starts: Tensor
    widths: Tensor
    entries: Tensor
    values: Tensor
    worst_error: float


@operator("lookup(Tensor q, Tensor table, int offset) -> Tensor")
def lookup(q: Tensor, table: Tensor, offset: int) -> Tensor:
    """``table[q - offset]``."""
    index = q.sub(offset).to(torch.int32)  # with int32 and one axis torch's selection is at its fastest
    return table.index_select(0, index.flatten()).reshape(q.shape)


def _targets(
    function: Callable[[Tensor], Tensor],
    in_scale: Tensor,
    in_dtype: QuantDType,
    out_scale: Tensor,
    out_dtype: QuantDType,
) -> Tensor:
    q = torch.arange(in_dtype.min, in_dtype.max + 1, dtype=torch.float64)
    exact = function(q * in_scale.detach().double().cpu()) / out_scale.detach().double().cpu()
    return torch.nan_to_num(exact, nan=0.0).clamp(out_dtype.min, out_dtype.max)


def build_table(
    function: Callable[[Tensor], Tensor],
    in_scale: Tensor,
    in_dtype: QuantDType,
    out_scale: Tensor,
    out_dtype: QuantDType,
) -> Tensor:
    """All values of the table, from the lowest input to the highest, as float32 integers.

    >>> from horizon_plugin_pytorch.dtype import qint8
    >>> t = build_table(torch.sigmoid, torch.tensor([0.1]), qint8, torch.tensor([1 / 128]), qint8)
    >>> t.numel(), int(t[128])
    (256, 64)
    """
    targets = _targets(function, in_scale, in_dtype, out_scale, out_dtype)
    if in_dtype.bits <= 8:
        return torch.round(targets).float()
    return build_segments(targets, out_dtype).values


def _interpolated(targets: Tensor, level: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Entries and interpolated values when every segment is ``2**level`` wide."""
    width = 1 << (level - _INTERVAL_BITS)
    shift = level - _INTERVAL_BITS
    knots = torch.round(torch.cat([targets, targets[-1:]])[::width]).long()
    left, right = knots[:-1].unsqueeze(1), knots[1:].unsqueeze(1)
    within = torch.arange(width)
    half = (1 << shift) >> 1
    values = left + (((right - left) * within + half) >> shift)
    return knots, values.flatten().clamp(low, high)


def build_segments(targets: Tensor, out_dtype: QuantDType, tolerance: float = 1.0) -> SegmentTable:
    """Choose segments for 65,536 target values given in (unrounded) output steps."""
    top = _INPUT_BITS
    knots: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    errors: dict[int, list[float]] = {}
    for level in range(_INTERVAL_BITS, top + 1):
        knots[level], values[level] = _interpolated(targets, level, out_dtype.min, out_dtype.max)
        errors[level] = (values[level] - targets).abs().reshape(-1, 1 << level).amax(1).tolist()
    heap = [(-errors[top][0], top, 0)]
    while len(heap) < MOST_SEGMENTS:
        error, level, index = heap[0]
        if -error <= tolerance or level == _INTERVAL_BITS:
            break
        heapq.heappop(heap)
        for child in (2 * index, 2 * index + 1):
            heapq.heappush(heap, (-errors[level - 1][child], level - 1, child))
    segments = sorted((index << level, level, index, -error) for error, level, index in heap)
    chosen = torch.empty(1 << _INPUT_BITS, dtype=torch.float32)
    entries = []
    for start, level, index, _ in segments:
        chosen[start : start + (1 << level)] = values[level][start : start + (1 << level)].float()
        entries.append(knots[level][index * INTERVALS : (index + 1) * INTERVALS + 1])
    return SegmentTable(
        starts=torch.tensor([s[0] for s in segments]),
        widths=torch.tensor([1 << s[1] for s in segments]),
        entries=torch.stack(entries),
        values=chosen,
        worst_error=max(s[3] for s in segments),
    )
