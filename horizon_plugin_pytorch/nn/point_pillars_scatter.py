"""Features of pillars back to their places in an image."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.fake_quant.route import is_written
from horizon_plugin_pytorch.fixed_point.scattering import cells_of, scatter, scatter_rows
from horizon_plugin_pytorch.nn.input_checks import differ, refused_input
from horizon_plugin_pytorch.runtime.leaf import own_leaf

_NAME = "point_pillars_scatter"


_FROM_IMAGE = (
    "Features [1, C, M, 1], as a convolution over `point_pillars_preprocess` gives them, become [M, C] by "
    "`x.squeeze(0).squeeze(-1).t()`."
)


def image_size(voxel_features: Any, coords: Any, output_shape: Any) -> tuple[int, int, int]:
    """Batch, height and width of an image's shape [N, C, H, W], or [N, H, W], to which the pillars must belong."""
    shape = [] if output_shape is None else [int(n) for n in output_shape]
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise refused_input(
            _NAME, "an output_shape [N, C, H, W] of positive numbers",
            "Give it to `PointPillarsScatter(output_shape)` or to the call.", output_shape=str(output_shape),
        )  # fmt: skip
    tensors = {"voxel_features": voxel_features, "coords": coords}
    if not all(isinstance(x, Tensor) for x in tensors.values()) or voxel_features.dim() < 2:
        raise refused_input(_NAME, "features [M, C] and coords [M, 4]", _FROM_IMAGE, **tensors)
    if coords.dim() != 2 or coords.shape[1] < 3 or coords.dtype == torch.bool:
        raise refused_input(
            _NAME, "coords [M, (n, ..., y, x)] of whole numbers",
            "Each row has the image of the batch first, and row and column last.", **tensors,
        )  # fmt: skip
    if differ(voxel_features.shape[0], coords.shape[0]):
        raise refused_input(_NAME, "a row of features for each row of coords", _FROM_IMAGE, **tensors)
    if len(shape) == 4 and all(type(n) is int for n in voxel_features.shape):
        channels = math.prod(voxel_features.shape[1:])
        if channels != shape[1]:
            raise refused_input(
                _NAME, f"features of the {shape[1]} channels of output_shape {shape}",
                f"Give an output_shape with {channels} channels.", **tensors,
            )  # fmt: skip
    return shape[0], shape[-2], shape[-1]


@own_leaf
def point_pillars_scatter(voxel_features: Tensor, coords: Tensor, output_shape: Any) -> Tensor:
    """Features of pillars at their places in an image; zero elsewhere.

    Args:
        voxel_features: [M, C]; further axes are flattened into C.
        coords: whole numbers [M, (n, ..., y, x)]: the image of the batch, row and column. Pillars outside of the image
            are left out; of several at one place the last one stays.
        output_shape: [N, C, H, W].

    Raises:
        OperatorInputError: the shapes do not belong together.

    >>> point_pillars_scatter(torch.tensor([[5.0], [7.0]]), torch.tensor([[0, 0, 1], [0, 1, 0]]), (1, 1, 2, 2))
    tensor([[[[0., 5.],
              [7., 0.]]]])
    """
    size = image_size(voxel_features, coords, output_shape)
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
