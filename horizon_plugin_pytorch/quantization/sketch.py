"""What a tensor's magnitudes look like, in 64 KiB: a histogram that grows with the data, merges, and finds scales.

The upper bits of a floating-point number are its place in a histogram whose bins are evenly spread within each power
of two: no bin edges to choose, no second pass when the data grow, and two histograms of different data add up. Counting
costs about as much as ten copies of the tensor, and choosing a scale looks at the histogram only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BITS = 10  # of the mantissa: 1024 bins in each power of two, so that a bin near the top is 1/2048 of the range
_PER_OCTAVE = 1 << _BITS
_OCTAVES = 16
BINS = _OCTAVES * _PER_OCTAVE
_SHIFT = 23 - _BITS
_FULL = 1 << 30  # counts are 32 bits wide


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
    def update(self, x: Tensor, ends: tuple[float, float] | None = None) -> None:
        """Count a tensor's finite values.

        Args:
            ends: the smallest and the largest value, if they are known and finite: then every value is.
        """
        x = x.detach().reshape(-1).float()
        if ends is None:
            x = x[x.isfinite()]
            ends = (float(x.min()), float(x.max())) if x.numel() else (0.0, 0.0)
        if not x.numel():
            return
        self._widen(ends)
        self._raise_to(max(-ends[0], ends[1]))
        bins = x.view(torch.int32).bitwise_and(0x7FFFFFFF).bitwise_right_shift_(_SHIFT)
        bins = bins.sub_(self._first).clamp_(min=0)
        counts = torch.bincount(bins, minlength=BINS).to(torch.int32)
        self.counts += counts
        self.total += x.numel()
        if max(-ends[0], ends[1]) == self.largest:
            is_clamped = int(counts[self._bin(self.largest)]) > 1
            self.peak += int((x.abs() == self.largest).sum()) if is_clamped else 1
        self._keep_room()

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

    def edges(self) -> Tensor:
        """Lower edges of the bins and the upper edge of the last, in float64; the lowest bin begins at 0."""
        bits = torch.arange(BINS + 1, dtype=torch.int32, device=self.counts.device).add_(self._first)
        edges = bits.clamp_(max=(255 << _BITS) - 1).bitwise_left_shift_(_SHIFT).view(torch.float32).double()
        edges[0] = 0
        return edges

    def percentile(self, share: float) -> float:
        """The magnitude below which a share of the values, in percent, lies: the middle of its bin."""
        if share >= 100:
            return self.largest
        covered = self.counts.cumsum(0)
        wanted = math.ceil(self.total * share / 100)
        index = int(torch.searchsorted(covered, wanted))
        edges = self.edges()
        return min(float(edges[index] + edges[index + 1]) / 2, self.largest)

    def linear(self, bins: int) -> Tensor:
        """Counts in bins of equal width from 0 to the largest magnitude, in float64."""
        edges = self.edges()
        middle = (edges[:-1] + edges[1:]) / 2
        index = (middle * (bins / self.largest if self.largest else 0.0)).long().clamp_(max=bins - 1)
        return torch.zeros(bins, dtype=torch.float64, device=middle.device).index_add_(0, index, self.counts.double())

    def errors(self, scales: Tensor, low: int, high: int, per_octave: int = _PER_OCTAVE, least: float = 0.0) -> Tensor:
        """The sum of squared differences between the values and their quantized ones, for each scale.

        Values are taken as spread evenly within their bin.

        Args:
            per_octave: number of bins in each power of two to look at.
            least: leave out the bins below; they round to 0 with every scale.
        """
        step = _PER_OCTAVE // per_octave
        begin = self._bin(least) // step * step if least else 0
        counts = self.counts.view(-1, step).sum(1)[begin // step :].double()
        edges = self.edges()[begin::step]
        end = self._bin(self.largest) // step - begin // step
        counts, edges = counts[: end + 1], edges[: end + 2]
        counts[end] -= self.peak
        steps = scales.double().unsqueeze(1)
        # Positive values are clipped at `high`, negative ones one step later: in the middle where there are both.
        has_both = min(-self.ends[0], self.ends[1]) > self.largest / 2
        limit = (high - low) / 2 if has_both else high if self.ends[1] == self.largest else -low
        position = edges / steps
        nearest = position.round().clamp_(max=limit)
        # The integral of (t - round(t))**2 from 0 to t: 1/12 for each step, and the rest; beyond the range all is rest.
        integral = position.sub(nearest)
        integral = integral.mul(integral).mul_(integral).div_(3).add_(nearest, alpha=1 / 12)
        in_bins = integral.diff(dim=1) @ (counts / edges.diff()) * steps.squeeze(1) ** 3
        top = self.largest / steps.squeeze(1)
        return in_bins + self.peak * (top - top.round().clamp_(max=limit)).mul_(steps.squeeze(1)).square_()

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
        found = float(shares[self.errors(shares * whole, low, high, 64).argmin()])
        reach = stride / 100
        lowest = max(found - reach, reach / 8)
        near = torch.linspace(lowest, min(found + reach, half / high), 21, dtype=torch.float64, device=shares.device)
        return whole * float(near[self.errors(near * whole, low, high, least=0.45 * lowest * whole).argmin()])

    def least_divergence(self, bins: int, levels: int) -> float:
        """The end of the range whose quantized histogram diverges least (Kullback-Leibler) from the clipped one.

        Args:
            bins: number of bins of equal width.
            levels: number of levels that the magnitudes are quantized to; every range of that many bins or more is
                looked at, all at once.
        """
        counts = self.linear(bins)
        levels = min(levels, bins // 2)
        total = counts.sum()
        ends = torch.arange(levels, bins + 1, device=counts.device)
        zero = counts.new_zeros(1)
        below = torch.cat([zero, counts.cumsum(0)])
        filled = torch.cat([zero, (counts > 0).double().cumsum(0)])
        surprise = torch.cat([zero, torch.special.xlogy(counts, counts).cumsum(0)])
        # A level's count is spread over those of its bins that hold anything.
        borders = -(-torch.arange(levels + 1, device=counts.device) * ends.unsqueeze(1) // levels)
        held, places = below[borders].diff(dim=1), filled[borders].diff(dim=1)
        spread = torch.special.xlogy(held, held / (places.clamp(min=1) * below[ends].clamp(min=1).unsqueeze(1))).sum(1)
        # The last bin takes what is clipped. Where the quantized histogram has nothing, it counts as almost empty.
        last, clipped = counts[ends - 1], total - below[ends]
        quantized = torch.where(last > 0, held[:, -1] / (places[:, -1].clamp(min=1) * below[ends].clamp(min=1)), 1e-9)
        own = surprise[ends - 1] + torch.special.xlogy(last + clipped, last + clipped)
        divergence = own - spread - clipped * quantized.log()
        return self.largest * int(ends[divergence.argmin()]) / bins


def _bits(value: float) -> int:
    """The bits of a number in float32."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


@torch.no_grad()
def best_ranges(rows: Tensor, low: int, high: int, stride: int = 1) -> Tensor:
    """The end of each row's range with the least squared error of quantizing, of a hundred shares of the largest.

    The first share lies a little over one, where the largest value is not clipped.
    """
    half = (high - low) / 2
    largest = rows.abs().amax(1)
    shares = torch.arange(100, 0, -stride, dtype=rows.dtype, device=rows.device) / 100
    shares = torch.cat([shares.new_tensor([half / high]), shares])
    found = []
    at_once = max((1 << 22) // (rows.shape[1] * len(shares)), 1)  # rows whose candidates fit into the cache or nearly
    for part, top in zip(rows.split(at_once), largest.split(at_once), strict=True):
        scales = (top.unsqueeze(1) * (shares / half)).clamp_(min=1e-30).unsqueeze(2)
        values = part.unsqueeze(1)
        error = (values / scales).round_().clamp_(low, high).mul_(scales).sub_(values).square_().sum(2)
        found.append(top * shares[error.argmin(1)])
    return torch.cat(found)
