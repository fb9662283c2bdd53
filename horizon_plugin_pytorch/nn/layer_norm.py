"""Layer normalisation over chosen axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axes, or over one axis `dim`.

    Args:
        normalized_shape: shape of weight and bias; for ``dim=1`` of an NCHW tensor ``[C, 1, 1]``.
        eps, elementwise_affine: as in `torch.nn.LayerNorm`.
        dim: the axis to normalise; None takes the last axes, as torch does.

    >>> LayerNorm([8, 1, 1], dim=1)(torch.randn(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        dim: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, **kwargs)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        if self.dim is None:
            return super().forward(x)
        variance, mean = torch.var_mean(x, self.dim, unbiased=False, keepdim=True)
        out = (x - mean) * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            out = out * self.weight
        return out if self.bias is None else out + self.bias
