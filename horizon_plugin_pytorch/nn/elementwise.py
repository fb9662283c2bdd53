"""Module forms of torch functions of one variable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn


class Exp(nn.Module):
    """``torch.exp``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


class Sqrt(nn.Module):
    """``torch.sqrt``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)


def _rsqrt(x: Tensor, epsilon: float) -> Tensor:
    return torch.rsqrt(x.clamp(min=0.0) + epsilon)


class Rsqrt(nn.Module):
    """``torch.rsqrt`` of ``x + epsilon``.

    Args:
        epsilon: added first, as normalisation layers do.
    """

    def __init__(self, epsilon: float = 0.0) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x + self.epsilon)

    @staticmethod
    def forward_static(epsilon: float) -> Callable[[Tensor], Tensor]:
        """The quantized operator's function; a rounded variance may be slightly negative and counts as 0."""
        return partial(_rsqrt, epsilon=epsilon)


def _reciprocal(x: Tensor, max_value: float) -> Tensor:
    # 0 has no reciprocal: it takes the largest value, and a bounded one does not ruin the scale of all others.
    return torch.where(x == 0, max_value, torch.reciprocal(x)).clamp(-max_value, max_value)


class Reciprocal(nn.Module):
    """``torch.reciprocal``; its quantized form is clipped to ``[-max_value, max_value]``.

    Args:
        max_value: largest magnitude of the quantized form's output.
    """

    def __init__(self, max_value: float = 1e4) -> None:
        super().__init__()
        self.max_value = max_value

    def forward(self, x: Tensor) -> Tensor:
        return torch.reciprocal(x)

    @staticmethod
    def forward_static(max_value: float) -> Callable[[Tensor], Tensor]:
        """The quantized operator's function."""
        return partial(_reciprocal, max_value=max_value)
