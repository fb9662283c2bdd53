"""What a tensor's magnitudes look like, in 64 KiB: a histogram that grows with the data, merges, and finds scales.

The upper bits of a floating-point number are its place in a histogram whose bins are evenly spread within each power
of two: no bin edges to choose, no second pass when the data grow, and two histograms of different data add up. Counting
costs about as much as a dozen copies of the tensor, and choosing a scale looks at the histogram only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_BITS = 10  # of the mantissa: 1024 bins in each power of two, so that a bin near the top is 1/2048 of the range
_PER_OCTAVE = 1 << _BITS
_OCTAVES = 16
BINS = _OCTAVES * _PER_OCTAVE
_SHIFT = 23 - _BITS
_LARGEST_BITS = (255 << _BITS) - 1  # of a finite number
_FULL = 1 << 30  # counts are 32 bits wide
_AT_ONCE, _TURNS = 1 << 18, 16
_COARSE, _FINE = 16, 256  # bins in each power of two that the search of a scale looks at, first and then
_LARGEST = torch.finfo(torch.float32).max
NO_LIMITS = (-math.inf, math.inf)


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
        self.largest = 0.0
        self.peak = 0  # how many values are exactly as large: of a clamped tensor many, and they should be on the grid
        self.ends = (0.0, 0.0)  # smallest and largest value
        self.total = 0

    @classmethod
    def of(cls, x: Tensor) -> Sketch:
        """The sketch of one tensor."""
        sketch = cls(x.device)
        sketch.update(x)
        return sketch

    @property
    def _first(self) -> int:
        """The upper bits of the lowest bin's edge."""
        return max(self.top - _OCTAVES + 1, 0) << _BITS

    @torch.no_grad()
    def update(
        self, x: Tensor, ends: tuple[float, float] | None = None, limits: tuple[float, float] = NO_LIMITS
    ) -> None:
        """Count a tensor's finite values.

        Args:
            ends: the smallest and the largest value, if they are known and finite: then every value is.
            limits: count the values as they are after clamping to this range; `ends` too.
        """
        x = x.detach().reshape(-1)
        if ends is None:
            x = x[x.isfinite()]
            if x.numel():
                ends = tuple(float(end.clamp(*limits)) for end in torch.aminmax(x))  # type: ignore[assignment]
        if not x.numel() or ends is None:
            return
        largest = max(-ends[0], ends[1])
        self._widen(ends)
        self._raise_to(largest)
        counts = self._count(x, ends, limits)
        self.counts = (self.counts + counts if self.total else counts).to(torch.int32)
        self.total += x.numel()
        if largest == self.largest:
            is_clamped = int(counts[self._bin(largest)]) > 1
            self.peak += _count_ends(x, ends, largest) if is_clamped else 1
        self._keep_room()

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
                    torch.clamp(part, *limits, out=values).abs_()
                bins.bitwise_right_shift_(_SHIFT)
            torch.maximum(bins.sub_(self._first - _TURNS), turns[: len(bins)], out=bins)
            found = torch.bincount(bins, minlength=_TURNS + BINS)
            counts = found if counts is None else counts.add_(found)
        assert counts is not None
        counts[_TURNS] += counts[:_TURNS].sum()
        return counts[_TURNS:]

    def merge(self, other: Sketch) -> None:
        """Add what another sketch has counted; the order of merging does not matter."""
        self._raise_to(other.largest)
        self.counts += other._moved(self.top).to(self.counts.device)
        self.peak += other.peak if other.largest == self.largest else 0
        self.total += other.total
        self._widen(other.ends)
        self._keep_room()

    def aligned(self, largest: float) -> tuple[Tensor, int]:
        """Counts and peak as they are among data whose largest magnitude is `largest`."""
        return self._moved(_bits(largest) >> 23).clone(), self.peak if largest == self.largest else 0

    def replace(self, counts: Tensor, largest: float, ends: tuple[float, float], total: int, peak: int) -> None:
        """Take the counts of more data, aligned to its largest magnitude."""
        self.counts, self.largest, self.ends, self.total, self.peak = counts, largest, ends, total, peak
        self.top = _bits(largest) >> 23

    def state(self) -> dict[str, Tensor]:
        """The sketch as tensors."""
        facts = [self.largest, *self.ends, float(self.total), float(self.peak)]
        return {"counts": self.counts, "facts": torch.tensor(facts, dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Become what `state` gave."""
        largest, low, high, total, peak = state["facts"].tolist()
        self.replace(state["counts"].to(self.counts.device), largest, (low, high), int(total), int(peak))

    def _raise_to(self, largest: float) -> None:
        """Make room for a magnitude."""
        if largest > self.largest:
            self.largest, self.peak = largest, 0
        top = _bits(self.largest) >> 23
        self.counts = self._moved(top)
        self.top = top

    def _widen(self, ends: tuple[float, float]) -> None:
        self.ends = (min(self.ends[0], ends[0]), max(self.ends[1], ends[1]))

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
            self.total = int(self.counts.sum())

    # -- what it says

    def edges(self, begin: int = 0, end: int = BINS, step: int = 1) -> Tensor:
        """Edges of every `step`-th bin, in float64; the lowest bin begins at 0."""
        return _edges(self._first, step, self.counts.device)[begin // step : end // step + 1]

    def percentile(self, share: float) -> float:
        """The magnitude below which a share of the values, in percent, lies: the middle of its bin."""
        return self.percentiles([share])[0]

    def percentiles(self, shares: Sequence[float]) -> list[float]:
        """Several percentiles at once."""
        wanted = torch.tensor([math.ceil(self.total * min(share, 100) / 100) for share in shares])
        found = torch.searchsorted(self.counts.cumsum(0), wanted.to(self.counts.device)).tolist()
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

    def errors(self, scales: Tensor, low: int, high: int, per_octave: int = _PER_OCTAVE, least: float = 0.0) -> Tensor:
        """The sum of squared differences between the values and their quantized ones, for each scale.

        Values are taken as spread evenly within their bin.

        Args:
            per_octave: number of bins in each power of two to look at.
            least: leave out the bins below; they round to 0 with every scale.
        """
        step = _PER_OCTAVE // per_octave
        begin = self._bin(least) // step if least else 0
        end = self._bin(self.largest) // step + 1
        counts = self.counts[begin * step : end * step].view(-1, step).sum(1).double()
        counts[-1] -= self.peak
        edges = self.edges(begin * step, end * step, step)
        scales = scales.double()
        # Positive values are clipped at `high`, negative ones one step later: in the middle where there are both.
        has_both = min(-self.ends[0], self.ends[1]) > self.largest / 2
        limit = (high - low) / 2 if has_both else high if self.ends[1] == self.largest else -low
        # The integral of (t - round(t))**2 from 0 to t: 1/12 for each step, and the rest; beyond the range all is rest.
        rest = torch.outer(scales.reciprocal(), edges)
        nearest = rest.round().clamp_(max=limit)
        rest.sub_(nearest)
        # A sum over bins of density * (integral at the upper edge - integral at the lower edge), by edges.
        falls = F.pad(counts.div_(edges.diff()), (1, 1)).diff().neg_()
        in_bins = (nearest @ falls).mul_(1 / 12).add_(rest.pow_(3) @ falls, alpha=1 / 3).mul_(scales**3)
        top = self.largest / scales
        return in_bins.add_((top - top.round().clamp_(max=limit)).mul_(scales).square_(), alpha=self.peak)

    def best_scale(self, low: int, high: int, stride: int = 1) -> float:
        """The scale with the least squared error.

        First a hundred shares of the range (every `stride`-th of them) on a coarse histogram, then the neighbourhood of
        the best on the full one. The largest share is a little over one, where the largest value is not clipped.
        """
        if not self.largest:
            return 0.0
        half = (high - low) / 2
        whole = self.largest / half
        shares = torch.arange(100, 0, -stride, dtype=torch.float64, device=self.counts.device) / 100
        found = float(shares[self.errors(shares * whole, low, high, _COARSE).argmin()])
        reach = stride / 100
        lowest = max(found - reach, reach / 8)
        near = torch.linspace(lowest, min(found + reach, half / high), 21, dtype=torch.float64, device=shares.device)
        errors = self.errors(near * whole, low, high, _FINE, least=0.45 * lowest * whole)
        return whole * float(near[errors.argmin()])

    def least_divergence(self, bins: int, levels: int) -> float:
        """The end of the range whose quantized histogram diverges least (Kullback-Leibler) from the clipped one.

        Zeros, and what is 2**15 times smaller than the largest, do not count: zero is on the grid of every scale, and
        the half of a tensor that a ReLU makes zero would outweigh all else.

        Args:
            bins: number of bins of equal width.
            levels: number of levels that the magnitudes are quantized to; every range of that many bins or more is
                looked at, all at once.
        """
        counts = self.linear(bins)
        counts[0] -= self.counts[0]
        levels = min(levels, bins // 2)
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
def _edges(first: int, step: int, device: torch.device) -> Tensor:
    """Edges of every `step`-th bin where the lowest one has the upper bits `first`; it begins at 0 all the same."""
    bits = torch.arange(first, first + BINS + 1, step, dtype=torch.int32, device=device)
    edges = bits.clamp_(max=_LARGEST_BITS).bitwise_left_shift_(_SHIFT).view(torch.float32).double()
    edges[0] = 0
    return edges


@lru_cache(maxsize=2)
def _turns(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device).bitwise_and_(_TURNS - 1)


def _count_ends(x: Tensor, ends: tuple[float, float], largest: float) -> int:
    """How many values lie at an end, or beyond it, that is as far from zero as `largest`."""
    found = 0
    if ends[1] == largest:
        found += int((x >= largest).sum())
    if largest and -ends[0] == largest:
        found += int((x <= -largest).sum())
    return found


def _bits(value: float) -> int:
    """The bits of a number in float32."""
    return struct.unpack("i", struct.pack("f", min(value, _LARGEST)))[0]


def best_ranges(rows: Tensor, low: int, high: int, stride: int = 1) -> Tensor:
    """The end of each row's range with the least squared error of quantizing, of a hundred shares of the largest.

    The first share lies a little over one, where the largest value is not clipped.
    """
    half = (high - low) / 2
    shares = torch.arange(100, 0, -stride, dtype=rows.dtype, device=rows.device) / 100
    shares = torch.cat([shares.new_tensor([half / high]), shares])
    return least_error(rows, rows.abs().amax(1, keepdim=True) * shares, low, high)


@torch.no_grad()
def least_error(rows: Tensor, ends: Tensor, low: int, high: int) -> Tensor:
    """Of the candidates for the end of each row's range, the one with the least squared error of quantizing.

    Args:
        ends: of shape [rows, candidates].
    """
    half = (high - low) / 2
    found = []
    at_once = max((1 << 22) // (rows.shape[1] * ends.shape[1]), 1)  # rows whose candidates fit into the cache or nearly
    for part, candidates in zip(rows.split(at_once), ends.split(at_once), strict=True):
        scales = (candidates / half).clamp_(min=1e-30).unsqueeze(2)
        values = part.unsqueeze(1)
        error = (values / scales).round_().clamp_(low, high).mul_(scales).sub_(values).square_().sum(2)
        found.append(candidates.gather(1, error.argmin(1, keepdim=True)).squeeze(1))
    return torch.cat(found)
