"""The bins of magnitudes: the upper bits of a floating-point number are its place in a histogram.

Bins are evenly spread within each power of two, and the sixteen powers of two below the largest value are counted.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np

BITS = 10  # of the mantissa: 1024 bins in each power of two, so that a bin near the top is 1/2048 of the range
PER_OCTAVE = 1 << BITS
OCTAVES = 16
BINS = OCTAVES * PER_OCTAVE
SHIFT = 23 - BITS
_LARGEST_BITS = (255 << BITS) - 1  # of a finite number
_LARGEST = float(np.finfo(np.float32).max)


def bits(value: float) -> int:
    """The bits of a number in float32."""
    return struct.unpack("i", struct.pack("f", min(value, _LARGEST)))[0]


def exponent(ends: tuple[float, float]) -> int:
    """The exponent, with its bias, of the larger one."""
    return bits(max(-ends[0], ends[1])) >> 23


def first_bin(top: int) -> int:
    """The upper bits of the lowest bin's edge, where the highest power of two has this exponent."""
    return max(top - OCTAVES + 1, 0) << BITS


def edge(upper: int) -> float:
    """The number with these upper bits."""
    return struct.unpack("f", struct.pack("i", min(upper, _LARGEST_BITS) << SHIFT))[0]


@lru_cache(maxsize=64)
def edges(first: int) -> np.ndarray:
    """Edges of the bins, in float64, where the lowest one has the upper bits `first`; it begins at 0 all the same."""
    upper = np.minimum(np.arange(first, first + BINS + 1, dtype=np.int32), _LARGEST_BITS)
    found = (upper << SHIFT).view(np.float32).astype(np.float64)
    found[0] = 0
    found.setflags(write=False)
    return found
