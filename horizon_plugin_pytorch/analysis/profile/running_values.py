"""What tensors hold, batch after batch, in memory that does not grow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horizon_plugin_pytorch.analysis.profile.document import Histogram, Values
from horizon_plugin_pytorch.statistics.moments import joined, moments

_PART = 1 << 20  # numbers counted at a time: histc counts in float32, which is exact up to 2**24
_MOST_RANGES = 64
_LEAST = 1e-12  # the width of a range of one number, which is zero


class RunningHistogram:
    """Counts in bins of equal width; the bins become wider when a number is beyond them, and none is lost.

    Args:
        bins: how many, an even number.

    >>> counts = RunningHistogram(4)
    >>> counts.update(torch.tensor([0.0, 1.0, 2.0, 3.0]), 0.0, 3.0, 1.0)
    >>> counts.update(torch.tensor([7.0]), 7.0, 7.0, 1.0)
    >>> counts.result()
    Histogram(low=-0.5, high=7.5, counts=(2, 2, 0, 1))
    """

    def __init__(self, bins: int) -> None:
        self._bins = bins
        self._low = self._width = 0.0
        self._counts: Tensor | None = None

    def update(self, x: Tensor, low: float, high: float, step: float | None) -> None:
        """Count numbers.

        Args:
            x: finite numbers.
            low, high: the smallest and the largest of them.
            step: of the grid that they are on, if they are on one: each bin then has as many steps as any other.
        """
        margin = step / 2 if step else max((high - low) * 1e-6, abs(high) * 1e-6, _LEAST) if low == high else 0.0
        low, high = low - margin, high + margin
        if self._counts is None:
            self._start(low, high, step)
        assert self._counts is not None
        while low < self._low or high > self._high:
            self._widen(to_left=low < self._low)
        for part in x.flatten().split(_PART):
            inside = part.clamp(self._low, self._high)  # the ends are rounded to float32
            self._counts += torch.histc(inside, self._bins, self._low, self._high).long().cpu()

    @property
    def _high(self) -> float:
        return self._low + self._bins * self._width

    def _start(self, low: float, high: float, step: float | None) -> None:
        self._low = low
        steps = max((high - low) / step if step else 1.0, 1.0)
        self._width = step * math.ceil(steps / self._bins - 1e-6) if step else (high - low) / self._bins
        self._width = max(self._width, math.ulp(low) * 4)  # rounding is left to `_widen`
        self._counts = torch.zeros(self._bins, dtype=torch.long)

    def _widen(self, to_left: bool) -> None:
        """Join neighbouring bins, and put empty ones before or behind them."""
        assert self._counts is not None
        if to_left:
            self._low -= self._bins * self._width
        self._width *= 2
        joined = self._counts.view(-1, 2).sum(1)
        empty = torch.zeros_like(joined)
        self._counts = torch.cat([empty, joined] if to_left else [joined, empty])

    def result(self) -> Histogram | None:
        """The counts so far; None if there were none."""
        if self._counts is None:
            return None
        return Histogram(self._low, self._high, tuple(self._counts.tolist()))


class RunningValues:
    """The statistics of all tensors that it is given.

    >>> seen = RunningValues(8)
    >>> seen.update(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    >>> seen.update(torch.tensor([[torch.nan, 0.0]]))
    >>> found = seen.values()
    >>> found.low, found.high, found.mean, found.nan, (found.dead, found.channels), found.ranges
    (0.0, 3.0, 0.8, 1, (1, 2), ((0.0, 3.0), (0.0, 0.0)))
    """

    def __init__(self, bins: int) -> None:
        self._histogram = RunningHistogram(bins)
        self._count, self._mean, self._squares = 0, 0.0, 0.0
        self._low, self._high = math.inf, -math.inf
        self._nan = self._inf = 0
        self._used: Tensor | None = None  # channels that held something
        self._ranges: list[tuple[float, float]] = []

    def update(self, x: Tensor, step: float | None = None, has_channels: bool = True) -> None:
        """Count a tensor.

        Args:
            x: real numbers, integers or booleans.
            step: of the grid that they are on, if they are on one.
            has_channels: is the second axis that of channels?
        """
        if not x.numel():
            return
        x = x.detach()
        x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        if has_channels and x.dim() > 1:
            self._count_channels(x)
        low, high = (float(end) for end in torch.aminmax(x))
        if not (math.isfinite(low) and math.isfinite(high)):
            self._nan += int(x.isnan().sum())
            self._inf += int(x.isinf().sum())
            x = x[x.isfinite()]
            if not x.numel():
                return
            low, high = (float(end) for end in torch.aminmax(x))
        self._low, self._high = min(low, self._low), max(high, self._high)
        if len(self._ranges) < _MOST_RANGES:
            self._ranges.append((low, high))
        mean, var, count = moments(x)
        new = count, mean, var * (count - 1) if count > 1 else 0.0
        self._count, self._mean, self._squares = joined((self._count, self._mean, self._squares), new)
        self._histogram.update(x, low, high, step)

    def _count_channels(self, x: Tensor) -> None:
        others = [axis for axis in range(x.dim()) if axis != 1]
        used = ((x.amax(others) != 0) | (x.amin(others) != 0)).cpu()
        if self._used is None:
            self._used = used
        elif self._used.shape == used.shape:
            self._used |= used

    def values(self) -> Values:
        """What was seen so far."""
        has = self._count > 0
        channels = None if self._used is None else self._used.numel()
        return Values(
            self._low if has else None,
            self._high if has else None,
            self._mean if has else None,
            self._squares / (self._count - 1) if self._count > 1 else None,
            self._nan,
            self._inf,
            self._histogram.result(),
            channels,
            None if self._used is None else int((~self._used).sum()),
            tuple(self._ranges),
        )
