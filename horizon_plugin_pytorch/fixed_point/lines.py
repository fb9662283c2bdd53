"""Requantization as integer kernels do it, in two float32 roundings, and factors for which these are the definition.

A kernel gives ``clamp(round(float32(float32(acc * scale) + offset)), low, high)``, a line for each channel: it cannot
add the bias to the integers. Most channels have a scale and an offset with which that is the definition of
`rescaling.py`, for every sum that they can reach. Of those that have none the multiplier ``M`` is moved by a few units,
as it is where one float32 rounding fails, so that a layer runs as one call of a kernel.

Whether there are kernels, and which input a layer meets, plays no part in that: a model has the same integers on every
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.rescaling import (
    EXACT_FLOAT32,
    MOST_STEPS,
    Steps,
    is_proved,
    multiplier_and_shift,
)

_SCALE_MOVES = (0, 1, -1, 2, -2, 3, -3)  # in float32 numbers; farther ones are hardly ever proved
_MOVES = np.array([move for size in range(1, 17) for move in (size, -size)], dtype=np.float64)  # of a multiplier
_MOVES_AT_ONCE = 4
_AT_ONCE = 256  # channels whose steps stay in the cache
# Of products below this, of factors from this on, float64 holds the difference to a half and its room.
_MOST_PRODUCT, _LEAST_FACTOR = 2.0**26, 2.0**-22


@dataclass(frozen=True)
class Line:
    """Two float32 roundings: ``clamp(round(float32(float32(acc * scale) + offset)), low, high)``.

    Attributes:
        scale, offset: float32, one for each channel.
        is_proved: for which channels this is the definition.
    """

    scale: Tensor
    offset: Tensor
    is_proved: Tensor

    @property
    def unproved(self) -> Tensor:
        """The channels for which it is not the definition."""
        return (~self.is_proved).nonzero().flatten()


def choose_line(factor: Tensor, bias: Tensor | None, low: int, high: int, reach: Tensor) -> Line:
    """Scales and offsets with which two float32 roundings give the definition for every ``|acc| <= reach``.

    The bias is part of the definition here: ``(acc + bias) * factor``.

    Args:
        factor: float32, one for each channel.
        bias: integers, or None.
        reach: the largest ``|acc|``, below 2**24.
    """
    found = _find(*_arrays(factor, bias, reach), low, high)
    return Line(*(torch.from_numpy(array).to(factor.device) for array in found))


def move_to_lines(factor: Tensor, ratio: Tensor, bias: Tensor | None, low: int, high: int, reach: Tensor) -> Tensor:
    """Factors that have lines, as far as there are some close to these.

    Args:
        factor: what `choose_factor` gives for the ratio.
        bias, low, high, reach: as of `choose_line`.

    >>> ratio = torch.tensor([0.00023], dtype=torch.float64)
    >>> from horizon_plugin_pytorch.fixed_point.rescaling import choose_factor
    >>> bias, reach = torch.tensor([-70000.0]), torch.tensor([1e6])
    >>> factor = choose_factor(ratio, -128, 127)
    >>> moved = move_to_lines(factor, ratio, bias, -128, 127, reach)
    >>> [bool(choose_line(tried, bias, -128, 127, reach).is_proved) for tried in (factor, moved)]
    [False, True]
    """
    if factor.dtype != torch.float32 or not 0 < high - low <= MOST_STEPS or not factor.numel():
        return factor
    if float(reach.max()) >= EXACT_FLOAT32:
        return factor
    value, shift, ends = _arrays(factor, bias, reach)
    pending = np.flatnonzero(~_find(value, shift, ends, low, high)[2])
    if pending.size:
        unit = np.ldexp(1.0, -multiplier_and_shift(ratio.detach().double().reshape(-1))[1].cpu().numpy())
        steps = Steps.between(low, high)
        for begin in range(0, len(_MOVES), _MOVES_AT_ONCE):
            moves = _MOVES[begin : begin + _MOVES_AT_ONCE]
            trial = (value[pending, None] + unit[pending, None] * moves).reshape(-1)  # exact: 21 bits
            of_channel = pending.repeat(len(moves))
            _, _, has_line = _find(trial, shift[of_channel], ends[of_channel], low, high)
            both = (is_proved(trial, steps, EXACT_FLOAT32 - 1) & has_line).reshape(len(pending), -1)
            first = both.argmax(1) + np.arange(len(pending)) * len(moves)  # of equal ones, the first
            is_done = both.any(1)
            value[pending[is_done]] = trial[first[is_done]]
            pending = pending[~is_done]
            if not pending.size:
                break
        factor = torch.from_numpy(value).float().to(factor.device)
    return factor


def _arrays(factor: Tensor, bias: Tensor | None, reach: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In float64, on the host."""
    value = factor.detach().double().reshape(-1).cpu().numpy()
    shift = np.zeros_like(value) if bias is None else bias.detach().double().reshape(-1).cpu().numpy()
    return value.copy(), shift, reach.detach().double().reshape(-1).cpu().numpy()


@dataclass(frozen=True)
class _Edges:
    """Where outputs step to the next integer ``k``: rows, for channels in columns.

    A half is rounded to the even side, and a float32 sum is a half if the real sum is nearer to it than to the next
    float32 number. So the real sum steps, to an odd ``k`` half of such a distance beyond the half, to an even one as
    much before it.
    """

    half: np.ndarray
    real: np.ndarray

    @staticmethod
    @lru_cache(maxsize=64)
    def between(low: int, high: int) -> _Edges:
        k = np.arange(low + 1, high + 1)[:, None]
        half = k - 0.5
        room = np.ldexp(1.0, np.frexp(half)[1] - 25)
        return _Edges(half, half + np.where(k % 2 == 1, room, -room))


def _find(
    value: np.ndarray, bias: np.ndarray, reach: np.ndarray, low: int, high: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales, offsets and whether they are proved, for factors in float64."""
    scale, offset = value.astype(np.float32), np.zeros(len(value), dtype=np.float32)
    is_found = np.zeros(len(value), dtype=bool)
    edges = _Edges.between(low, high)
    for begin in range(0, len(value), _AT_ONCE):
        part = slice(begin, begin + _AT_ONCE)
        _find_some(value[part], bias[part], reach[part], edges, (scale[part], offset[part], is_found[part]))
    return scale, offset, is_found


def _find_some(
    value: np.ndarray,
    bias: np.ndarray,
    reach: np.ndarray,
    edges: _Edges,
    found: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Write what is found of some channels.

    A scale near the factor leaves an interval of offsets with which no step comes early or late; its middle is taken.
    """
    step = np.divide(edges.half, value)  # the integer at which the output steps
    np.ceil(step, out=step)
    step -= bias
    beyond: tuple[np.ndarray, np.ndarray] | None = None
    last = step - 1  # the one before
    if (step[-1] > reach).any() or (last[0] < -reach).any():  # those beyond the reach are replaced by its ends
        beyond = step > reach, last < -reach
        np.minimum(last, reach, out=last)
        np.maximum(step, -reach, out=step)
    product = np.maximum(np.abs(step[0]), np.abs(step[-1])) * value
    is_exact = (product < _MOST_PRODUCT) & (value >= _LEAST_FACTOR)
    stepping, waiting = step.astype(np.float32), last.astype(np.float32)
    scale, offset, is_found = found
    pending = np.flatnonzero(is_exact)
    for move in _SCALE_MOVES:
        if not pending.size:
            return
        tried = (value[pending].astype(np.float32).view(np.int32) + np.int32(move)).view(np.float32)
        everything = len(pending) == len(value)
        lowest = edges.real - (stepping if everything else stepping[:, pending]) * tried
        highest = edges.real - (waiting if everything else waiting[:, pending]) * tried
        if beyond is not None:
            late, early = beyond
            lowest[late[:, pending]], highest[early[:, pending]] = -np.inf, np.inf
        least, most = lowest.max(0), highest.min(0)
        middle = _between(least, most)
        is_done = (least < middle) & (middle < most)
        done = pending[is_done]
        scale[done], offset[done], is_found[done] = tried[is_done], middle[is_done], True
        pending = pending[~is_done]


def _between(least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """The middle of intervals, of which one end may be infinite, in float32."""
    middle = np.where(np.isinf(least), most - 1, np.where(np.isinf(most), least + 1, (least + most) / 2))
    return middle.astype(np.float32)
