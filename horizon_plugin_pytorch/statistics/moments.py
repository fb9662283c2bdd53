"""Mean and variance of large tensors, in float64 and in little memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PART = 1 << 17  # numbers at a time: their float64 form stays in the cache


def moments(x: Tensor) -> tuple[float, float, int]:
    """Mean, variance (of a sample) and count of numbers; NaN where there are too few of them.

    >>> moments(torch.tensor([1, 2, 3]))
    (2.0, 1.0, 3)
    """
    count, mean, squares = 0, 0.0, 0.0
    for part in x.detach().flatten().split(_PART):
        numbers = part.to(torch.float64, copy=True)
        middle = numbers.mean()
        numbers -= middle  # two passes are several times as fast as torch.var_mean, and as exact
        new = part.numel(), float(middle), float(torch.dot(numbers, numbers))
        count, mean, squares = joined((count, mean, squares), new)
    return mean if count else math.nan, squares / (count - 1) if count > 1 else math.nan, count


def joined(one: tuple[int, float, float], other: tuple[int, float, float]) -> tuple[int, float, float]:
    """Count, mean and sum of squared distances from it, of two sets of numbers together.

    >>> joined((1, 1.0, 0.0), (1, 3.0, 0.0))
    (2, 2.0, 2.0)
    """
    total = one[0] + other[0]
    if not total:
        return one
    apart = other[1] - one[1]
    return total, one[1] + apart * other[0] / total, one[2] + other[2] + apart * apart * one[0] * other[0] / total
