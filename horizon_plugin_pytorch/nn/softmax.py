"""Softmax under the names that the guides use."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Softmax(nn.Softmax):
    """`torch.nn.Softmax`, under the name that the guides use."""


class SoftmaxBernoulli2(nn.Module):
    """Softmax over the channels for BERNOULLI2, as the last operator of a model: its result is real numbers.

    Quantized, it looks ``exp(x)`` up in an 8-bit table and divides in float. No maximum is subtracted, so its input
    should have a small range. A qconfig must be there, but its format is not used.

    Args:
        dim: 1, or None, which means 1.
        max_value_only: give the largest value of each position only.

    >>> import torch
    >>> SoftmaxBernoulli2(dim=1)(torch.zeros(1, 4, 1, 1)).flatten()
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(self, dim: int | None = None, max_value_only: bool = False) -> None:
        super().__init__()
        if dim not in (None, 1):
            raise ValueError(f"SoftmaxBernoulli2 works over the channels: dim must be 1 or None, got {dim}.")
        self.dim, self.max_value_only = 1, max_value_only

    def forward(self, x: Tensor) -> Tensor:
        out = F.softmax(x, 1)
        return out.amax(1, keepdim=True) if self.max_value_only else out
