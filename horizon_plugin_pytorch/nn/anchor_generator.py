"""Anchors: boxes of given sizes and shapes around every position of feature maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class AnchorGenerator(nn.Module):
    """Anchors for each image, as torchvision's class of that name makes them.

    Args:
        sizes: for each feature map, the sizes of its anchors in pixels.
        aspect_ratios: for each feature map, height over width of its anchors.

    Called with images (their batch ``[N, C, H, W]``, or an object with such a tensor in ``tensors``) and the list of
    feature maps, of which only the shapes count; they may be quantized. It gives, for each image, all anchors
    ``[sum of H * W * A, 4]`` as left, top, right, bottom: map after map, row after row, all anchors of a position
    together, ratio by ratio.

    >>> anchors = AnchorGenerator(((8,),), ((1.0,),))
    >>> anchors(torch.zeros(1, 3, 16, 16), [torch.zeros(1, 4, 1, 2)])
    [tensor([[-4., -4.,  4.,  4.],
            [ 4., -4., 12.,  4.]])]
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[float]] = ((128, 256, 512),),
        aspect_ratios: Sequence[Sequence[float]] = ((0.5, 1.0, 2.0),),
    ) -> None:
        super().__init__()
        self.sizes = tuple(_row(row) for row in sizes)
        ratios = tuple(_row(row) for row in aspect_ratios)
        self.aspect_ratios = ratios * len(self.sizes) if len(ratios) == 1 else ratios
        if len(self.sizes) != len(self.aspect_ratios):
            raise ValueError(
                f"AnchorGenerator: sizes are for {len(self.sizes)} feature maps, aspect_ratios for "
                f"{len(self.aspect_ratios)}; give as many of both, or one row of ratios for all."
            )

    def num_anchors_per_location(self) -> list[int]:
        """How many anchors a position of each feature map has."""
        return [len(s) * len(r) for s, r in zip(self.sizes, self.aspect_ratios, strict=True)]

    def forward(self, image_list: Any, feature_maps: Sequence[Tensor]) -> list[Tensor]:
        if len(feature_maps) != len(self.sizes):
            raise ValueError(f"AnchorGenerator: {len(self.sizes)} rows of sizes for {len(feature_maps)} feature maps.")
        images = getattr(image_list, "tensors", image_list)
        height, width = (int(v) for v in images.shape[-2:])
        levels = []
        for sizes, ratios, features in zip(self.sizes, self.aspect_ratios, feature_maps, strict=True):
            rows, columns = (int(v) for v in features.shape[-2:])
            steps = (height // rows, width // columns)
            levels.append(_level(sizes, ratios, rows, columns, steps, features.device))
        return [torch.cat(levels) for _ in range(int(images.shape[0]))]

    def extra_repr(self) -> str:
        return f"sizes={self.sizes}, aspect_ratios={self.aspect_ratios}"


def _row(values: Any) -> tuple[float, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def _level(
    sizes: tuple[float, ...], ratios: tuple[float, ...], rows: int, columns: int, steps: tuple[int, int], device: Any
) -> Tensor:
    roots = torch.tensor(ratios, dtype=torch.float32, device=device).sqrt()[:, None]
    scales = torch.tensor(sizes, dtype=torch.float32, device=device)[None]
    halves = torch.stack([(scales / roots).flatten(), (scales * roots).flatten()], dim=1) / 2
    cells = torch.cat([-halves, halves], dim=1).round()
    down = torch.arange(rows, device=device) * steps[0]
    across = torch.arange(columns, device=device) * steps[1]
    y, x = torch.meshgrid(down, across, indexing="ij")
    centers = torch.stack([x, y, x, y], dim=-1).reshape(-1, 1, 4)
    return (centers + cells).reshape(-1, 4)
