"""Layer normalisation over chosen axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def normalize_axis(x: Tensor, dim: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over one axis; weight and bias broadcast."""
    variance, mean = torch.var_mean(x, dim, unbiased=False, keepdim=True)
    out = (x - mean) * torch.rsqrt(variance + eps)
    if weight is not None:
        out = out * weight
    return out if bias is None else out + bias


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axes, or over one axis `dim`.

    Args:
        normalized_shape: shape of weight and bias; for ``dim=1`` of an NCHW tensor ``[C, 1, 1]``.
        eps, elementwise_affine, device, dtype, bias: as in `torch.nn.LayerNorm`.
        dim: the axis to normalise; None takes the last axes, as torch does.

    >>> LayerNorm([8, 1, 1], dim=1)(torch.randn(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        dim: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias=bias, device=device, dtype=dtype)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        if self.dim is None:
            return super().forward(x)
        return normalize_axis(x, self.dim, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"
