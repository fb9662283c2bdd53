"""Sampling of an image at given places: module and function forms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn.input_checks import refused_input
from horizon_plugin_pytorch.runtime.leaf import own_leaf


class GridSample(nn.Module):
    """Module form of `torch.nn.functional.grid_sample`.

    Args:
        mode: ``bilinear`` or ``nearest``.
        padding_mode: ``zeros``, ``border`` or ``reflection``.
        align_corners: -1 and 1 mean the centres of the corner pixels instead of their outer edges.

    >>> image = torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]])
    >>> GridSample()(image, torch.zeros(1, 1, 1, 2))
    tensor([[[[1.5000]]]])
    """

    def __init__(self, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = False) -> None:
        super().__init__()
        self.mode, self.padding_mode, self.align_corners = mode, padding_mode, bool(align_corners)

    def forward(self, input: Tensor, grid: Tensor) -> Tensor:
        """Sample `input` [N, C, H, W] at `grid` [N, H', W', 2], whose numbers are x and y in [-1, 1]."""
        return F.grid_sample(input, grid, self.mode, self.padding_mode, self.align_corners)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, padding_mode={self.padding_mode!r}, align_corners={self.align_corners}"


def channels_last(flow: Any) -> Any:
    """Distances in x and y as ``[N, H, W, 2]``; a flow ``[N, 2, H, W]``, as layers give it, is taken too.

    >>> channels_last(torch.zeros(1, 2, 5, 7)).shape
    torch.Size([1, 5, 7, 2])
    """
    if flow.dim() == 4 and flow.shape[-1] == 2:
        return flow
    if flow.dim() == 4 and flow.shape[1] == 2:
        return flow.permute(0, 2, 3, 1)
    raise OperatorInputError(
        f"`warp` takes distances in x and y, [N, H, W, 2] or [N, 2, H, W], got {tuple(flow.shape)}."
    )


class Warp(nn.Module):
    """Sample an image at a distance, in pixels, from each place of the output.

    >>> image = torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]])
    >>> Warp()(image, torch.tensor([1.0, 0.0]).expand(1, 2, 2, 2))
    tensor([[[[1., 0.],
              [3., 0.]]]])
    """

    def __init__(self, mode: str = "bilinear", padding_mode: str = "zeros") -> None:
        super().__init__()
        self.mode, self.padding_mode = mode, padding_mode

    def forward(self, input: Tensor, grid: Tensor) -> Tensor:
        """Sample `input` [N, C, H, W]; `grid` [N, H', W', 2], or [N, 2, H', W'], holds distances in x and y."""
        if input.dim() != 4:
            raise refused_input("warp", "an image [N, C, H, W]", "Add the axis of the batch.", input=input, grid=grid)
        grid = channels_last(grid)
        height, width = input.shape[2:]
        x = torch.arange(grid.shape[2], dtype=grid.dtype, device=grid.device)
        y = torch.arange(grid.shape[1], dtype=grid.dtype, device=grid.device).unsqueeze(1)
        place = torch.stack(((grid[..., 0] + x) * 2 + 1, (grid[..., 1] + y) * 2 + 1), -1)
        return F.grid_sample(input, place / place.new_tensor([width, height]) - 1, self.mode, self.padding_mode, False)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, padding_mode={self.padding_mode!r}"


@own_leaf
def warp(x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros") -> Tensor:
    """Sample `x` [N, C, H, W] at ``grid`` pixels (x and y) from each place of the output.

    Args:
        grid: [N, H', W', 2], or [N, 2, H', W'] as a layer gives it.
    """
    return Warp(mode, padding_mode)(x, grid)


@own_leaf
def autocasted_grid_sample_outer(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """`torch.nn.functional.grid_sample` in float32, also where autocast would use a shorter type."""
    with torch.autocast(input.device.type, enabled=False):
        return F.grid_sample(input.float(), grid.float(), mode, padding_mode, bool(align_corners))
