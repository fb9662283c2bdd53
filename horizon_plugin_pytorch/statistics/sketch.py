"""What a tensor's magnitudes look like, in 64 KiB: a histogram that grows with the data, merges, and finds scales.

The upper bits of a floating-point number are its place in a histogram whose bins are evenly spread within each power
of two: no bin edges to choose, no second pass when the data grow, and two histograms of different data add up. Counting
costs about as much as five copies of the tensor, so that of a large one a sample is counted, and all of its largest
values (`samples.py`); choosing a scale looks at the histogram only.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.compiled.passes import NO_LIMITS, is_countable
from horizon_plugin_pytorch.statistics.samples import (
    Rows,
    each_of,
    largest_rows,
    places_of,
    rows_of,
    sample_of,
    sample_size,
)

_BITS = 10  # of the mantissa: 1024 bins in each power of two, so that a bin near the top is 1/2048 of the range
_PER_OCTAVE = 1 << _BITS
_OCTAVES = 16
BINS = _OCTAVES * _PER_OCTAVE
_SHIFT = 23 - _BITS
_LARGEST_BITS = (255 << _BITS) - 1  # of a finite number
_FULL = 1 << 30  # counts are 32 bits wide
_AT_ONCE, _TURNS = 1 << 18, 16
# Bins in a power of two that a search looks at first, then at the end of a range, and of what is clipped.
_COARSE, _SMOOTH, _CLIPPED = 16, 512, 64
_FEW = 128  # different values that are looked at one by one
_SMALL = 1 << 12  # values of which those at the ends are always counted
_LARGEST = torch.finfo(torch.float32).max


class Sketch:
    """Counts of magnitudes in bins of a relative width of 0.1 %, over the sixteen powers of two below the largest.

    Args:
        device: where the counts are kept.

    >>> sketch = Sketch.of(torch.linspace(-1, 1, 1001))
    >>> sketch.total, sketch.largest, round(sketch.percentile(50.0), 2)
    (1001, 1.0, 0.5)
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.int32, device=device)
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

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(-self.ends[0], self.ends[1])

    @property
    def _first(self) -> int:
        """The upper bits of the lowest bin's edge."""
        return max(self.top - _OCTAVES + 1, 0) << _BITS

    @torch.no_grad()
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
        x = x.detach().reshape(-1)
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
            counts, peaks = self._counted(x, ends, limits)
            total = x.numel()
        else:
            counts, peaks, total = self._sampled(x, ends, limits, each, rows or rows_of(x))
        self.counts = (self.counts + counts if self.total else counts).to(torch.int32)
        self.total += total
        self._add_peaks(before, ends, peaks)
        self._keep_room()

    def _counted(
        self, x: Tensor, ends: tuple[float, float], limits: tuple[float, float], each: int = 1
    ) -> tuple[Tensor, tuple[int, int]]:
        """How many values are in each bin, and at the ends; `each` counts of a sample stand for that many values."""
        compiled = passes()
        size = sample_size(x.numel(), each)
        if compiled is not None and is_countable(x):
            counts = torch.zeros(BINS, dtype=torch.int32)
            found = compiled.count(x, places_of(x.numel(), each), _SHIFT, self._first, ends, limits, counts)
            may_peak = self._may_peak(ends, counts, size)
            return counts, (found[0] * may_peak[0], found[1] * may_peak[1])
        x = sample_of(x, each)
        counts = self._count(x, ends, limits)
        if each > 1:
            counts.mul_(each)
        return counts, self._peaks_of(x, ends, self._may_peak(ends, counts, size), each)

    def _sampled(
        self, x: Tensor, ends: tuple[float, float], limits: tuple[float, float], each: int, rows: Rows
    ) -> tuple[Tensor, tuple[int, int], int]:
        """Counts and peaks of a sample and of the largest values, and for how many values they stand."""
        counts, peaks = self._counted(x, ends, limits, each)
        total, border = sample_size(x.numel(), each) * each, BINS
        found = largest_rows(x, rows, limits)
        if found is not None:  # from this bin on all values are known
            largest, least = found
            border = self._bin(least) + 1
            exact, at_ends = self._counted(largest, ends, limits)
            total += int(exact[border:].sum()) - int(counts[border:].sum())
            counts[border:] = exact[border:]
            peaks = tuple(
                known if self._bin(abs(end)) >= border else peak
                for end, known, peak in zip(ends, at_ends, peaks, strict=True)
            )  # type: ignore[assignment]
        for end, peak in zip(ends, peaks, strict=True):  # which are known, in the sample or not
            if end and not peak and self._bin(abs(end)) < border:
                counts[self._bin(abs(end))] += 1
                total += 1
        return counts, peaks, total

    def _peaks_of(
        self, x: Tensor, ends: tuple[float, float], may_peak: tuple[bool, bool], each: int
    ) -> tuple[int, int]:
        """How many values lie at the ends, or beyond them before clamping."""
        low = int((x <= ends[0]).sum()) if may_peak[0] else 0
        high = int((x >= ends[1]).sum()) if may_peak[1] else 0
        return low * each, high * each

    def _may_peak(self, ends: tuple[float, float], counts: Tensor, size: int) -> tuple[bool, bool]:
        """Are there more values near an end than beside it? To count those at the end costs half of what all does.

        Zeros need no count.
        """
        low, high = ends
        return low < 0 and self._is_peak(-low, counts, size), high > 0 and self._is_peak(high, counts, size)

    def _is_peak(self, end: float, counts: Tensor, size: int) -> bool:
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

    def _count(self, x: Tensor, ends: tuple[float, float], limits: tuple[float, float]) -> Tensor:
        """How many values are in each bin, counted in pieces that stay in the cache."""
        size = _AT_ONCE if x.device.type == "cpu" else 1 << 22
        buffer = torch.empty(min(size, x.numel()), device=x.device)
        # What lies below the lowest bin, such as the zeros that a ReLU leaves, is counted in turns: to count one bin
        # again and again is slow.
        turns = _turns(size, x.device)
        # The bits of a negative number are a negative integer: where the range begins at 0, it is counted as 0 is.
        has_bits = ends[0] >= 0 >= limits[0] and limits[1] == math.inf
        counts: Tensor | None = None
        for part in x.split(size):
            part = part.float()
            values = buffer[: part.numel()]
            bins = values.view(torch.int32)
            if has_bits:
                torch.bitwise_right_shift(part.view(torch.int32), _SHIFT, out=bins)
            else:
                if limits == NO_LIMITS:
                    torch.abs(part, out=values)
                else:
                    torch.clamp(part, *limits, out=values)
                    if limits[0] < 0:
                        values.abs_()
                bins.bitwise_right_shift_(_SHIFT)
            torch.maximum(bins.sub_(self._first - _TURNS), turns[: len(bins)], out=bins)
            found = torch.bincount(bins, minlength=_TURNS + BINS)
            counts = found if counts is None else counts.add_(found)
        assert counts is not None
        counts[_TURNS] += counts[:_TURNS].sum()
        return counts[_TURNS:]

    def merge(self, other: Sketch) -> None:
        """Add what another sketch has counted; the order of merging does not matter."""
        before = self.ends
        self._widen(other.ends)
        self.counts += other._moved(self.top).to(self.counts.device)
        self.total += other.total
        self._add_peaks(before, other.ends, other.peaks)
        self._keep_room()

    def aligned(self, ends: tuple[float, float]) -> tuple[Tensor, tuple[int, int]]:
        """Counts and peaks as they are among data with these ends."""
        low, high = (peak * (mine == end) for peak, mine, end in zip(self.peaks, self.ends, ends, strict=True))
        return self._moved(_exponent(ends)).clone(), (low, high)

    def replace(self, counts: Tensor, ends: tuple[float, float], total: int, peaks: tuple[int, int]) -> None:
        """Take the counts of more data, aligned to its ends."""
        self.counts, self.ends, self.total, self.peaks = counts, ends, total, peaks
        self.top = _exponent(ends)

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
        top = _exponent(self.ends)
        self.counts = self._moved(top)
        self.top = top

    def _bin(self, value: float) -> int:
        return max((_bits(value) >> _SHIFT) - self._first, 0)

    def _moved(self, top: int) -> Tensor:
        """The counts as they are when the highest power of two is `top`; what falls out below is the lowest bin's."""
        by = (max(top - _OCTAVES + 1, 0) << _BITS) - self._first
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

    def edges(self) -> Tensor:
        """Edges of the bins, in float64; the lowest bin begins at 0."""
        return _edges(self._first, self.counts.device)

    def percentile(self, share: float) -> float:
        """The magnitude below which a share of the values, in percent, lies: the middle of its bin."""
        return self.percentiles([share])[0]

    def percentiles(self, shares: Sequence[float]) -> list[float]:
        """Several percentiles at once."""
        wanted = [math.ceil(self.total * min(share, 100) / 100) for share in shares]
        compiled = passes()
        if compiled is not None and self.counts.device.type == "cpu":
            found = [compiled.reach(self.counts, count) for count in wanted]
        else:
            found = torch.searchsorted(self.counts.cumsum(0), torch.tensor(wanted, device=self.counts.device)).tolist()
        return [
            self.largest if share >= 100 else min(self._middle(index), self.largest)
            for share, index in zip(shares, found, strict=True)
        ]

    def _middle(self, index: int) -> float:
        return (_edge(self._first + index) * (index > 0) + _edge(self._first + index + 1)) / 2

    def linear(self, bins: int) -> Tensor:
        """Counts in bins of equal width from 0 to the largest magnitude, in float64."""
        edges = self.edges()
        middle = (edges[:-1] + edges[1:]).mul_(0.5 * bins / self.largest if self.largest else 0.0)
        return torch.bincount(middle.long().clamp_(max=bins - 1), self.counts.double(), bins)

    def errors(self, scales: Tensor, low: int, high: int) -> Tensor:
        """The sum of squared differences between the values and their quantized ones, for each scale.

        Values are taken as spread evenly within their bin, but for the smallest and the largest, which are known.
        """
        if not self.largest:
            return torch.zeros_like(scales, dtype=torch.float64)
        octaves = self._octave(float(scales.min()) * high), self._octave(float(scales.max()) * high)
        most = _PER_OCTAVE if self._is_jagged else _SMOOTH
        in_bins = self._errors_in_bins(self._between_ends().cumsum(0), scales.double(), low, high, octaves, most)
        return in_bins.add_(_errors_of(self._at_ends(low, high), scales.double()))

    @property
    def _has_few(self) -> bool:
        """Are there so few different values that each can be looked at?"""
        return int(torch.count_nonzero(self.counts[1:])) <= _FEW

    @property
    def _is_jagged(self) -> bool:
        """Do errors go up and down with every step of the grid, as of a tensor that is clamped or has few values?"""
        return max(self.peaks) > max(1, 1e-4 * self.total) or self._has_few

    def _octave(self, value: float) -> int:
        return min(self._bin(value) >> _BITS, _OCTAVES - 1)

    def _between_ends(self) -> Tensor:
        """The counts without those of the smallest and the largest value."""
        counts = self.counts.clone()
        for value, peak in zip(self.ends, self.peaks, strict=True):
            if peak:
                counts[self._bin(abs(value))] -= peak
        return counts

    def _at_ends(self, low: int, high: int) -> Tensor:
        """The smallest and the largest value, as `_errors_of` wants them."""
        ends = (-self.ends[0], self.peaks[0], -low), (self.ends[1], self.peaks[1], high)
        return torch.tensor(ends, dtype=torch.float64, device=self.counts.device)

    def _errors_in_bins(
        self,
        below: Tensor,
        scales: Tensor,
        low: int,
        high: int,
        octaves: tuple[int, int] | None = None,
        most: int = _PER_OCTAVE,
    ) -> Tensor:
        """The errors of all but the smallest and the largest value.

        Args:
            below: how many there are up to each bin.
            octaves: the powers of two, counted from the lowest, in which the ranges end. Without, few bins are looked
                at.
            most: bins in such a power of two.
        """
        places, edges, widths, last_bins = _some_edges(self._first, octaves, most, below.device)
        size = bisect_left(last_bins, self._bin(self.largest)) + 1  # up to the one that has the largest
        places, edges, widths = places[:size], edges[: size + 1], widths[:size]
        # Where there are both signs, half of what is clipped is so at `high`, and half at `low`.
        limits: set[float] = {high if self.ends[1] == self.largest else -low}
        if min(-self.ends[0], self.ends[1]) > self.largest / 2:
            limits = {(high - low) / 2} if octaves is None else {high, -low}
        compiled = passes()
        if compiled is not None and below.device.type == "cpu":
            return compiled.errors(below, places, edges, scales, sorted(limits))
        density = torch.zeros(size + 2, dtype=torch.float64, device=below.device)
        density[1:-1] = F.pad(below[places], (1, 0)).diff()
        density[1:-1].div_(widths)
        # A sum over bins of density * (integral at the upper edge - integral at the lower edge), by edges.
        falls = density[:-1] - density[1:]
        # The integral of (t - round(t))**2 from 0 to t: 1/12 for each step, and the rest; beyond the range all is rest.
        steps = torch.outer(scales.reciprocal(), edges)
        found = torch.zeros_like(scales)
        for limit in limits:
            nearest = steps.round().clamp_(max=limit)
            found.add_(nearest @ falls, alpha=1 / 12)
            found.add_(torch.sub(steps, nearest, out=nearest).pow_(3) @ falls, alpha=1 / 3)
        return found.mul_(scales**3).div_(len(limits))

    def best_scale(self, low: int, high: int, stride: int = 1) -> float:
        """The scale with the least squared error.

        First a hundred shares of the range that clips nothing (every `stride`-th of them) on a coarse histogram, then
        the neighbourhood of the best on a fine one. Of a tensor that is clamped, or has few different values, errors go
        up and down with every step of the grid: between these shares, many more are compared.
        """
        if not self.largest:
            return 0.0
        few = self._has_few
        is_jagged = few or self._is_jagged
        counts = self._between_ends() if is_jagged else self.counts
        below, most = counts.cumsum(0), _SMOOTH
        ends = self._at_ends(low, high)
        points = torch.cat([self._few(counts, low, high), ends]) if few else ends

        def best(scales: Tensor, octaves: tuple[int, int] | None = None) -> float:
            errors = torch.zeros_like(scales) if few else self._errors_in_bins(below, scales, low, high, octaves, most)
            if is_jagged:
                return _best_between(scales, errors, ends, points, 1e-6 * self.total)
            return float(scales[errors.argmin()])

        whole = self.largest / (max(high - 3, 1) if is_jagged else high)  # it may fit better without the last steps
        found = best(_shares(stride, counts.device) * whole)
        reach = whole * stride / 100
        lowest, highest = max(found - reach, reach / 8), min(found + reach, whole)
        near = torch.linspace(lowest, highest, 31 if is_jagged else 21, dtype=torch.float64, device=counts.device)
        return best(near, (self._octave(found * high),) * 2)

    def _few(self, counts: Tensor, low: int, high: int) -> Tensor:
        """The values of bins that are few, as `_errors_of` wants them."""
        filled = counts[1:].nonzero().squeeze(1) + 1
        edges = self.edges()
        values = edges[filled]
        if not all(_edge(_bits(abs(end)) >> _SHIFT) == abs(end) for end in self.ends):
            # Not short fractions, which lie at the lower edge: in the middle.
            values = (values + edges[filled + 1]) / 2
        limits = torch.where(values > self.ends[1], -low, high)
        return torch.stack([values, counts[filled].double(), limits.double()], 1)

    def least_divergence(self, bins: int, levels: int) -> float:
        """The end of the range whose quantized histogram diverges least (Kullback-Leibler) from the clipped one.

        Zeros, and what is 2**15 times smaller than the largest, do not count: zero is on the grid of every scale, and
        the half of a tensor that a ReLU makes zero would outweigh all else.

        Args:
            bins: number of bins of equal width.
            levels: number of levels that the magnitudes are quantized to; every range of that many bins or more is
                looked at, all at once. With a level for every bin the whole range diverges by nothing.
        """
        if levels >= bins:
            return self.largest
        counts = self.linear(bins)
        counts[0] -= self.counts[0]
        ends, stops, windows = _windows(bins, levels, counts.device)
        zero = counts.new_zeros(1)
        below = torch.cat([zero, counts.cumsum(0)])
        filled = torch.cat([zero, (counts > 0).double().cumsum(0)])
        surprise = torch.cat([zero, torch.special.xlogy(counts, counts).cumsum(0)])
        inside, total = below[ends], below[-1]
        # A level's count is spread over those of its bins that hold anything. Ranges have most levels in common, so
        # the logarithms are those of a few windows.
        held, places = (by_bin[stops] - by_bin[:-1] for by_bin in (below, filled))
        spread = held / places.clamp_(min=1)
        by_window = spread.clamp(min=1e-9).log_().mul_(held).flatten()
        own = by_window.index_select(0, windows.flatten()).view(windows.shape).sum(1) - torch.special.xlogy(
            inside, inside
        )
        # The last bin takes what is clipped. Where the quantized histogram has nothing, it counts as almost empty.
        last, clipped = counts[ends - 1], total - inside
        quantized = torch.where(last > 0, spread.flatten()[windows[:, -1]] / inside.clamp(min=1), 1e-9)
        wanted = surprise[ends - 1] + torch.special.xlogy(last + clipped, last + clipped)
        divergence = wanted - own - clipped * quantized.log()
        return self.largest * int(ends[divergence.argmin()]) / bins


@lru_cache(maxsize=8)
def _windows(bins: int, levels: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The ends of the ranges of `levels` bins and more; where windows of 1, 2, ... bins that begin at each bin stop;
    and for each range, in a row, the windows that are its levels.
    """
    ends = torch.arange(levels, bins + 1, device=device)
    borders = -(-torch.arange(levels + 1, device=device) * ends.unsqueeze(1) // levels)
    starts, widths = borders[:, :-1], borders.diff(dim=1)
    sizes = torch.arange(1, int(widths.max()) + 1, device=device).unsqueeze(1)
    stops = (torch.arange(bins, device=device) + sizes).clamp_(max=bins)
    return ends, stops, (widths - 1) * bins + starts


def _edge(bits: int) -> float:
    """The number with these upper bits."""
    return struct.unpack("f", struct.pack("i", min(bits, _LARGEST_BITS) << _SHIFT))[0]


@lru_cache(maxsize=64)
def _edges(first: int, device: torch.device) -> Tensor:
    """Edges of the bins where the lowest one has the upper bits `first`; it begins at 0 all the same."""
    bits = torch.arange(first, first + BINS + 1, dtype=torch.int32, device=device)
    edges = bits.clamp_(max=_LARGEST_BITS).bitwise_left_shift_(_SHIFT).view(torch.float32).double()
    edges[0] = 0
    return edges


@lru_cache(maxsize=2)
def _turns(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device).bitwise_and_(_TURNS - 1)


def _errors_of(points: Tensor, scales: Tensor) -> Tensor:
    """The squared errors of known magnitudes: rows of a magnitude, how many have it, and the steps it is clipped at."""
    magnitudes, counts, limits = points.unbind(1)
    steps = torch.outer(scales.reciprocal(), magnitudes)
    return steps.sub_(torch.minimum(steps.round(), limits)).square_().matmul(counts).mul_(scales.square())


def _best_between(scales: Tensor, errors: Tensor, ends: Tensor, points: Tensor, weight: float) -> float:
    """The best of more scales, equally far apart and where an end is on the grid.

    Errors of the given scales are interpolated, those of the points are added; of equals the least scale is taken.
    """
    places = _places(len(scales) - 1, scales.device)
    compiled = passes()
    if compiled is not None and scales.device.type == "cpu":
        return compiled.between(scales, errors, places, ends, points, weight)
    last = len(scales) - 1
    first, step = scales[0], (scales[-1] - scales[0]) / last
    even = first + places * step
    magnitudes = ends[ends[:, 1] > 1, :1]
    on_grid = magnitudes / (magnitudes / even).round_().clamp_(min=1)
    more = torch.cat([even, on_grid.flatten().clamp(*sorted((float(first), float(scales[-1]))))])
    between = (more - first) / step
    begin = between.long().clamp_(0, last - 1)
    found = torch.lerp(errors[begin], errors[begin + 1], between - begin).add_(_errors_of(points, more))
    return float(more[found.add_(more.square(), alpha=weight).argmin()])


@lru_cache(maxsize=8)
def _places(last: int, device: torch.device) -> Tensor:
    return torch.linspace(0, last, 20 * last + 1, dtype=torch.float64, device=device)


@lru_cache(maxsize=8)
def _shares(stride: int, device: torch.device) -> Tensor:
    return torch.arange(100, 0, -stride, dtype=torch.float64, device=device) / 100


@lru_cache(maxsize=64)
def _some_edges(
    first: int, octaves: tuple[int, int] | None, most: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The last ones of the bins that are taken together, the edges, how wide they are, and those last ones as a list.

    Args:
        octaves: the first and the last in which there are `most` bins. Of the powers of two below there are fewer and
            fewer, so that all are equally wide; above, where everything is clipped, some. Without, few.
    """
    lowest, highest = octaves or (0, 0)

    def bins(octave: int) -> int:
        if octaves is None:
            return _COARSE
        return _CLIPPED if octave > highest else max(most >> max(lowest - octave, 0), 1)

    steps = [_PER_OCTAVE // bins(octave) for octave in range(_OCTAVES)]
    begins = torch.cat([torch.arange(o << _BITS, (o + 1) << _BITS, step) for o, step in enumerate(steps)])
    ends = torch.cat([begins[1:], begins.new_tensor([BINS])])
    edges, places = _edges(first, device), ends.to(device)
    edges = torch.cat([edges[:1], edges[places]])
    return places - 1, edges, edges.diff(), (ends - 1).tolist()


def _exponent(ends: tuple[float, float]) -> int:
    """The exponent, with its bias, of the larger one."""
    return _bits(max(-ends[0], ends[1])) >> 23


def _bits(value: float) -> int:
    """The bits of a number in float32."""
    return struct.unpack("i", struct.pack("f", min(value, _LARGEST)))[0]
