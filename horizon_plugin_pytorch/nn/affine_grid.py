"""Module form of `torch.nn.functional.affine_grid`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class AffineGrid(nn.Module):
    """The grid that samples an image through an affine map.

    Args:
        size: the shape [N, C, H, W] of the image to be made; None if it is given to the call.
        align_corners: as in `GridSample`.

    >>> import torch
    >>> AffineGrid((1, 1, 2, 2))(torch.eye(2, 3).unsqueeze(0))[0, 0]
    tensor([[-0.5000, -0.5000],
            [ 0.5000, -0.5000]])
    """

    def __init__(self, size: Any = None, align_corners: bool | None = None) -> None:
        super().__init__()
        self.size, self.align_corners = size, bool(align_corners)

    def forward(self, theta: Tensor, size: Any = None) -> Tensor:
        """The grid [N, H, W, 2] of the maps `theta` [N, 2, 3]."""
        return F.affine_grid(theta, list(self.size if size is None else size), self.align_corners)

    def extra_repr(self) -> str:
        return f"size={self.size}, align_corners={self.align_corners}"
