"""The definitions of ``docs/numerics.md`` in Python integers, written without the package."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from torch import Tensor


def whole(x: Tensor) -> np.ndarray:
    """A tensor of integers as Python integers; fails if a value is not one."""
    values = x.detach().double().numpy()
    assert (values == np.round(values)).all(), "not integers"
    return values.astype(np.int64).astype(object)


def clamp(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """Saturate."""
    return np.minimum(np.maximum(values, low), high)


def half_up(values: np.ndarray, factor: float) -> np.ndarray:
    """``floor(values * factor + 1/2)`` for integers or fractions, exactly: ``(values * M + 2**(n-1)) >> n``."""
    m, d = Fraction(factor).as_integer_ratio()
    return (2 * values * m + d) // (2 * d)


def requantize(acc: np.ndarray, factor: float, low: int, high: int) -> np.ndarray:
    """``clamp((acc * M + 2**(n-1)) >> n)``."""
    return clamp(half_up(acc, factor), low, high)


def requantize_channels(acc: np.ndarray, factors: Tensor, axis: int, low: int, high: int) -> np.ndarray:
    """`requantize` with one factor for each index of an axis, or one for all."""
    values = factors.double().reshape(-1).tolist()
    if len(values) == 1:
        return requantize(acc, values[0], low, high)
    parts = [requantize(np.take(acc, [c], axis), f, low, high) for c, f in enumerate(values)]
    return np.concatenate(parts, axis)


def requantize_int64(acc: np.ndarray, multiplier: int, shift: int, low: int, high: int) -> np.ndarray:
    """The definition on machine integers, for long ranges; the product must fit in 63 bits."""
    acc = acc.astype(np.int64)
    assert int(np.abs(acc).max(initial=0)) * multiplier + (1 << shift) < 1 << 62
    return np.clip((acc * multiplier + (1 << (shift - 1))) >> shift, low, high)


def equal(found: Tensor, expected: np.ndarray) -> None:
    """Same shape, and the same integer everywhere."""
    got = whole(found)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    wrong = np.argwhere(got != expected)
    assert len(wrong) == 0, (
        f"{len(wrong)} differ, first at {wrong[0]}: {got[tuple(wrong[0])]} for {expected[tuple(wrong[0])]}"
    )
