"""Features of boxes, on integers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule, is_real
from horizon_plugin_pytorch.nn.roi_align import boxes_and_images, require_maps, roi_align
from horizon_plugin_pytorch.qtensor import QTensor


def real_boxes(boxes: Any) -> Any:
    """Boxes as real numbers; those with a scale lose it."""
    if isinstance(boxes, (list, tuple)):
        return [real_boxes(b) for b in boxes]
    return boxes.as_real() if isinstance(boxes, QTensor) else boxes


def sample_bits(maps: Sequence[QTensor]) -> int:
    """Fraction bits of a sample's place."""
    return fp.weight_bits(max(x.dtype.bits for x in maps))


class _Align(QuantizedModule):
    output_size: tuple[int, int]
    sampling_ratio: int
    aligned: bool

    def configure(self, mod: Any) -> None:
        self.output_size, self.sampling_ratio, self.aligned = mod.output_size, mod.sampling_ratio, mod.aligned

    def _run(
        self, maps: Sequence[QTensor], boxes: Any, scales: list[float], thresholds: list[float], factors: list[float]
    ) -> Tensor:
        require_maps(maps, len(scales))
        flat, images = boxes_and_images(real_boxes(boxes), maps[0].shape[0])
        dtype = self.out_dtype or maps[0].dtype
        return fp.roi_align(
            [x.plain() for x in maps], flat, images, scales, thresholds, factors, list(self.output_size),
            self.sampling_ratio, self.aligned, sample_bits(maps), dtype.min, dtype.max,
        )  # fmt: skip


class RoIAlign(_Align):
    """The scale of the feature map is kept."""

    spatial_scale: float

    def configure(self, mod: Any) -> None:
        super().configure(mod)
        self.spatial_scale = mod.spatial_scale

    def forward(self, input: Any, boxes: Any) -> Any:
        if is_real(input):
            boxes = real_boxes(boxes)
            return roi_align(input, boxes, self.output_size, self.spatial_scale, self.sampling_ratio, self.aligned)
        x = self.quantized_input(input)
        result = x.like(self._run([x], boxes, [self.spatial_scale], [], [self.sampling_ratio**-2.0]))
        result.set_range(min(x.range[0], 0), max(x.range[1], 0))
        return result


class MultiScaleRoIAlign(_Align):
    """A scale of its own, since the feature maps have different ones."""

    def configure(self, mod: Any) -> None:
        super().configure(mod)
        self.feature_strides, self.thresholds = mod.feature_strides, mod.thresholds()

    def _factor(self, x: QTensor) -> float:
        assert self.scale is not None
        ratio = x.scale.double() / self.scale.double() / self.sampling_ratio**2
        multiplier, shift = fp.multiplier_and_shift(ratio.cpu())
        return float(torch.ldexp(multiplier.double(), -shift.double()))

    def forward(self, features: Any, boxes: Any) -> QTensor:
        maps = [self.quantized_input(x) for x in features]
        factors = [self._plans.get((x,), "factor", partial(self._factor, x)) for x in maps]
        return self.output(self._run(maps, boxes, [1 / s for s in self.feature_strides], self.thresholds, factors))
