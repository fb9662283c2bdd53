"""Module forms of torch functions of one variable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

_LARGEST = 100.0  # outputs that grow without bound are clipped here by default


class Exp(nn.Module):
    """``torch.exp``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


def _sqrt(x: Tensor) -> Tensor:
    is_positive = x > 0  # at 0 the slope is infinite, below it there is no root: value and gradient are 0
    return torch.where(is_positive, torch.sqrt(torch.where(is_positive, x, 1.0)), 0.0)


class Sqrt(nn.Module):
    """``torch.sqrt``; the quantized form of a negative number is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)

    @staticmethod
    def quantized_function() -> Callable[[Tensor], Tensor]:
        """What is put into the table."""
        return _sqrt


def _rsqrt(x: Tensor, epsilon: float, max_value: float) -> Tensor:
    shifted = x.clamp(min=0.0) + epsilon
    is_small = shifted < max_value**-2
    return torch.where(is_small, max_value, torch.rsqrt(torch.where(is_small, 1.0, shifted)))


class Rsqrt(nn.Module):
    """``torch.rsqrt`` of ``x + epsilon``; its quantized form is clipped to `max_value`.

    Args:
        epsilon: added first, as normalisation layers do. A rounded variance below 0 counts as 0.
        max_value: largest output of the quantized form; None takes ``1 / sqrt(epsilon)``, or 100 without epsilon.
    """

    def __init__(self, epsilon: float = 0.0, max_value: float | None = None) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.max_value = max_value if max_value is not None else epsilon**-0.5 if epsilon > 0 else _LARGEST

    def forward(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x + self.epsilon)

    def quantized_function(self) -> Callable[[Tensor], Tensor]:
        """What is put into the table."""
        return partial(_rsqrt, epsilon=self.epsilon, max_value=self.max_value)


def _reciprocal(x: Tensor, max_value: float) -> Tensor:
    is_small = x.abs() < 1 / max_value
    bounded = torch.where(x < 0, -max_value, max_value)
    return torch.where(is_small, bounded, torch.reciprocal(torch.where(is_small, 1.0, x)))


class Reciprocal(nn.Module):
    """``torch.reciprocal``; its quantized form is clipped to ``[-max_value, max_value]``.

    A value near 0 would otherwise make the scale useless for all others.

    Args:
        max_value: largest magnitude of the quantized form's output.
    """

    def __init__(self, max_value: float = 100.0) -> None:
        super().__init__()
        self.max_value = max_value

    def forward(self, x: Tensor) -> Tensor:
        return torch.reciprocal(x)

    def quantized_function(self) -> Callable[[Tensor], Tensor]:
        """What is put into the table."""
        return partial(_reciprocal, max_value=self.max_value)
