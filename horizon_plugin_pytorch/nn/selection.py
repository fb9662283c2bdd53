"""Selection under the names that the vendor's functions have; torch's own spellings do the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The position of the largest value; the lowest one of several. Positions can leave a model without DeQuantStub.

    >>> argmax(torch.tensor([[1.0, 3.0, 3.0]]), dim=1)
    tensor([1])
    """
    return torch.argmax(input, dim, keepdim)


def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Values in order, and their positions. In a quantized model the order of equal values is kept in any case.

    >>> sort(torch.tensor([2.0, 1.0, 2.0]), descending=True, stable=True).indices
    tensor([0, 2, 1])
    """
    return torch.sort(input, stable=stable, dim=dim, descending=descending)
