"""Module form of `torch.nn.functional.interpolate`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Interpolate(nn.Module):
    """Resize an image-like tensor; arguments as in `torch.nn.functional.interpolate`, but bilinear by default.

    >>> import torch
    >>> Interpolate(scale_factor=2, recompute_scale_factor=True)(torch.ones(1, 1, 2, 2)).shape
    torch.Size([1, 1, 4, 4])
    """

    def __init__(
        self,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "bilinear",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        antialias: bool = False,
    ) -> None:
        super().__init__()
        self.size, self.scale_factor, self.mode = size, scale_factor, mode
        self.align_corners, self.recompute_scale_factor, self.antialias = (
            align_corners,
            recompute_scale_factor,
            antialias,
        )

    def forward(self, x: Tensor, size: Any = None) -> Tensor:
        """Resize `x`, to `size` if it is given (the module then has no size or scale factor of its own)."""
        size = self.size if size is None else size
        return F.interpolate(
            x, size, self.scale_factor, self.mode, self.align_corners, self.recompute_scale_factor, self.antialias
        )

    def extra_repr(self) -> str:
        wanted = f"size={self.size}" if self.size is not None else f"scale_factor={self.scale_factor}"
        return f"{wanted}, mode={self.mode!r}, align_corners={self.align_corners}"
