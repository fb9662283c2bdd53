"""Ranges from a histogram of magnitudes: percentiles, the least squared error, the least divergence.

Everything here is small, so it is computed by numpy on the host, whose operators take a fraction of a microsecond to
begin: of a search by torch's operators most is beginning.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.statistics.bins import BINS, BITS, OCTAVES, PER_OCTAVE, SHIFT, bits, edge, edges

# Bins in a power of two that a search looks at first, then at the end of a range, and of what is clipped.
_COARSE, _SMOOTH, _CLIPPED = 16, 512, 64
# And below: about as wide as a step of int8, so that it matters little where on the grid a sample lies. Of fewer values
# all are counted, and it does.
_INSIDE, _MANY = 128, 1 << 16
_FEW = 128  # different values that are looked at one by one
_SOME = 1024  # so many may lie on a grid
_NEAR_END, _MANY_THERE = 0.98, 0.01  # of the range, and of the values: the grid of a scale that meets these fits better
# Ranges that a search looks at first, down to a half of the whole and from there on; and how far the best may be off.
_RATIOS = np.concatenate([0.5 ** (np.arange(16) / 16), 0.5 * 0.92 ** np.arange(48)])
_HALF = 16
_OFF = 0.05, 0.08
_FOLDED, _OFF_FOLDED = 1 / 160, 0.2  # a share of the values; a fold lies a few steps from 0, and one step is a fifth
_ENOUGH = 1 << 13  # values of which a share of one bin says that they fold
_SPIKE, _SEVERAL = 1 / 25, 16  # a share of the values, and how many there have to be: they are points to a search
_FINE = PER_OCTAVE // 4  # steps up to the end of a range, which bins are finer than
_NO_BINS = np.zeros(0, dtype=np.int64)
_NARROW = 1 << 31  # sums of fewer values fit 32 bits


class Counted(NamedTuple):
    """What was counted.

    Args:
        counts: of the bins, int32.
        first: the upper bits of the lowest bin's edge.
        ends: the smallest and the largest value, or 0.
        peaks: how many values are exactly these.
        total: the sum of the counts.
    """

    counts: np.ndarray
    first: int
    ends: tuple[float, float]
    peaks: tuple[int, int]
    total: int

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(-self.ends[0], self.ends[1])

    def bin(self, value: float) -> int:
        """The bin of a magnitude."""
        return max((bits(value) >> SHIFT) - self.first, 0)

    def octave(self, value: float) -> int:
        """The power of two that a magnitude lies in, counted from the lowest."""
        return min(self.bin(value) >> BITS, OCTAVES - 1)

    @property
    def different(self) -> int:
        """How many different values there are, but for 0; those in a bin count as one."""
        return int(np.count_nonzero(self.counts[1:]))

    @property
    def has_few(self) -> bool:
        """Are there so few different values that each can be looked at?"""
        return self.different <= _FEW

    @property
    def is_uneven(self) -> bool:
        """Are there few different values, or many near the end, so that errors may go up and down in small steps?"""
        if self.different <= _SOME:
            return True
        return int(self.counts[self.bin(_NEAR_END * self.largest) :].sum()) > _MANY_THERE * self.total

    @property
    def has_fold(self) -> bool:
        """Do many values lie in one bin, as where GELU turns? Errors then go up and down as it moves over the grid.

        At the end of the range they would not; and of few values, a few are a large share.
        """
        if self.total < _ENOUGH:
            return False
        below = self.counts[1 : self.bin(_NEAR_END * self.largest)]
        return below.size > 0 and int(below.max()) > _FOLDED * self.total

    @property
    def is_clamped(self) -> bool:
        """Are the smallest or the largest value common, so that errors go up and down with every step of the grid?"""
        return max(self.peaks) > max(1, 1e-4 * self.total)

    def up_to(self) -> np.ndarray:
        """How many values there are up to the end of each bin."""
        return self.counts.cumsum(dtype=np.int32 if self.total < _NARROW else np.int64)

    def between_ends(self) -> np.ndarray:
        """The counts without those of the smallest and the largest value."""
        if not any(self.peaks):
            return self.counts
        counts = self.counts.copy()
        for value, peak in zip(self.ends, self.peaks, strict=True):
            if peak:
                counts[self.bin(abs(value))] -= peak
        return counts

    def at_ends(self, low: int, high: int) -> np.ndarray:
        """The smallest and the largest value as points, where any value is known to be exactly that.

        A point is a row: a magnitude, how many have it, and the steps at which it is clipped.
        """
        (smallest, largest), (lows, highs) = self.ends, self.peaks
        points = ((-smallest, lows, -low), (largest, highs, high))
        return np.array([point for point in points if point[1]], dtype=np.float64).reshape(-1, 3)


def percentiles(counted: Counted, shares: Sequence[float]) -> list[float]:
    """The magnitudes below which shares of the values, in percent, lie: the middles of their bins."""
    wanted = [math.ceil(counted.total * min(share, 100) / 100) for share in shares]
    compiled = passes()
    if compiled is not None:
        found = [compiled.reach(counted.counts, count) for count in wanted]
    else:
        up_to = counted.up_to()
        found = up_to.searchsorted(np.array(wanted, dtype=up_to.dtype)).tolist()  # of another type, all are copied
    largest = counted.largest
    return [
        largest if share >= 100 else min(_middle(counted.first, index), largest)
        for share, index in zip(shares, found, strict=True)
    ]


def _middle(first: int, index: int) -> float:
    return (edge(first + index) * (index > 0) + edge(first + index + 1)) / 2


def squared_errors(counted: Counted, scales: np.ndarray, low: int, high: int) -> np.ndarray:
    """The sum of squared differences between the values and their quantized ones, for each scale.

    Values are taken as spread evenly within their bin, but for the smallest and the largest, which are known.
    """
    if not counted.largest:
        return np.zeros_like(scales)
    octaves = counted.octave(float(scales.min()) * high), counted.octave(float(scales.max()) * high)
    is_jagged = counted.is_clamped or counted.has_few
    most = PER_OCTAVE if is_jagged else _SMOOTH
    with np.errstate(all="ignore"):  # at the ends of what float32 can hold, widths are 0
        found = _spread(counted, counted.between_ends(), low, high, octaves, most).errors(scales)
        return found + _errors_of(counted.at_ends(low, high), scales)


def best_scale(counted: Counted, low: int, high: int, stride: int = 1) -> float:
    """The scale with the least squared error.

    First ranges in a ratio of 0.96, from the one that clips nothing, on a coarse histogram, then the neighbourhood of
    the best on a fine one, where the parabola through the three best says which it is; with a `stride` every such share
    of a hundred. Where values may lie on a grid, or many lie near the end, errors go up and down in small steps, and
    the neighbourhood of the best is looked at once more. Of a tensor that is clamped, or has few different values, they
    do so with every step of the grid: all hundred shares are looked at, and between them many more.
    """
    if not counted.largest:
        return 0.0
    with np.errstate(all="ignore"):
        return _best_scale(counted, low, high, stride)


def _best_scale(counted: Counted, low: int, high: int, stride: int) -> float:
    few = counted.has_few
    is_jagged = few or counted.is_clamped
    counts = counted.between_ends() if is_jagged else counted.counts
    ends = counted.at_ends(low, high)
    points = ends
    if few:
        points = np.concatenate([_points(counted, counts, counts[1:].nonzero()[0] + 1, low, high), ends])

    def best(scales: np.ndarray, spread: Spread | None) -> tuple[float, float]:
        errors = np.zeros_like(scales) if spread is None else spread.errors(scales)
        if is_jagged:
            return _best_between(scales, errors, ends, points, 1e-6 * counted.total)
        place = errors.argmin()
        return float(scales[place]), float(errors[place])

    whole = counted.largest / (max(high - 3, 1) if is_jagged else high)  # it may fit better without the last steps
    is_even = is_jagged or stride > 1
    shares, half = (_shares(stride), len(_shares(stride)) // 2) if is_even else (_RATIOS, _HALF)
    spread = None if few else _spread(counted, counts, low, high)
    wide = shares[: half + 1] * whole
    found, error = best(wide, spread)
    # What ranges of up to a half clip, they lose at least: mostly more than the best of the others loses in all.
    narrow = shares[half:] * whole
    if len(narrow) > 1 and (spread is None or not error < spread.clipped(float(narrow[0]))):
        other, less = best(narrow, spread)
        found = other if less < error else found
    spikes = _NO_BINS if is_even else _spikes(counted, high)
    is_folded = len(spikes) > 0 or (not is_even and counted.has_fold)
    off = _OFF_FOLDED if is_folded else _OFF[int(found < wide[-1])]
    reach = whole * stride / 100 if is_even else found * off
    lowest, highest = max(found - reach, reach / 8), min(found + reach, whole)
    octave = counted.octave(found * high)
    if is_even:
        near = lowest + _steps(30 if is_jagged else 20) * (highest - lowest)
        return best(near, None if few else _spread(counted, counts, low, high, (octave, octave), _SMOOTH))[0]
    is_uneven = is_folded or counted.is_uneven
    inside = _SMOOTH if is_uneven or counted.total < _MANY else _INSIDE
    octaves = (counted.octave(lowest * high), counted.octave(highest * high)) if is_folded else (octave, octave)
    near = lowest + _steps(36 if is_folded else 24 if is_uneven else 12) * (highest - lowest)
    if len(spikes):
        background = _points(counted, counts, spikes, low, high)
        counts = counts.copy()
        counts[spikes] = 0
        fine = _spread(counted, counts, low, high, octaves, _SMOOTH, inside)
        return _best_on_grids(near, lambda scales: fine.errors(scales) + _errors_of(background, scales), background)
    fine = _spread(counted, counts, low, high, octaves, _SMOOTH, inside)
    errors = fine.errors(near)
    if not is_uneven:
        return _lowest_point(near, errors)
    found, step = float(near[errors.argmin()]), float(near[1] - near[0])
    return best(np.minimum(found + (2 * _steps(12) - 1) * step, whole), fine)[0]


def _best_on_grids(scales: np.ndarray, errors: Callable[[np.ndarray], np.ndarray], background: np.ndarray) -> float:
    """The best of some scales, of those between them on whose grid a background lies, and of the best's neighbourhood.

    Args:
        scales: equally far apart; the grids may be closer.
        background: points.
    """
    lowest, highest, step = float(scales[0]), float(scales[-1]), float(scales[1] - scales[0])
    grids = [value / np.arange(value // highest + 1, value // lowest + 1) for value in background[:, 0]]
    tried = np.concatenate([scales, *grids])
    found = tried[errors(tried).argmin()]
    near = np.append(np.minimum(found + (2 * _steps(48) - 1) * step, highest), found)
    return float(near[errors(near).argmin()])


def _lowest_point(scales: np.ndarray, errors: np.ndarray) -> float:
    """Where the parabola through the least error and those beside it is lowest; scales are equally far apart."""
    place = int(errors.argmin())
    if not 0 < place < len(scales) - 1:
        return float(scales[place])
    before, here, after = errors[place - 1 : place + 2].tolist()
    bend = before - 2 * here + after
    return float(scales[place]) + float(scales[1] - scales[0]) * (before - after) / (2 * bend if bend > 0 else math.inf)


def _spikes(counted: Counted, high: int) -> np.ndarray:
    """Bins with so many of the values, as of a background that is the same everywhere, that their place counts.

    None where bins are wider than steps, as those of int16 are: then nobody knows where on the grid a value lies.
    """
    least = _SPIKE * counted.total
    if high > _FINE or least < _SEVERAL or counted.counts[1:].max() <= least:
        return _NO_BINS
    return (counted.counts[1:] > least).nonzero()[0] + 1


def _points(counted: Counted, counts: np.ndarray, filled: np.ndarray, low: int, high: int) -> np.ndarray:
    """The values of some bins, as points."""
    all_edges = edges(counted.first)
    values = all_edges[filled]
    if not all(edge(bits(abs(end)) >> SHIFT) == abs(end) for end in counted.ends):
        # Not short fractions, which lie at the lower edge: in the middle.
        values = (values + all_edges[filled + 1]) / 2
    limits = np.where(values > counted.ends[1], float(-low), float(high))
    return np.stack([values, counts[filled], limits], 1)


class Spread(NamedTuple):
    """Values that are spread evenly within bins.

    Args:
        sums: how many are in each.
        edges: of the bins, one more.
        limits: the steps at which they are clipped; of several ways, each for its part.
    """

    sums: np.ndarray
    edges: np.ndarray
    limits: list[float]

    def errors(self, scales: np.ndarray) -> np.ndarray:
        """The sum of squared differences between values and their quantized ones, for each scale."""
        compiled = passes()
        if compiled is not None:
            return compiled.errors(self.sums, self.edges, scales, self.limits)
        falls = self._falls()
        # The integral of (t - round(t))**2 from 0 to t: 1/12 for each step, and the rest; beyond the range all is rest.
        steps = np.multiply.outer(1 / scales, self.edges)
        found: np.ndarray | float = 0.0
        for limit in self.limits:
            nearest = np.rint(steps)
            np.minimum(nearest, _row(limit)[: len(falls)], out=nearest)  # with one number numpy takes twice as long
            found += np.einsum("ij,j->i", nearest, falls) * (1 / 12)  # not `@`, whose threads are not torch's
            rest = np.subtract(steps, nearest, out=steps if limit == self.limits[-1] else None)
            cubes = np.square(rest, out=nearest)
            cubes *= rest
            found += np.einsum("ij,j->i", cubes, falls) * (1 / 3)
        return found * (scales * scales * scales) / len(self.limits)

    def clipped(self, scale: float) -> float:
        """The least that the values beyond the range lose: of smaller scales it is more."""
        beyond = np.maximum(self.edges[:-1] - scale * self.limits[-1], 0)
        return float(np.einsum("i,i,i", self.sums, beyond, beyond))

    def _falls(self) -> np.ndarray:
        """A sum over bins of density * (integral at the upper edge - integral at the lower edge), by edges."""
        density = np.zeros(len(self.sums) + 2)
        np.divide(self.sums, self.edges[1:] - self.edges[:-1], out=density[1:-1])
        return density[:-1] - density[1:]


def _spread(
    counted: Counted,
    counts: np.ndarray,
    low: int,
    high: int,
    octaves: tuple[int, int] | None = None,
    most: int = PER_OCTAVE,
    inside: int | None = None,
) -> Spread:
    """The values in larger bins.

    Args:
        counts: of the bins.
        octaves: the powers of two, counted from the lowest, in which the ranges end. Without, few bins are looked at.
        most: bins in such a power of two.
        inside: bins that have the width of those below; None for as many.
    """
    begins, all_edges, lasts = _some_edges(counted.first, octaves, most, inside or most)
    size = bisect_left(lasts, counted.bin(counted.largest)) + 1  # up to the one that has the largest
    sums = np.add.reduceat(counts, begins, dtype=None if counted.total < _NARROW else np.int64)[:size]
    # Where there are both signs, half of what is clipped is so at `high`, and half at `low`.
    limits: set[float] = {high if counted.ends[1] == counted.largest else -low}
    if min(-counted.ends[0], counted.ends[1]) > counted.largest / 2:
        limits = {(high - low) / 2} if octaves is None else {high, -low}
    return Spread(sums.astype(np.float64), all_edges[: size + 1], sorted(limits))


def _errors_of(points: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The squared errors of points."""
    steps = np.multiply.outer(points[:, 0], 1 / scales)
    steps -= np.minimum(np.rint(steps), points[:, 2:])
    np.square(steps, out=steps)
    return np.einsum("i,ij->j", points[:, 1], steps) * (scales * scales)


def _best_between(
    scales: np.ndarray, errors: np.ndarray, ends: np.ndarray, points: np.ndarray, weight: float
) -> tuple[float, float]:
    """The best of more scales, equally far apart and where an end is on the grid; and its error.

    Errors of the given scales are interpolated, those of the points are added; of equals the least scale is taken.
    """
    last = len(scales) - 1
    places = _places(last)
    compiled = passes()
    if compiled is not None:
        return compiled.between(scales, errors, places, ends, points, weight)
    first, step = float(scales[0]), float(scales[-1] - scales[0]) / last
    even = first + places * step
    magnitudes = ends[ends[:, 1] > 1, :1]
    on_grid = magnitudes / np.maximum(np.rint(magnitudes / even), 1)
    smallest, largest = sorted((first, float(scales[-1])))
    more = np.concatenate([even, on_grid.clip(smallest, largest).ravel()])
    place = (more - first) / step
    begin = place.astype(np.int64).clip(0, last - 1)
    left = errors[begin]
    found = left + (place - begin) * (errors[begin + 1] - left) + _errors_of(points, more) + more * more * weight
    best = found.argmin()
    return float(more[best]), float(found[best])


def least_divergence(counted: Counted, bins: int, levels: int) -> float:
    """The end of the range whose quantized histogram diverges least (Kullback-Leibler) from the clipped one.

    Zeros, and what is 2**15 times smaller than the largest, do not count: zero is on the grid of every scale, and the
    half of a tensor that a ReLU makes zero would outweigh all else.

    Args:
        bins: number of bins of equal width.
        levels: number of levels that the magnitudes are quantized to; every range of that many bins or more is looked
            at, all at once. With a level for every bin the whole range diverges by nothing.
    """
    if levels >= bins:
        return counted.largest
    counts = linear(counted, bins)
    counts[0] -= counted.counts[0]
    ends, stops, windows, lasts = _windows(bins, levels)
    sums = np.zeros((3, bins + 1))
    np.cumsum([counts, counts > 0, _times_log(counts)], axis=1, out=sums[:, 1:])
    below, filled, surprise = sums
    inside, total = below[ends], below[-1]
    # A level's count is spread over those of its bins that hold anything. Ranges have most levels in common, so the
    # logarithms are those of a few windows.
    held = below[stops] - below[:-1]
    spread = held / np.maximum(filled[stops] - filled[:-1], 1)
    by_window = np.log(np.maximum(spread, 1e-9)) * held
    own = by_window.ravel().take(windows).sum(1) - _times_log(inside)
    # The last bin takes what is clipped. Where the quantized histogram has nothing, it counts as almost empty.
    last, clipped = counts[ends - 1], total - inside
    quantized = np.where(last > 0, spread.ravel()[lasts] / np.maximum(inside, 1), 1e-9)
    wanted = surprise[ends - 1] + _times_log(last + clipped)
    divergence = wanted - own - clipped * np.log(quantized)
    return counted.largest * int(ends[divergence.argmin()]) / bins


def _times_log(x: np.ndarray) -> np.ndarray:
    """``x * log(x)`` of numbers that are 0, where this is 0, or at least 1."""
    return x * np.log(np.maximum(x, 1))


def linear(counted: Counted, bins: int) -> np.ndarray:
    """Counts in bins of equal width from 0 to the largest magnitude, in float64."""
    below = counted.up_to()
    borders = _inner(bins) * (counted.largest / bins)
    places = _middles(counted.first).searchsorted(borders)
    up_to = np.zeros(bins + 1)
    up_to[1:-1] = below[places - 1] * (places > 0)
    up_to[-1] = below[-1]
    return up_to[1:] - up_to[:-1]


@lru_cache(maxsize=8)
def _inner(bins: int) -> np.ndarray:
    return np.arange(1, bins)


@lru_cache(maxsize=64)
def _middles(first: int) -> np.ndarray:
    all_edges = edges(first)
    return (all_edges[:-1] + all_edges[1:]) / 2


@lru_cache(maxsize=8)
def _windows(bins: int, levels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The ends of the ranges of `levels` bins and more; where windows of 1, 2, ... bins that begin at each bin stop;
    for each range, in a row, the windows that are its levels; and the last of these.
    """
    ends = np.arange(levels, bins + 1)
    borders = -(-np.arange(levels + 1) * ends[:, None] // levels)
    starts, widths = borders[:, :-1], np.diff(borders, axis=1)
    sizes = np.arange(1, int(widths.max()) + 1)[:, None]
    stops = np.minimum(np.arange(bins) + sizes, bins)
    windows = (widths - 1) * bins + starts
    return ends, stops, windows, windows[:, -1]


@lru_cache(maxsize=8)
def _row(value: float) -> np.ndarray:
    return np.full(BINS + 1, float(value))


@lru_cache(maxsize=8)
def _places(last: int) -> np.ndarray:
    return np.linspace(0, last, 20 * last + 1)


@lru_cache(maxsize=8)
def _shares(stride: int) -> np.ndarray:
    return np.arange(100, 0, -stride) / 100


@lru_cache(maxsize=8)
def _steps(count: int) -> np.ndarray:
    return np.arange(count + 1) / count


@lru_cache(maxsize=64)
def _some_edges(
    first: int, octaves: tuple[int, int] | None, most: int, inside: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """The first ones of the bins that are taken together, the edges, and the last ones as a list.

    Args:
        octaves: the first and the last in which there are `most` bins. Of the powers of two below there are fewer and
            fewer, so that all are equally wide; above, where everything is clipped, some. Without, few.
        inside: bins that such a power of two would have if they were as wide as those below.
    """
    lowest, highest = octaves or (0, 0)

    def bins(octave: int) -> int:
        if octaves is None:
            return _COARSE
        if octave >= lowest:
            return _CLIPPED if octave > highest else most
        return max(inside >> (lowest - octave), 1)

    steps = [PER_OCTAVE // bins(octave) for octave in range(OCTAVES)]
    begins = np.concatenate([np.arange(o << BITS, (o + 1) << BITS, step) for o, step in enumerate(steps)])
    ends = np.append(begins[1:], BINS)
    all_edges = edges(first)
    return begins, np.append(all_edges[:1], all_edges[ends]), (ends - 1).tolist()
