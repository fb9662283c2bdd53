"""Which values of a large tensor are counted: a sample that is spread over it, and all of the largest ones.

Of what is common a sample says enough. What is rare, and how far out it lies, decides where a range ends; it is found
by the smallest and the largest value of each row of neighbours, which cost no more than those of the whole tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.compiled.passes import is_plain, is_serial

_ENOUGH, _RUN = 1 << 16, 16  # values that are counted of a larger tensor, at least; neighbours that are taken together
MANY = 1 << 17  # so many for who compares the whole of a distribution, and not just its end
_ROW = 256  # neighbours of which the ends are found
_LARGEST_ROWS = 128  # so many rows have the largest values; of twice as many, the largest value is common


def each_of(x: Tensor, enough: int | None = None) -> int:
    """How many values each counted one stands for: 1 where all are counted, else an odd number.

    Args:
        enough: values that are counted at least; None for as many as the end of a range needs.
    """
    each = x.numel() // (enough or _ENOUGH)
    return 1 if each < 3 or x.device.type != "cpu" else each - (1 - each % 2)


def sample_of(x: Tensor, each: int) -> Tensor:
    """All values, or of many some that are spread evenly.

    Runs of neighbours are taken, each at an odd number of runs from the last: in step with neither rows nor channels.
    """
    if each == 1:
        return x
    return x[: x.numel() // _RUN * _RUN].view(-1, _RUN)[each // 2 :: each].reshape(-1)


def places_of(size: int, each: int) -> tuple[int, int, int]:
    """The first run of a sample, the length of a run, and how many runs lie between two."""
    return (each // 2, _RUN, each) if each > 1 else (0, size, 1)


def sample_size(size: int, each: int) -> int:
    """How many values `sample_of` takes."""
    return size if each == 1 else -(-(size // _RUN - each // 2) // each) * _RUN


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
    rows, rest = x[:whole].view(-1, _ROW), x[whole:]
    compiled = passes()
    if compiled is not None and is_plain(rows) and is_serial(rows):
        lows, highs = compiled.rows(rows)
    else:
        lows, highs = rows.amin(1), rows.amax(1)
    if rest.numel():
        lows, highs = torch.cat([lows, rest.amin().view(1)]), torch.cat([highs, rest.amax().view(1)])
    return Rows(lows, highs)


def largest_rows(x: Tensor, rows: Rows, limits: tuple[float, float]) -> tuple[Tensor, float] | None:
    """The rows that have the largest magnitudes, as one tensor, and the one from which on these are all that there are.

    None where too many rows have the largest: of a clamped tensor, of which a sample says enough.

    Args:
        limits: magnitudes are those after clamping to this range.
    """
    magnitudes = rows.highs.clamp(*limits)
    if limits[0] < 0:
        torch.maximum(magnitudes, rows.lows.clamp(*limits).neg_(), out=magnitudes)
    least = magnitudes.topk(min(_LARGEST_ROWS, len(magnitudes))).values[-1]
    (places,) = (magnitudes >= least).nonzero(as_tuple=True)
    if len(places) > 2 * _LARGEST_ROWS:
        return None
    whole = x.numel() // _ROW
    found = x[: whole * _ROW].view(-1, _ROW).index_select(0, places[places < whole]).view(-1)
    if int(places[-1]) == whole:
        found = torch.cat([found, x[whole * _ROW :]])
    return found, float(least)
