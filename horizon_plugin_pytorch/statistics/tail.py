"""All of the largest values of a large tensor, which is all that a high percentile needs.

A percentile of 99.99 is decided by one value in ten thousand: these are found in a few rows of neighbours, and nothing
else is counted. A sample of the others is kept for who asks more, such as for the percentile of two tensors together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from horizon_plugin_pytorch.statistics import bins
from horizon_plugin_pytorch.statistics.bins import SHIFT
from horizon_plugin_pytorch.statistics.samples import (
    Rows,
    large_values,
    magnitudes_of,
    rows_that_reach,
    sample_array,
)

_FIRST_ROWS = 16  # mostly few rows, such as those of one channel, have all of the largest values
_MOST_ROWS = 512


class Tail(NamedTuple):
    """The largest values, and a sample of all.

    Args:
        values: all whose magnitude is at least `least`, after clamping.
        sample: some of all, before clamping.
        each: how many values each one of the sample stands for.
        size: how many values there are.
        ends: the smallest and the largest value, after clamping.
        limits: of clamping.
    """

    values: np.ndarray
    least: float
    sample: np.ndarray
    each: int
    size: int
    ends: tuple[float, float]
    limits: tuple[float, float]

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(-self.ends[0], self.ends[1])

    def percentile(self, share: float) -> float:
        """What `Sketch.percentile` gives where all values are counted; the tail must reach so far."""
        place = len(self.values) - reach_of(share, self.size)
        value = float(np.partition(np.abs(self.values), place)[place])
        upper = bins.bits(value) >> SHIFT
        return min((bins.edge(upper) + bins.edge(upper + 1)) / 2, self.largest)


def reach_of(share: float, size: int) -> int:
    """How many of the largest values lie at a percentile or beyond it."""
    return size - math.ceil(size * min(share, 100) / 100) + 1


def tail_of(
    x: Tensor, ends: tuple[float, float], limits: tuple[float, float], rows: Rows, each: int, reach: int
) -> Tail | None:
    """The tail with so many values; None if too many rows would have to be looked at.

    Args:
        x: a tensor of one axis, of finite values.
        ends: the smallest and the largest value, after clamping to the limits.
        rows: those of the tensor.
        each: how many values each one of the sample stands for.
    """
    magnitudes = magnitudes_of(rows, x.numel(), limits)
    count = len(magnitudes)
    if reach > min(_MOST_ROWS, count // 4):
        return None
    for some in sorted({min(_FIRST_ROWS, reach), reach}):  # so many rows have as many values, or more
        large = rows_that_reach(magnitudes, float(np.partition(magnitudes, count - some)[count - some]), _MOST_ROWS)
        if large is None:
            return None
        values = large_values(x, large, limits, large.least)[0][0]
        if len(values) >= reach:
            return Tail(values, large.least, sample_array(x, each).reshape(-1), each, x.numel(), ends, limits)
    return None
