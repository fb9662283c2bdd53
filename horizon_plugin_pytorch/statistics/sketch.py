"""What a tensor's magnitudes look like, in 64 KiB: a histogram that grows with the data, merges, and finds scales.

The upper bits of a floating-point number are its place in a histogram whose bins are evenly spread within each power
of two: no bin edges to choose, no second pass when the data grow, and two histograms of different data add up. Counting
costs about as much as five copies of the tensor, so that of a large one a sample is counted, and all of its largest
values (`samples.py`); choosing a scale looks at the histogram only. A high percentile needs none (`tail.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.compiled.passes import NO_LIMITS, is_countable
from horizon_plugin_pytorch.statistics import bins, search
from horizon_plugin_pytorch.statistics.bins import BINS, SHIFT, exponent, first_bin
from horizon_plugin_pytorch.statistics.samples import (
    CLAMPED,
    Large,
    Rows,
    are_clamped,
    array_of,
    each_of,
    large_values,
    largest_rows,
    magnitudes_of,
    places_of,
    rows_of,
    rows_that_reach,
    sample_array,
    sample_of,
    sample_size,
)
from horizon_plugin_pytorch.statistics.tail import Tail

Known = tuple[tuple[np.ndarray, int], ...]  # large values, and how many each stands for
_FULL = 1 << 30  # counts are 32 bits wide
_AT_ONCE, _TURNS = 1 << 22, 16
_ROUNDED = 1 + 2.0**-7  # no type rounds a number by more
_KNOWN, _KNOWN_OF_SAMPLE = 512, 16  # values of which all are counted, about; and those of the sample among them
_NEAR_TOP = 1 << 12  # bins in which they are
_SMALL = 1 << 12  # values of which those at the ends are always counted


class Sketch:
    """Counts of magnitudes in bins of a relative width of 0.1 %, over the sixteen powers of two below the largest.

    Args:
        device: where the counts are kept.

    >>> sketch = Sketch.of(torch.linspace(-1, 1, 1001))
    >>> sketch.total, sketch.largest, round(sketch.percentile(50.0), 2)
    (1001, 1.0, 0.5)
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._counts: Tensor | None = None  # made when somebody asks, as mostly a tensor's are the first to be there
        self._device = device
        self.top = 0  # exponent, with its bias, of the highest power of two that is counted
        self.ends = (0.0, 0.0)  # smallest and largest value, or 0
        self.peaks = (0, 0)  # how many values are exactly these: of a clamped tensor many, and they cost what they cost
        self.total = 0

    @classmethod
    def of(cls, x: Tensor) -> Sketch:
        """The sketch of one tensor."""
        sketch = cls(x.device)
        sketch.update(x)
        return sketch

    @classmethod
    def of_tail(cls, tail: Tail) -> Sketch:
        """The sketch of a tensor of which the largest values are known, and a sample."""
        sketch = cls()
        sketch._widen(tail.ends)
        counts, peaks_of = sketch._counted_values(tail.sample, tail.ends, tail.limits, tail.each)
        border = sketch._bin(tail.least) + 1
        known = tail.values[np.abs(tail.values) >= bins.edge(sketch._first + border)]
        found, sketch.peaks, sketch.total = sketch._with_known(
            counts, peaks_of, ((known, 1),), border, tail.ends, len(tail.sample), tail.each
        )
        sketch.counts = torch.from_numpy(found)
        return sketch

    @property
    def counts(self) -> Tensor:
        """How many values are in each bin, int32."""
        if self._counts is None:
            self._counts = torch.zeros(BINS, dtype=torch.int32, device=self._device)
        return self._counts

    @counts.setter
    def counts(self, counts: Tensor) -> None:
        self._counts = counts

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(-self.ends[0], self.ends[1])

    @property
    def _first(self) -> int:
        """The upper bits of the lowest bin's edge."""
        return first_bin(self.top)

    def update(
        self,
        x: Tensor,
        ends: tuple[float, float] | None = None,
        limits: tuple[float, float] = NO_LIMITS,
        rows: Rows | None = None,
        enough: int | None = None,
    ) -> None:
        """Count a tensor's finite values.

        Args:
            ends: the smallest and the largest value, if they are known and finite: then every value is.
            limits: count the values as they are after clamping to this range; `ends` too.
            rows: those of the tensor, if they are known.
            enough: how many values are counted of a large tensor, at least.
        """
        x = (x.detach() if x.requires_grad else x).reshape(-1)
        if ends is None:
            x = x.float()
            x = x[x.isfinite()]
            if x.numel():
                ends = tuple(float(end.clamp(*limits)) for end in torch.aminmax(x))  # type: ignore[assignment]
        if not x.numel() or ends is None:
            return
        before = self.ends
        self._widen(ends)
        each = each_of(x, enough)
        if each == 1:
            found, peaks_of = self._counted(x, ends, limits)
            peaks, total = peaks_of(), x.numel()
        else:
            found, peaks, total = self._sampled(x, ends, limits, each, rows or rows_of(x))
        counts = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
        self.counts = self.counts + counts if self.total else counts
        self.total += total
        self._add_peaks(before, ends, peaks)
        self._keep_room()

    def _counted(
        self, x: Tensor, ends: tuple[float, float], limits: tuple[float, float], each: int = 1
    ) -> tuple[np.ndarray | Tensor, Callable[[], tuple[int, int]]]:
        """How many values are in each bin, as an array on the host; and what tells how many lie at the ends.

        Args:
            each: of a sample, how many values each one stands for.
        """
        compiled = passes()
        size = sample_size(x.numel(), each)
        if compiled is not None and is_countable(x):
            counted = torch.zeros(BINS, dtype=torch.int32)
            found = compiled.count(x, places_of(x.numel(), each), each, SHIFT, self._first, ends, limits, counted)
            in_bins = counted.numpy()

            def compiled_peaks() -> tuple[int, int]:
                low, high = self._may_peak(ends, in_bins, size)
                return found[0] * low, found[1] * high

            return in_bins, compiled_peaks
        return self._counted_values(sample_array(x, each) if x.is_cpu else sample_of(x, each), ends, limits, each)

    def _counted_values(
        self, values: np.ndarray | Tensor, ends: tuple[float, float], limits: tuple[float, float], each: int
    ) -> tuple[np.ndarray | Tensor, Callable[[], tuple[int, int]]]:
        """`_counted` of a sample that is taken."""
        counts: np.ndarray | Tensor
        if isinstance(values, np.ndarray):
            counts, size = self._count(values, ends, limits, each), values.size
        else:
            counts, size = self._count_on_device(values, limits), values.numel()

        def peaks() -> tuple[int, int]:  # before clamping values may lie beyond the ends, too
            low, high = self._may_peak(ends, counts, size)
            return (
                int((values <= ends[0]).sum()) * each if low else 0,
                int((values >= ends[1]).sum()) * each if high else 0,
            )

        return counts, peaks

    def _sampled(
        self, x: Tensor, ends: tuple[float, float], limits: tuple[float, float], each: int, rows: Rows
    ) -> tuple[np.ndarray, tuple[int, int], int]:
        """Counts and peaks of a sample and of the largest values, and for how many values they stand."""
        magnitudes = magnitudes_of(rows, x.numel(), limits)
        large: Large | None = None
        if not are_clamped(magnitudes, max(-ends[0], ends[1])):
            counts, peaks_of = self._counted(x, ends, limits, each)
            assert isinstance(counts, np.ndarray)
            least = self._reached(counts, max(_KNOWN, _KNOWN_OF_SAMPLE * each))
            large = None if least is None else rows_that_reach(magnitudes, least)
            large = large or largest_rows(magnitudes, each)
        if large is None:
            each = each_of(x, CLAMPED)  # how many are clamped is known by the sample alone
            counts, peaks_of = self._counted(x, ends, limits, each)
        size, border = sample_size(x.numel(), each), BINS
        known: Known = ()
        if large is not None:  # from this bin on all values lie in these rows
            border = self._bin(large.least) + 1
            known = large_values(x, large, limits, bins.edge(self._first + border))
        return self._with_known(counts, peaks_of, known, border, ends, size, each)

    def _with_known(
        self,
        counts: np.ndarray | Tensor,
        peaks_of: Callable[[], tuple[int, int]],
        known: Known,
        border: int,
        ends: tuple[float, float],
        size: int,
        each: int,
    ) -> tuple[np.ndarray, tuple[int, int], int]:
        """Counts and peaks of a sample with those of values that are known, and for how many values they stand.

        Args:
            counts, peaks_of: those of the sample, of so many values (`size`), of which each stands for others (`each`).
            known: the values from the bin `border` on.
        """
        assert isinstance(counts, np.ndarray)  # samples are taken on the host alone
        total = size * each
        if border >= len(counts):  # they lie in the highest bin, as the largest float32 number does
            known = ()
        if known:
            total += self._count_large(known, counts[border:])
        is_known = [self._bin(abs(end)) >= border for end in ends]
        peaks = (0, 0) if all(is_known[i] or not ends[i] for i in (0, 1)) else peaks_of()
        if any(is_known):
            may_peak = self._may_peak(ends, counts, size)
            low, high = (
                may_peak[i] and sum(times * int((values == np.float32(ends[i])).sum()) for values, times in known)
                if is_known[i]
                else peaks[i]
                for i in (0, 1)
            )
            peaks = int(low), int(high)
        for end, peak, is_there in zip(ends, peaks, is_known, strict=True):
            if end and not (peak or is_there) and each > 1:  # it is known, in the sample or not
                counts[self._bin(abs(end))] += 1
                total += 1
        return counts, peaks, total

    def _count_large(self, known: Known, above: np.ndarray) -> int:
        """Put the counts of the largest values, and how many each stands for, into the highest bins.

        Returns:
            how many more these are than what was counted there before.
        """
        first, before = self._first + BINS - len(above), int(above.sum())
        above[:] = 0
        for values, times in known:
            if len(values):
                keys = np.abs(values).view(np.int32)
                keys >>= SHIFT
                keys -= first
                found = _bincount(keys, len(above))
                above += (found if times == 1 else found * times).astype(np.int32)
        return sum(times * len(values) for values, times in known) - before

    def _reached(self, counts: np.ndarray, wanted: int) -> float | None:
        """The magnitude that about so many values reach, where these are neither too far apart nor all in one bin."""
        top = self._bin(self.largest)
        from_top = counts[max(top - _NEAR_TOP + 1, 0) : top + 1][::-1].cumsum()
        place = int(from_top.searchsorted(wanted))
        return bins.edge(self._first + top - place) if 0 < place < len(from_top) else None

    def _may_peak(self, ends: tuple[float, float], counts: np.ndarray | Tensor, size: int) -> tuple[bool, bool]:
        """Are there more values near an end than beside it? To count those at the end costs half of what all does.

        Zeros need no count.
        """
        low, high = ends
        return low < 0 and self._is_peak(-low, counts, size), high > 0 and self._is_peak(high, counts, size)

    def _is_peak(self, end: float, counts: np.ndarray | Tensor, size: int) -> bool:
        if size <= _SMALL:
            return True
        place = self._bin(end)
        begin = max(place - 1, 0)
        beside = counts[begin : place + 2].tolist()
        here = beside.pop(place - begin)
        return here > 8 + 4 * max(beside, default=0)

    def _add_peaks(self, before: tuple[float, float], ends: tuple[float, float], peaks: tuple[int, int]) -> None:
        """Count what lies at the ends of all data, of which a part had the ends `before`, and a new one `ends`."""
        self.peaks = tuple(
            mine * (old == end) + new * (its == end)
            for mine, old, new, its, end in zip(self.peaks, before, peaks, ends, self.ends, strict=True)
        )  # type: ignore[assignment]

    def _count(
        self, values: np.ndarray, ends: tuple[float, float], limits: tuple[float, float], each: int
    ) -> np.ndarray:
        """How many values are in each bin, times `each`."""
        # The bits of a negative number are a negative integer: where the range begins at 0, it is counted as 0 is.
        # An end that was clamped may be below the limit, rounded as the tensor's type does.
        if ends[0] >= 0 >= limits[0] and (limits[1] == math.inf or ends[1] * _ROUNDED < limits[1]):
            keys = (values.view(np.int32) >> SHIFT).reshape(-1)
        else:
            magnitudes = (np.abs(values) if limits == NO_LIMITS else values.clip(*limits)).reshape(-1)
            if limits[0] < 0 and limits != NO_LIMITS:
                np.abs(magnitudes, out=magnitudes)
            keys = magnitudes.view(np.int32)
            keys >>= SHIFT
        # What lies below the lowest bin, such as the zeros that a ReLU leaves, is counted in turns: to count one
        # bin again and again is slow.
        keys -= self._first - _TURNS
        np.maximum(keys, _turns(len(keys)), out=keys)
        found = _bincount(keys, _TURNS + BINS)
        counts = found[_TURNS:].astype(np.int32)
        counts *= each
        counts[0] += sum(found[:_TURNS].tolist()) * each
        return counts

    def _count_on_device(self, x: Tensor, limits: tuple[float, float]) -> Tensor:
        """How many values are in each bin, counted in pieces where the tensor is."""
        counts = torch.zeros(_TURNS + BINS, dtype=torch.int64, device=x.device)
        turns = torch.arange(min(x.numel(), _AT_ONCE), dtype=torch.int32, device=x.device).bitwise_and_(_TURNS - 1)
        for part in x.split(_AT_ONCE):
            keys = part.float().clamp(*limits).abs_().view(torch.int32).bitwise_right_shift_(SHIFT)
            keys = torch.maximum(keys.sub_(self._first - _TURNS), turns[: len(keys)]).clamp_(max=_TURNS + BINS - 1)
            counts += torch.bincount(keys, minlength=_TURNS + BINS)
        counts[_TURNS] += counts[:_TURNS].sum()
        return counts[_TURNS:].to(torch.int32)

    def merge(self, other: Sketch) -> None:
        """Add what another sketch has counted; the order of merging does not matter."""
        before = self.ends
        self._widen(other.ends)
        # Not in place: they may be of inference mode.
        self.counts = self.counts + other._moved(self.top).to(self.counts.device)
        self.total += other.total
        self._add_peaks(before, other.ends, other.peaks)
        self._keep_room()

    def aligned(self, ends: tuple[float, float]) -> tuple[Tensor, tuple[int, int]]:
        """Counts and peaks as they are among data with these ends."""
        low, high = (peak * (mine == end) for peak, mine, end in zip(self.peaks, self.ends, ends, strict=True))
        return self._moved(exponent(ends)).clone(), (low, high)

    def replace(self, counts: Tensor, ends: tuple[float, float], total: int, peaks: tuple[int, int]) -> None:
        """Take the counts of more data, aligned to its ends."""
        self.counts, self.ends, self.total, self.peaks = counts, ends, total, peaks
        self.top = exponent(ends)

    def state(self) -> dict[str, Tensor]:
        """The sketch as tensors."""
        facts = [*self.ends, float(self.total), *map(float, self.peaks)]
        return {"counts": self.counts, "facts": torch.tensor(facts, dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Become what `state` gave.

        Raises:
            ValueError: it is not that of a sketch.
        """
        counts = state["counts"]
        low, high, total, *peaks = state["facts"].tolist()
        if counts.shape != self.counts.shape or counts.dtype != self.counts.dtype or int(counts.sum()) != total:
            raise ValueError(f"counts that are no sketch's, {tuple(counts.shape)} with a sum of {int(counts.sum())}")
        counts = counts.to(self.counts.device, copy=True)
        self.replace(counts, (low, high), int(total), (int(peaks[0]), int(peaks[1])))

    def _widen(self, ends: tuple[float, float]) -> None:
        """Make room for more data."""
        self.ends = (min(self.ends[0], ends[0]), max(self.ends[1], ends[1]))
        top = exponent(self.ends)
        if self.total and top != self.top:
            self.counts = self._moved(top)
        self.top = top

    def _bin(self, value: float) -> int:
        return max((bins.bits(value) >> SHIFT) - self._first, 0)

    def _moved(self, top: int) -> Tensor:
        """The counts as they are when the highest power of two is `top`; what falls out below is the lowest bin's."""
        by = first_bin(top) - self._first
        if by == 0 or self.total == 0:
            return self.counts
        moved = torch.zeros_like(self.counts)
        if by < BINS:
            moved[: BINS - by] = self.counts[by:]
        moved[0] += self.counts[: min(by, BINS)].sum()
        return moved

    def _keep_room(self) -> None:
        if self.total >= _FULL and int(self.counts.max()) >= _FULL:
            self.counts = (self.counts + 1) >> 1  # every second value: the shares stay
            self.peaks = (self.peaks[0] >> 1, self.peaks[1] >> 1)
            self.total = int(self.counts.sum())

    # -- what it says

    def counted(self) -> search.Counted:
        """What was counted, on the host, where ranges are searched for."""
        return search.Counted(array_of(self.counts, torch.int32), self._first, self.ends, self.peaks, self.total)

    def edges(self) -> Tensor:
        """Edges of the bins, in float64; the lowest bin begins at 0."""
        return torch.tensor(bins.edges(self._first), device=self.counts.device)

    def percentile(self, share: float) -> float:
        """The magnitude below which a share of the values, in percent, lies: the middle of its bin."""
        return self.percentiles([share])[0]

    def percentiles(self, shares: Sequence[float]) -> list[float]:
        """Several percentiles at once."""
        return search.percentiles(self.counted(), shares)

    def linear(self, bins: int) -> Tensor:
        """Counts in bins of equal width from 0 to the largest magnitude, in float64."""
        return torch.from_numpy(search.linear(self.counted(), bins))

    def errors(self, scales: Sequence[float] | Tensor, low: int, high: int) -> Tensor:
        """The sum of squared differences between the values and their quantized ones, for each scale: float64."""
        wanted = scales.tolist() if isinstance(scales, Tensor) else scales
        return torch.from_numpy(search.squared_errors(self.counted(), np.array(wanted, dtype=np.float64), low, high))

    def best_scale(self, low: int, high: int, stride: int = 1) -> float:
        """The scale with the least squared error: see `search.best_scale`."""
        return search.best_scale(self.counted(), low, high, stride)

    def least_divergence(self, bins: int, levels: int) -> float:
        """The end of the range whose quantized histogram diverges least: see `search.least_divergence`."""
        return search.least_divergence(self.counted(), bins, levels)


def _bincount(keys: np.ndarray, size: int) -> np.ndarray:
    """How many there are of each number below `size`; of what is beyond (float32 has it as infinity), in the last."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        found = torch.bincount(torch.from_numpy(keys), minlength=size).numpy()  # in half the time that numpy takes
    else:  # inside `torch.func`, whose tensors lend no memory
        found = np.bincount(keys, minlength=size)
    if len(found) > size:
        found[size - 1] += found[size:].sum()
    return found[:size]


def _turns(size: int) -> np.ndarray:
    return _all_turns(max(1 << (size - 1).bit_length(), 1 << 16))[:size]


@lru_cache(maxsize=4)
def _all_turns(size: int) -> np.ndarray:
    turns = np.arange(size, dtype=np.int32) & (_TURNS - 1)
    turns.setflags(write=False)
    return turns
