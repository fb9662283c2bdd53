"""Choosing between two tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Where(nn.Module):
    """``torch.where`` as a module, so that its result can have a scale.

    An infinite number, or one of magnitude 1000 or more that is 100 times the largest value of the tensor, stands for
    infinity, as in the masks of attention: its quantized form is the end of the range, which is made to reach `REACH`
    beyond the values of the tensor.

    >>> Where()(torch.tensor([True, False]), torch.tensor([1.0, 2.0]), -1e9).tolist()
    [1.0, -1000000000.0]
    """

    def forward(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        return torch.where(condition, x, y)
