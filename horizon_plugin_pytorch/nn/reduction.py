"""Module forms of torch's reductions: norms, variances, running sums."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Dims = int | tuple[int, ...] | list[int] | None


class Norm(nn.Module):
    """``torch.linalg.vector_norm``: over one axis, several, or all.

    Args:
        ord: 1, 2, ``inf`` or ``-inf``.
        dim: the axes; None takes all.
        keepdim: keep them with one element.
    """

    def __init__(self, ord: float = 2.0, dim: Dims = None, keepdim: bool = False) -> None:
        super().__init__()
        self.ord, self.dim, self.keepdim = float(ord), dim, keepdim

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, self.ord, self.dim, self.keepdim)

    def extra_repr(self) -> str:
        return f"ord={self.ord:g}, dim={self.dim}, keepdim={self.keepdim}"


class Normalize(nn.Module):
    """``torch.nn.functional.normalize``: a tensor divided by its norm along an axis.

    Args:
        ord: 1, 2 or ``inf``.
        dim: the axis, or axes.
        eps: smallest norm to divide by.
    """

    def __init__(self, ord: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> None:
        super().__init__()
        self.ord, self.dim, self.eps = float(ord), dim, float(eps)

    def forward(self, x: Tensor, eps: float | None = None) -> Tensor:
        return F.normalize(x, self.ord, self.dim, self.eps if eps is None else eps)

    def extra_repr(self) -> str:
        return f"ord={self.ord:g}, dim={self.dim}, eps={self.eps:g}"


class Var(nn.Module):
    """``torch.var``.

    Args:
        dim: the axes; None takes all.
        correction: what is subtracted from the number of values; 1 is "unbiased".
        keepdim: keep the axes with one element.
    """

    def __init__(self, dim: Dims = None, correction: float = 1.0, keepdim: bool = False) -> None:
        super().__init__()
        self.dim, self.correction, self.keepdim = dim, float(correction), keepdim

    def forward(self, x: Tensor) -> Tensor:
        return torch.var(x, self.dim, correction=self.correction, keepdim=self.keepdim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, correction={self.correction:g}, keepdim={self.keepdim}"


class Std(Var):
    """``torch.std``; where all values are equal, its gradient is 0."""

    def forward(self, x: Tensor) -> Tensor:
        variance = super().forward(x)
        is_positive = variance > 0
        return torch.where(is_positive, torch.sqrt(torch.where(is_positive, variance, 1.0)), 0.0)


class VarMean(Var):
    """``torch.var_mean``: variance and mean."""

    def forward(self, x: Tensor) -> Any:
        return torch.var_mean(x, self.dim, correction=self.correction, keepdim=self.keepdim)


class StdMean(Std):
    """``torch.std_mean``: standard deviation and mean."""

    def forward(self, x: Tensor) -> Any:
        return torch.std_mean(x, self.dim, correction=self.correction, keepdim=self.keepdim)


class CumSum(nn.Module):
    """``torch.cumsum`` along an axis."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
