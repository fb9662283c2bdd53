"""Functions of one variable by table.

With an 8-bit input every one of the 256 entries is the function rounded to nearest. With a 16-bit input the table is
made of up to 64 segments, each a power of two wide and cut into 64 equal intervals between whose ends the value is
interpolated on integers; segments are halved where the function bends, until the error is small. At run time both
are one look-up: a segment table is expanded once to its 65,536 values. Every table states its worst error.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from horizon_plugin_pytorch.dtype import QuantDType
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fixed_point.library import operator

MOST_SEGMENTS = 64
INTERVALS = 64
_INPUT_BITS = 16
_INTERVAL_BITS = 6
_FEW_BYTES = 1 << 13  # for which no table of pairs is made
_ROUNDED = 0.51  # a float32 number near a half may be rounded to the other side


STRATEGIES = ("curvature", "evenly")


@dataclass(frozen=True)
class Division:
    """How the 65,536 inputs of a 16-bit table are divided into segments.

    Args:
        auto_divide_strategy: ``"curvature"`` halves the segment with the largest error until all are within one
            output step, so that segments are short where the function bends; ``"evenly"`` makes them equally wide.
        max_segments: at most so many, a power of two for ``"evenly"``.

    >>> Division("curvature").max_segments
    64
    """

    auto_divide_strategy: str = "curvature"
    max_segments: int = MOST_SEGMENTS

    def __post_init__(self) -> None:
        if self.auto_divide_strategy not in STRATEGIES:
            raise QuantizationConfigError(
                f"auto_divide_strategy must be one of {', '.join(map(repr, STRATEGIES))}, got "
                f"{self.auto_divide_strategy!r}."
            )
        is_even = self.auto_divide_strategy == "evenly"
        if not 1 <= self.max_segments <= MOST_SEGMENTS or (is_even and self.max_segments & (self.max_segments - 1)):
            raise QuantizationConfigError(
                f"max_segments must lie in 1 ... {MOST_SEGMENTS}{' and be a power of two' if is_even else ''}, got "
                f"{self.max_segments}."
            )


@dataclass(frozen=True)
class Table:
    """The value for every input, from the lowest up.

    `worst_error` is the largest distance, in output steps, between the table and the function over all inputs.
    `program` computes the same values, where that is quicker than looking them up; it was compared on every input.
    """

    values: Tensor
    worst_error: float
    program: str = ""

    @functools.cached_property
    def by_byte(self) -> Tensor:
        """The values of an 8-bit table in int8, for a byte by its number as int8, from -128 up."""
        with torch.inference_mode(False):
            return self.values.to(torch.int8)

    @functools.cached_property
    def by_pair(self) -> Tensor:
        """Two of them as an int16, for two bytes that are next to each other, by their number as int16."""
        with torch.inference_mode(False):
            pairs = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.int8)
            return self.by_byte[pairs.long() + 128].view(torch.int16)


@dataclass(frozen=True)
class SegmentTable(Table):
    """An int16 table: where segments start (in steps from the lowest input), their widths, their entries."""

    starts: Tensor = field(default_factory=lambda: torch.zeros(0))
    widths: Tensor = field(default_factory=lambda: torch.zeros(0))
    entries: Tensor = field(default_factory=lambda: torch.zeros(0))


@operator("lookup(Tensor q, Tensor table, int offset) -> Tensor")
def lookup(q: Tensor, table: Tensor, offset: int) -> Tensor:
    """``table[q - offset]``."""
    index = q.to(torch.int32, copy=True).sub_(offset)  # with int32 and one axis torch's selection is at its fastest
    # The index is dense, so it can be walked in the order of memory, whatever its layout.
    flat = torch.index_select(table, 0, index.as_strided((index.numel(),), (1,)))
    return flat.as_strided(index.shape, index.stride())


def lookup_bytes(values: Tensor, table: Table) -> Tensor:
    """The same of int8 numbers by an 8-bit table with int8 values, many of them in pairs.

    >>> negated = Table(-torch.arange(-127.0, 129.0), 0.0)
    >>> lookup_bytes(torch.tensor([-128, 0, 5], dtype=torch.int8), negated)
    tensor([127,  -1,  -6], dtype=torch.int8)
    """
    is_dense = values.is_contiguous() or (values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last))
    if not is_dense:
        values = values.contiguous()
    flat = values.as_strided((values.numel(),), (1,))
    is_paired = len(flat) >= _FEW_BYTES and len(flat) % 2 == 0 and flat.storage_offset() % 2 == 0
    if is_paired:
        found = torch.index_select(table.by_pair, 0, flat.view(torch.int16).to(torch.int32).add_(1 << 15))
    else:
        found = torch.index_select(table.by_byte, 0, flat.to(torch.int32).add_(128))
    return found.view(torch.int8).as_strided(values.shape, values.stride())


@functools.lru_cache(maxsize=256)
def _parsed(program: str) -> tuple[tuple[str, tuple], ...]:
    steps = [step.split() for step in program.split(";")]
    return tuple((name, tuple(a if a == "q" else float(a) for a in args)) for name, *args in steps)


@operator("evaluate(Tensor q, str program, Tensor table, int offset) -> Tensor")
def evaluate(q: Tensor, program: str, table: Tensor, offset: int) -> Tensor:
    """``table[q - offset]``, computed by a program that gives these values.

    A program is a list of operators of torch, each applied to what the last gave: ``mul 0.5; add 3; mul q; round``.
    """
    out = q
    for index, (name, args) in enumerate(_parsed(program)):
        step = getattr(torch.ops.aten, name if index == 0 else f"{name}_")
        out = step(out, *(q if a == "q" else a for a in args))
    return out


def build_table(
    function: Callable[[Tensor], Tensor],
    in_scale: Tensor,
    in_dtype: QuantDType,
    out_scale: Tensor,
    out_dtype: QuantDType,
    division: Division | None = None,
    programs: Iterable[str] = (),
) -> Table:
    """The table of a function between two scales, its values as float32 integers.

    Args:
        function: on real values, element by element; where it has none (NaN) the table has 0.
        division: how a 16-bit table is made of segments; None leaves it whole: every entry is rounded to nearest,
            as in an 8-bit table. Functions that jump all over their range (floor) need that.
        programs: float32 operators that compute the function in output steps, as `evaluate` takes them. The first is
            used that gives every entry of an 8-bit table, or all of a 16-bit one within 0.51 steps.

    >>> from horizon_plugin_pytorch.dtype import qint8
    >>> t = build_table(torch.sigmoid, torch.tensor([0.1]), qint8, torch.tensor([1 / 128]), qint8)
    >>> t.values.numel(), int(t.values[128]), t.worst_error <= 0.5
    (256, 64, True)
    """
    q = torch.arange(in_dtype.min, in_dtype.max + 1, dtype=torch.float64)
    exact = function(q * in_scale.detach().double().cpu()) / out_scale.detach().double().cpu()
    targets = torch.nan_to_num(exact, nan=0.0).clamp(out_dtype.min, out_dtype.max)
    values = torch.round(targets)
    for program in programs:
        program, computed = _finished(program, q.float(), out_dtype)
        error = float((computed.double() - targets).abs().max())
        if torch.equal(computed.double(), values) or (in_dtype.bits > 8 and error <= _ROUNDED):
            return Table(computed, error, program)
    if in_dtype.bits > 8 and division is not None:
        return build_segments(targets, out_dtype, division)
    return Table(values.float(), float((values - targets).abs().max()))


def _finished(program: str, q: Tensor, out_dtype: QuantDType) -> tuple[str, Tensor]:
    """A program that ends in integers of the format, and what it gives for every input."""
    computed = evaluate(q, program, q, 0)
    if not torch.equal(computed, computed.round()):
        program = f"{program}; round"
        computed = computed.round()
    if float(computed.min()) < out_dtype.min or float(computed.max()) > out_dtype.max:
        program = f"{program}; clamp {out_dtype.min} {out_dtype.max}"
        computed = computed.clamp(out_dtype.min, out_dtype.max)
    return program, computed


def _interpolated(targets: Tensor, level: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Entries and interpolated values when every segment is ``2**level`` wide."""
    width = 1 << (level - _INTERVAL_BITS)
    shift = level - _INTERVAL_BITS
    beyond = (2 * targets[-1:] - targets[-2:-1]).clamp(low, high)  # the last interval ends after the last input
    knots = torch.round(torch.cat([targets[::width], beyond])).int()  # so are products below: 17 and 10 bits
    left, right = knots[:-1].unsqueeze(1), knots[1:].unsqueeze(1)
    within = torch.arange(width, dtype=torch.int32)
    half = (1 << shift) >> 1
    values = ((right - left) * within).add_(half).bitwise_right_shift_(shift).add_(left)
    return knots.long(), values.flatten().clamp_(low, high)


def build_segments(
    targets: Tensor, out_dtype: QuantDType, division: Division | None = None, tolerance: float = 1.0
) -> SegmentTable:
    """Choose segments for 65,536 target values given in (unrounded) output steps, in the range of the output."""
    division = division or Division()
    top = _INPUT_BITS
    knots: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    errors: dict[int, list[float]] = {}
    for level in range(_INTERVAL_BITS, top + 1):
        knots[level], values[level] = _interpolated(targets, level, out_dtype.min, out_dtype.max)
        errors[level] = (values[level] - targets).abs().reshape(-1, 1 << level).amax(1).tolist()
    if division.auto_divide_strategy == "evenly":
        level = top - (division.max_segments.bit_length() - 1)
        heap = [(-error, level, index) for index, error in enumerate(errors[level])]
    else:
        heap = [(-errors[top][0], top, 0)]
        while len(heap) < division.max_segments:
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
        values=chosen,
        worst_error=max(s[3] for s in segments),
        starts=torch.tensor([s[0] for s in segments]),
        widths=torch.tensor([1 << s[1] for s in segments]),
        entries=torch.stack(entries),
    )
