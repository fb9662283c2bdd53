"""Module forms of torch's functions that are several elementwise operators in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AddProduct(nn.Module):
    """``x + value * a * b``: `torch.addcmul`.

    >>> AddProduct(0.5)(torch.ones(2), torch.ones(2), torch.full((2,), 4.0))
    tensor([3., 3.])
    """

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addcmul(x, a, b, value=self.value)


class AddQuotient(nn.Module):
    """``x + value * a / b``: `torch.addcdiv`.

    >>> AddQuotient(-1.0)(torch.ones(2), torch.ones(2), torch.full((2,), 4.0))
    tensor([0.7500, 0.7500])
    """

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addcdiv(x, a, b, value=self.value)


class Lerp(nn.Module):
    """``x + weight * (y - x)``: `torch.lerp`.

    Args:
        weight: a number; None where `forward` takes it as a tensor.

    >>> Lerp(0.25)(torch.zeros(2), torch.ones(2))
    tensor([0.2500, 0.2500])
    """

    def __init__(self, weight: float | None = None) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, y: Tensor, weight: Any = None) -> Tensor:
        amount: Any = self.weight if weight is None else weight
        return torch.lerp(x, y, amount)


class LogSumExp(nn.Module):
    """`torch.logsumexp`.

    Args:
        dim: an axis, or several.
        keepdim: as in torch.

    >>> LogSumExp(-1)(torch.zeros(2, 4))
    tensor([1.3863, 1.3863])
    """

    def __init__(self, dim: int | tuple[int, ...], keepdim: bool = False) -> None:
        super().__init__()
        self.dim, self.keepdim = dim, keepdim

    def forward(self, x: Tensor) -> Tensor:
        return torch.logsumexp(x, self.dim, self.keepdim)
