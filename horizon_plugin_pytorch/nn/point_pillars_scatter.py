"""Features of pillars back to their places in an image."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.fake_quant.route import is_written
from horizon_plugin_pytorch.fixed_point.scattering import cells_of, scatter, scatter_rows
from horizon_plugin_pytorch.runtime.leaf import own_leaf


def image_size(output_shape: Any) -> tuple[int, int, int]:
    """Batch, height and width of an image's shape [N, C, H, W], or [N, H, W]."""
    shape = [int(n) for n in output_shape]
    return shape[0], shape[-2], shape[-1]


@own_leaf
def point_pillars_scatter(voxel_features: Tensor, coords: Tensor, output_shape: Any) -> Tensor:
    """Features of pillars at their places in an image; zero elsewhere.

    Args:
        voxel_features: [M, C]; further axes are flattened into C.
        coords: whole numbers [M, (n, ..., y, x)]: the image of the batch, row and column. Pillars outside of the image
            are left out; of several at one place the last one stays.
        output_shape: [N, C, H, W].

    >>> import torch
    >>> point_pillars_scatter(torch.tensor([[5.0], [7.0]]), torch.tensor([[0, 0, 1], [0, 1, 0]]), (1, 1, 2, 2))
    tensor([[[[0., 5.],
              [7., 0.]]]])
    """
    size = image_size(output_shape)
    if is_written():
        return scatter_rows(voxel_features.flatten(1), coords, *size)
    return scatter(voxel_features.flatten(1), cells_of(coords, *size), *size)


class PointPillarsScatter(nn.Module):
    """Module form of `point_pillars_scatter`."""

    def __init__(self, output_shape: Any = None) -> None:
        super().__init__()
        self.output_shape = output_shape

    def forward(self, voxel_features: Tensor, coords: Tensor, output_shape: Any = None) -> Tensor:
        """The image [N, C, H, W] of pillars [M, C] at coordinates [M, (n, ..., y, x)]."""
        shape = self.output_shape if output_shape is None else output_shape
        return point_pillars_scatter(voxel_features, coords, shape)

    def extra_repr(self) -> str:
        return f"output_shape={self.output_shape}"
