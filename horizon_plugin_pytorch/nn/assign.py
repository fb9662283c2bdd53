"""Writing to a part of a tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Assign(nn.Module):
    """``x[index] = value`` as a module that gives a new tensor, so that the result can have a scale.

    >>> import torch
    >>> Assign()(torch.zeros(2, 2), 1.0, (slice(None), 0))
    tensor([[1., 0.],
            [1., 0.]])
    """

    def forward(self, x: Tensor, value: Any, index: Any) -> Tensor:
        out = x.clone()
        out[index] = value
        return out
