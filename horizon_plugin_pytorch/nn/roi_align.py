"""Features of boxes: the mean of samples taken on a regular grid inside each box."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn.input_checks import refused_input
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.leaf import own_leaf
from horizon_plugin_pytorch.untraced import is_recorded

_BOXES = "Left, top, right and bottom of the boxes of each image, or of all boxes with the image in front."
_EPSILON = 1e-6  # a box exactly between two levels belongs to the coarser one


def _pair(value: Any) -> tuple[int, int]:
    sizes = (value, value) if isinstance(value, (int, float)) else tuple(value)
    if len(sizes) != 2 or min(sizes) < 1:
        raise refused_input("roi_align", "an output_size of one or two positive numbers", output_size=str(value))
    return int(sizes[0]), int(sizes[1])


def require_maps(maps: Sequence[Any], count: int = 1) -> None:
    """Insist on feature maps [N, C, H, W], as many as there are strides."""
    if len(maps) != count:
        raise refused_input("MultiScaleRoIAlign", f"{count} feature maps, one for each stride", maps=len(maps))
    for x in maps:
        if not isinstance(x, Tensor) or x.dim() != 4 or not (isinstance(x, QTensor) or x.is_floating_point()):
            raise refused_input("roi_align", "feature maps [N, C, H, W] of real numbers", input=x)


def boxes_and_images(boxes: Any, count: int) -> tuple[Tensor, Tensor]:
    """All boxes [K, 4], and the image that each belongs to.

    Args:
        boxes: one tensor [n, 4] or [1, n, 4] for each image, or one tensor [K, 5] with the image in front, of which
            those of images that are not there have zeros for features.
        count: of images.
    """
    if isinstance(boxes, Tensor):
        if boxes.dim() != 2 or boxes.shape[1] != 5:
            raise refused_input("roi_align", "one tensor [K, 5], or a list of tensors [n, 4]", _BOXES, boxes=boxes)
        return boxes[:, 1:], boxes[:, 0].long()
    if not boxes or not all(isinstance(b, Tensor) and b.dim() in (2, 3) and b.shape[-1] == 4 for b in boxes):
        wrong = next((b for b in boxes if not isinstance(b, Tensor) or b.shape[-1:] != (4,)), boxes)
        raise refused_input("roi_align", "a list of tensors [n, 4], or one tensor [K, 5]", _BOXES, boxes=wrong)
    if len(boxes) > int(count):
        raise OperatorInputError(
            f"boxes of {len(boxes)} images meet a feature map of {int(count)}: give one tensor [n, 4] for each image, "
            "or one tensor [K, 5] with the image in front."
        )
    flat = [b.reshape(-1, 4) for b in boxes]
    index = [torch.full((len(b),), i, device=b.device) for i, b in enumerate(flat)]
    return torch.cat(flat), torch.cat(index)


def level_thresholds(strides: Sequence[float], canonical_box_size: float, canonical_level: float) -> list[float]:
    """Areas from which on a box belongs to the next feature map.

    >>> [round(math.sqrt(area)) for area in level_thresholds([4, 8, 16, 32], 224, 4)]
    [112, 224, 448]
    """
    first = math.log2(strides[0]) - canonical_level - _EPSILON
    return [(canonical_box_size * 2.0 ** (first + level)) ** 2 for level in range(1, len(strides))]


def levels_of(boxes: Tensor, thresholds: Sequence[float]) -> Tensor:
    """The feature map of each box, by its area."""
    wide = boxes.detach().double()
    area = (wide[:, 2] - wide[:, 0]) * (wide[:, 3] - wide[:, 1])
    level = torch.zeros_like(area, dtype=torch.long)
    for threshold in thresholds:
        level += area >= threshold
    return level


def _axis(
    low: Tensor, high: Tensor, scale: float, count: int, ratio: int, aligned: bool, size: int, bits: int
) -> tuple[Tensor, Tensor]:
    """Places of the samples along an axis, [K, count * G], and their weights."""
    start = low * scale - (0.5 if aligned else 0.0)
    extent = (high - low) * scale
    extent = extent if aligned else extent.clamp(min=1.0)
    used = torch.full_like(extent, ratio) if ratio > 0 else (extent / count).ceil().clamp(min=1.0)
    most = int(used.max()) if used.numel() else 1
    step = torch.arange(most, dtype=torch.float64, device=low.device)
    inside = (step + 0.5) / used.unsqueeze(-1)
    bins = torch.arange(count, dtype=torch.float64, device=low.device).unsqueeze(-1) + inside.unsqueeze(1)
    place = start[:, None, None] + extent[:, None, None] / count * bins
    if bits:
        place = (place * (1 << bits) + 0.5).floor() / (1 << bits)
    weight = (step < used.unsqueeze(-1)).double().div(used.unsqueeze(-1)).unsqueeze(1)
    weight = weight * ((place >= -1) & (place <= size))
    return place.clamp(0, size - 1).flatten(1), weight.flatten(1)


def align_boxes(
    feature: Tensor, boxes: Tensor, images: Tensor, output_size: tuple[int, int], scale: float, ratio: int,
    aligned: bool, bits: int = 0, is_masked: bool = False,
) -> Tensor:  # fmt: skip
    """Features of boxes in one feature map; sample places are rounded to ``1 / 2**bits`` pixels if bits are given.

    Args:
        is_masked: sample every box in every image and choose by masks, so that no size depends on the numbers.
    """
    out = feature.new_zeros((len(boxes), feature.shape[1], *output_size))
    for image in range(feature.shape[0]):
        of_image, here = feature[image : image + 1], images == image
        if is_masked:
            found = _samples(of_image, boxes, output_size, scale, ratio, aligned, bits)
            out = torch.where(here[:, None, None, None], found, out)
            continue
        chosen = here.nonzero().flatten()
        if chosen.numel() > 0:
            found = _samples(of_image, boxes[chosen], output_size, scale, ratio, aligned, bits)
            out = out.index_copy(0, chosen, found)
    return out


def _samples(
    feature: Tensor, boxes: Tensor, output_size: tuple[int, int], scale: float, ratio: int, aligned: bool, bits: int
) -> Tensor:
    """Features of boxes in one image, [K, C, H, W]."""
    (height, width), (rows, columns) = feature.shape[2:], output_size
    x1, y1, x2, y2 = boxes.detach().double().unbind(1)
    x, across = _axis(x1, x2, scale, columns, ratio, aligned, width, bits)
    y, down = _axis(y1, y2, scale, rows, ratio, aligned, height, bits)
    grid = torch.stack(torch.broadcast_tensors(
        ((2 * x + 1) / width - 1).unsqueeze(1), ((2 * y + 1) / height - 1).unsqueeze(2)
    ), -1).to(feature.dtype)  # fmt: skip
    count, tall, wide = grid.shape[:3]
    samples = F.grid_sample(feature, grid.reshape(1, count * tall, wide, 2), "bilinear", "border", False)
    samples = samples[0].reshape(-1, count, rows, tall // rows, columns, wide // columns)
    weight = (down.unsqueeze(2) * across.unsqueeze(1)).to(feature.dtype)
    weight = weight.reshape(count, rows, tall // rows, columns, wide // columns)
    return (samples * weight).sum((3, 5)).transpose(0, 1)


def _is_masked(is_open: bool, ratio: int) -> bool:
    """Must sizes not depend on the numbers: is a graph written, of boxes whose image or level they tell?"""
    return is_open and ratio > 0 and is_recorded()


@own_leaf
def roi_align(
    input: Tensor, boxes: Any, output_size: Any, spatial_scale: float = 1.0, sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor:  # fmt: skip
    """Features of boxes; arguments as in `torchvision.ops.roi_align`.

    Args:
        input: a feature map [N, C, H, W].
        boxes: a tensor [n, 4] of left, top, right, bottom for each image, or one tensor [K, 5] with the image in front.
        output_size: height and width of the result.
        spatial_scale: from the boxes' coordinates to those of the feature map.
        sampling_ratio: samples along each axis of a bin; not above 0: as many as the bin has pixels.
        aligned: coordinates mean centres of pixels, half a pixel off.

    >>> roi_align(torch.arange(16.0).reshape(1, 1, 4, 4), [torch.tensor([[0.0, 0.0, 2.0, 2.0]])], 1, 1.0, 2)
    tensor([[[[5.]]]])
    """
    return RoIAlign(output_size, spatial_scale, sampling_ratio, aligned)(input, boxes)


class RoIAlign(nn.Module):
    """Module form of `roi_align`."""

    def __init__(
        self, output_size: Any, spatial_scale: float = 1.0, sampling_ratio: int = -1, aligned: bool = False
    ) -> None:
        super().__init__()
        self.output_size, self.spatial_scale = _pair(output_size), float(spatial_scale)
        self.sampling_ratio, self.aligned = sampling_ratio, bool(aligned)

    def forward(self, input: Tensor, boxes: Any) -> Tensor:
        """Features [K, C, H, W] of all boxes, in the order of `boxes`."""
        return self.align(input, boxes)

    def align(self, input: Tensor, boxes: Any, bits: int = 0) -> Tensor:
        """`forward`, with the places of samples rounded to ``1 / 2**bits`` pixels if bits are given."""
        require_maps([input])
        flat, images = boxes_and_images(boxes, input.shape[0])
        return align_boxes(
            input, flat, images, self.output_size, self.spatial_scale, self.sampling_ratio, self.aligned, bits,
            _is_masked(isinstance(boxes, Tensor), self.sampling_ratio),
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"output_size={self.output_size}, spatial_scale={self.spatial_scale}, "
            f"sampling_ratio={self.sampling_ratio}, aligned={self.aligned}"
        )


class MultiScaleRoIAlign(nn.Module):
    """Features of boxes, each from the feature map that fits its size.

    A box of area ``canonical_box_size ** 2`` belongs to the map of stride ``2 ** canonical_level``; one of four times
    the area to the next.

    Args:
        output_size: height and width of the result.
        feature_strides: pixels of the image for one of each feature map, each twice the one before.
        sampling_ratio: samples along each axis of a bin.
        aligned: coordinates mean centres of pixels, half a pixel off.

    >>> maps = [torch.zeros(1, 2, 16, 16), torch.ones(1, 2, 8, 8)]
    >>> boxes = [torch.tensor([[0.0, 0.0, 20.0, 20.0], [0.0, 0.0, 120.0, 120.0]])]
    >>> MultiScaleRoIAlign(1, [4, 8])(maps, boxes).flatten(1)
    tensor([[0., 0.],
            [1., 1.]])
    """

    def __init__(
        self, output_size: Any, feature_strides: Sequence[float], sampling_ratio: int = 1,
        canonical_box_size: float = 224, canonical_level: float = 4, aligned: bool | None = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.output_size, self.feature_strides = _pair(output_size), tuple(feature_strides)
        self.sampling_ratio, self.aligned = sampling_ratio, bool(aligned)
        self.canonical_box_size, self.canonical_level = canonical_box_size, canonical_level

    def thresholds(self) -> list[float]:
        """Areas from which on a box belongs to the next feature map."""
        return level_thresholds(self.feature_strides, self.canonical_box_size, self.canonical_level)

    def forward(self, features: Sequence[Tensor], boxes: Any) -> Tensor:
        """Features [K, C, H, W] of all boxes, in the order of `boxes`; `features` are maps of 1 to 5 scales."""
        return self.align(features, boxes)

    def align(self, features: Sequence[Tensor], boxes: Any, bits: int = 0) -> Tensor:
        """`forward`, with the places of samples rounded to ``1 / 2**bits`` pixels if bits are given."""
        require_maps(features, len(self.feature_strides))
        flat, images = boxes_and_images(boxes, features[0].shape[0])
        level = levels_of(flat, self.thresholds())
        out = features[0].new_zeros((len(flat), features[0].shape[1], *self.output_size))
        for index, (feature, stride) in enumerate(zip(features, self.feature_strides, strict=True)):
            settings = self.output_size, 1 / stride, self.sampling_ratio, self.aligned, bits
            if _is_masked(True, self.sampling_ratio):
                found = align_boxes(feature, flat, images, *settings, is_masked=isinstance(boxes, Tensor))
                out = torch.where((level == index)[:, None, None, None], found, out)
                continue
            chosen = (level == index).nonzero().flatten()
            out = out.index_copy(0, chosen, align_boxes(feature, flat[chosen], images[chosen], *settings))
        return out

    def extra_repr(self) -> str:
        return (
            f"output_size={self.output_size}, feature_strides={self.feature_strides}, "
            f"sampling_ratio={self.sampling_ratio}, aligned={self.aligned}"
        )
