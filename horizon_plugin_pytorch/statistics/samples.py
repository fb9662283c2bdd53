"""Which values of a large tensor are counted: a sample that is spread over it, and more and more of the large ones.

Of what is common a sample says enough. What is rare, and how far out it lies, decides where a range ends; it is found
by the smallest and the largest value of each row of neighbours, which cost little more than those of the whole tensor.
The sample says from where on there are about five hundred values, and the rows that reach so far, mostly those of a few
channels, have all of these. Where they lie apart in too many rows, all of the largest values are counted, and of those
that come next more than the sample has.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.compiled.passes import NO_LIMITS, is_plain, is_serial

_ENOUGH, _RUN = 20000, 16  # values that are counted of a larger tensor, at least; neighbours that are taken together
_USUAL_FACTORS = 2 * 3 * 5 * 7 * 11 * 13
MORE = 1 << 15  # so many for who may compare the whole of a distribution, and not just its end, of all data
MANY = 1 << 16  # so many for who does so after every batch
CLAMPED = 1 << 16  # so many where the end itself is common, and its share is known by the sample alone
_ROW = 256  # neighbours of which the ends are found
_LARGEST_ROWS = 128  # so many rows have the largest values; of twice as many, the largest value is common
_NEXT_ROWS, _NEXT_EACH = 1024, 8  # so many rows come next, and one of so many is looked at


def each_of(x: Tensor, enough: int | None = None) -> int:
    """How many values each counted one stands for: 1 where all are counted, else an odd number.

    Args:
        enough: values that are counted at least; None for as many as the end of a range needs.
    """
    each = x.numel() // (enough or _ENOUGH)
    return 1 if each < 3 or x.device.type != "cpu" else each - (1 - each % 2)


def sample_of(x: Tensor, each: int) -> Tensor:
    """All values of a tensor of one axis, or of many some that are spread evenly: runs of neighbours."""
    if each == 1:
        return x
    begin, runs, run, stride = places_of(x.numel(), each)
    return x[begin:].unfold(0, run, stride)[:runs].reshape(-1)


def sample_array(x: Tensor, each: int) -> np.ndarray:
    """What `sample_of` takes, in float32 on the host, one run in a row; where it lies in the tensor, if it can be."""
    if each == 1 or not _lends_memory(x):
        return array_of(sample_of(x, each))
    begin, runs, run, stride = places_of(x.numel(), each)
    array = np.ascontiguousarray(array_of(x))
    size = array.itemsize
    return np.ndarray((runs, run), array.dtype, array.data, begin * size, (stride * size, size))


def places_of(size: int, each: int) -> tuple[int, int, int, int]:
    """Where a sample begins, how many runs it has, how long they are, and how far the next one begins from each.

    At either end up to one value in a hundred lies outside, of which only the large ones are counted.
    """
    if each == 1:
        return 0, 1, size, size
    runs, stride = -(-(size // _RUN - each // 2) // each), _stride(each)
    return each // 2 * _RUN + (_RUN * each - stride) * runs // 2, runs, _RUN, stride


@lru_cache(maxsize=1024)
def _stride(each: int) -> int:
    """How far runs lie apart, in step with neither rows nor channels: their numbers have small factors, as a rule."""
    return next(stride for stride in range(_RUN * each, 0, -1) if math.gcd(stride, _USUAL_FACTORS) == 1)


def sample_size(size: int, each: int) -> int:
    """How many values `sample_of` takes."""
    _, runs, run, _ = places_of(size, each)
    return runs * run


class Rows(NamedTuple):
    """The smallest and the largest value of each row of neighbours; what is left at the end is a row too."""

    lows: Tensor
    highs: Tensor

    def ends(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value of all; NaN if any value is NaN."""
        return self.lows.amin(), self.highs.amax()


def rows_of(x: Tensor) -> Rows:
    """The rows of a tensor of one axis."""
    whole = x.numel() // _ROW * _ROW
    has_rest = whole < x.numel()
    rows = (x[:whole] if has_rest else x).view(-1, _ROW)
    compiled = passes()
    if compiled is not None and is_plain(rows) and is_serial(rows):
        lows, highs = compiled.rows(rows)
    else:
        lows, highs = rows.amin(1), rows.amax(1)
    if has_rest:
        rest = x[whole:]
        lows, highs = torch.cat([lows, rest.amin().view(1)]), torch.cat([highs, rest.amax().view(1)])
    return Rows(lows, highs)


class Large(NamedTuple):
    """Rows that have large values.

    Args:
        places: of the rows; what is left at the end of the tensor belongs to them, too.
        exact: so many of them, the first, are all that have the largest values; of those that come next,
            each stands for `_NEXT_EACH`.
        least: the magnitude above which other rows have none.
    """

    places: np.ndarray
    exact: int
    least: float


def magnitudes_of(rows: Rows, size: int, limits: tuple[float, float]) -> np.ndarray:
    """The largest magnitude of each row, but for what is left at the end, after clamping to these limits.

    Args:
        size: how many values the tensor has.
    """
    count, (lowest, highest) = size // _ROW, limits
    if lowest >= 0:
        return array_of(rows.highs.float().clamp(lowest, highest))[:count]
    lows, highs = array_of(rows.lows)[:count], array_of(rows.highs)[:count]
    if limits != NO_LIMITS:
        lows, highs = np.maximum(lows, lowest), np.minimum(highs, highest)
    return np.maximum(highs, -lows)


def are_clamped(magnitudes: np.ndarray, largest: float) -> bool:
    """Do so many rows have the largest magnitude that a sample says enough of it?"""
    return int(np.count_nonzero(magnitudes >= np.float32(largest))) > 2 * _LARGEST_ROWS


def rows_that_reach(magnitudes: np.ndarray, least: float, most: int = 2 * _LARGEST_ROWS) -> Large | None:
    """The rows that have values of this magnitude; None if these are more than `most`."""
    (places,) = (magnitudes >= least).nonzero()
    return Large(places, len(places), least) if len(places) <= most else None


def largest_rows(magnitudes: np.ndarray, each: int) -> Large | None:
    """The rows with the largest magnitudes and, where the sample is sparser, some of those that come next.

    None where too many rows have the largest: of a clamped tensor, of which a sample says enough.

    Args:
        each: how many values each one of the sample stands for.
    """
    count = len(magnitudes)
    most = min(_LARGEST_ROWS, count)
    more = min(most + _NEXT_ROWS, count // 2) if each >= 2 * _NEXT_EACH else most
    ordered = np.partition(magnitudes, (count - more, count - most))
    next_least, least = ordered[count - more], ordered[count - most]
    (places,) = (magnitudes >= next_least).nonzero()
    found = magnitudes[places]
    largest, others = places[found >= least], places[found < least]
    if len(largest) > 2 * _LARGEST_ROWS:
        return None
    if len(others) > 2 * _NEXT_ROWS:
        others, next_least = others[:0], least
    return Large(np.concatenate([largest, others[_NEXT_EACH // 2 :: _NEXT_EACH]]), len(largest), float(next_least))


def large_values(
    x: Tensor, large: Large, limits: tuple[float, float], least: float
) -> tuple[tuple[np.ndarray, int], tuple[np.ndarray, int]]:
    """The values of these rows whose magnitude, after clamping, is at least this, and how many each stands for."""
    whole = x.numel() // _ROW
    if _lends_memory(x):
        array = array_of(x)
        rows, rest = array[: whole * _ROW].reshape(-1, _ROW)[large.places].reshape(-1), array[whole * _ROW :]
    else:
        places = torch.from_numpy(large.places)
        rows = array_of(x[: whole * _ROW].view(-1, _ROW).index_select(0, places).view(-1))
        rest = array_of(x[whole * _ROW :])
    values = np.concatenate([rest, rows]) if len(rest) else rows
    if limits != NO_LIMITS:
        np.minimum(values, limits[1], out=values)
        if limits[0]:  # below 0 nothing is large, clamped or not
            np.maximum(values, limits[0], out=values)
    is_large = (values if limits[0] >= 0 else np.abs(values)) >= least
    known = int(np.count_nonzero(is_large[: len(rest) + large.exact * _ROW]))
    values = values[is_large]
    return (values[:known], 1), (values[known:], _NEXT_EACH)


def _lends_memory(x: Tensor) -> bool:
    """Can numpy look at the numbers where they are, as float32? A call of numpy takes a fraction of torch's."""
    return x.dtype is torch.float32 and x.is_cpu and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def array_of(x: Tensor, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The numbers as an array on the host, of one of two types: float32 or int32."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # of `torch.func`, which lends no memory
        return np.array(x.tolist(), dtype=np.float32 if dtype is torch.float32 else np.int32)
    return (x if x.is_cpu else x.cpu()).resolve_neg().numpy()  # memory may have the other sign
