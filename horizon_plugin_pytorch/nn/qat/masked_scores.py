"""Masks of attention scores: large negative numbers, added or filled in, which leave positions out of a softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import QuantizationWarning, warn
from horizon_plugin_pytorch.statistics.observer_base import HIDDEN

INFINITE = 1000.0  # smaller numbers are always meant
REACH = 16.0  # exp(-16) is below every step of softmax

_LOOKED_AT = -50.0  # smaller numbers leave int8 its steps
_DWARFS = 8.0  # a mask is so many times what it is added to
_NEARLY = 0.9  # numbers of a mask may differ so much
_FEWEST_STEPS = 32  # that the scores should have: a step is a factor of their exponential
_FEWEST_HIDDEN = 0.005  # share of positions that a mask leaves out; less are outliers


def within_reach(scores: Tensor, axis: int | None, is_added_to: bool = False) -> Tensor:
    """Scores, with those that their softmax makes 0 in every format raised to where it still does.

    What lies more than `REACH` below the largest score of every group counts as nothing, however far it is; so the
    range of the scores need not reach further. Groups in which everything is masked do not count.

    Args:
        axis: of the softmax; None means that the numbers are no scores, and stay.
        is_added_to: does a bias or another mask come after? Then only what is 1000 below counts as nothing, and it
            stays far below all others, whichever the next mask leaves.

    >>> within_reach(torch.tensor([[1.0, 3.0, -1e4], [2.0, -torch.inf, 0.0]]), -1)
    tensor([[  1.,   3., -14.],
            [  2., -14.,   0.]])
    """
    if axis is None or scores.numel() == 0:
        return scores
    with torch.no_grad():
        largest = scores.amax(axis, keepdim=True)
        is_seen = largest > largest.amax() - INFINITE
        if is_added_to:
            largest, is_seen = scores, is_seen & (scores > largest - INFINITE)
        lowest = torch.where(is_seen, largest, math.inf).amin() - (2 * REACH if is_added_to else REACH)
        lowest = torch.where(lowest.isfinite(), lowest, -math.inf)
    return torch.maximum(scores, lowest)


def tell_mask(module: Any, values: tuple[Tensor, Tensor], formats: tuple[Any, Any], is_scores: bool) -> bool:
    """Say that a mask takes the steps of the numbers beside it; True if it was said.

    Args:
        values: the two operands of the sum.
        formats: in which each is a mask: its own, or that of the sum.
        is_scores: is the range of the sum `within_reach`? Then only numbers in the mask itself can be lost.
    """
    for (mask, other), dtype in zip((values, values[::-1]), formats, strict=True):
        with torch.no_grad():
            found = _numbers_beside(mask, other, is_scores)
        if found is None:
            continue
        lowest, largest = found
        steps = largest * dtype.max / -lowest
        if 0 < steps < _FEWEST_STEPS:
            _tell(module, lowest, largest, steps, is_scores)
            return True
    return False


def _numbers_beside(mask: Tensor, other: Tensor, is_scores: bool) -> tuple[float, float] | None:
    """The number of a mask, and the largest of those that it hides nothing of; None if it is no mask."""
    lowest = float(mask.amin()) if mask.numel() > 1 else 0.0
    if lowest > _LOOKED_AT:
        return None
    lowest = max(lowest, -HIDDEN) if is_scores else lowest
    is_hidden = mask <= lowest / 2
    largest = float(torch.where(is_hidden, 0.0, mask).abs().amax())
    if not is_scores:
        largest = max(largest, float(other.abs().amax()))
    is_mask = _FEWEST_HIDDEN <= float(is_hidden.double().mean()) < 1 and _DWARFS * largest < -lowest
    # All hidden positions have one number, or nearly: there may be a bias under the mask, but no outliers.
    is_one_number = bool(((mask <= lowest * _NEARLY) == is_hidden).all())
    return (lowest, largest) if is_mask and is_one_number and math.isfinite(lowest) else None


def _tell(module: Any, lowest: float, largest: float, steps: float, is_scores: bool) -> None:
    what, whose = ("has", "mask") if is_scores else ("is added to", "sum")
    remedy = (
        "Add the numbers and the mask one after the other, the mask last,"
        if is_scores
        else "Write `scores.masked_fill(hidden, float('-inf'))`, whose range ends where a softmax is 0,"
    )
    warn(
        f"`{type(module).__name__}` {module.place}: a mask of {lowest:g} {what} numbers of up to {largest:.3g} beside "
        f"it, and the scale of the {whose} leaves these {steps:.3g} steps. {remedy} or give the {whose} qint16 and a "
        "number no larger than the scores need.",
        QuantizationWarning,
    )
