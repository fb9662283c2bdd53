"""Division as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Div(nn.Module):
    """``x / y`` as a module; its quantized form is the reciprocal by table, times `x`.

    There a divisor counts as at least 1/256 of its range, so that one near 0 does not spoil the scale of the others.
    """

    def forward(self, x: Any, y: Any) -> Tensor:
        return x / y
