"""Resizing and sampling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.nn.functional import point_pillars_scatter
from horizon_plugin_pytorch.nn.grid_sample import Warp, autocasted_grid_sample_outer, warp
from horizon_plugin_pytorch.nn.roi_align import roi_align
from tests.operators.cases.base import cases, module

# A weight is off by at most half a unit on each axis, times a difference of up to 255 (65,535) steps, before rounding.
BILINEAR = dict(steps8=1.5, steps16=1.5)
RESIZES = cases(
    ("nearest", module(horizon_nn.Interpolate, scale_factor=2, mode="nearest", recompute_scale_factor=True)),
    ("nearest-fraction", module(horizon_nn.Interpolate, scale_factor=1.7, mode="nearest")),
    ("nearest-down", module(horizon_nn.Interpolate, scale_factor=0.6, mode="nearest")),
    ("nearest-size", module(horizon_nn.Interpolate, size=(10, 5), mode="nearest")),
    ("functional-nearest", lambda x: F.interpolate(x, scale_factor=2)),
    ("upsample-nearest", module(nn.Upsample, scale_factor=3)),
    ("upsampling-nearest", module(nn.UpsamplingNearest2d, scale_factor=2)),
    ("nearest-exact", lambda x: F.interpolate(x, scale_factor=1.6, mode="nearest-exact")),
    ("nearest-line", lambda x: F.interpolate(x, size=11), dict(shapes=((2, 3, 7),))),
    ("nearest-volume", lambda x: F.interpolate(x, scale_factor=(2, 1.5, 0.7)), dict(shapes=((2, 3, 4, 5, 6),))),
    ("nearest-exact-volume", module(nn.Upsample, size=(3, 8, 5), mode="nearest-exact"),
     dict(shapes=((2, 3, 4, 5, 6),))),
    ("linear", module(nn.Upsample, scale_factor=2.2, mode="linear"), dict(BILINEAR, shapes=((2, 3, 7),))),
    ("linear-corners", module(horizon_nn.Interpolate, 5, mode="linear", align_corners=True),
     dict(BILINEAR, shapes=((2, 3, 7),))),
    ("bilinear", module(horizon_nn.Interpolate, scale_factor=2), BILINEAR),
    ("bilinear-recompute", module(horizon_nn.Interpolate, scale_factor=2.3, recompute_scale_factor=True), BILINEAR),
    ("bilinear-fraction", module(horizon_nn.Interpolate, scale_factor=2.3), BILINEAR),
    ("bilinear-two-factors", module(horizon_nn.Interpolate, scale_factor=(1.5, 0.7)), BILINEAR),
    ("bilinear-down", module(horizon_nn.Interpolate, scale_factor=0.4), BILINEAR),
    ("bilinear-corners", module(horizon_nn.Interpolate, scale_factor=2, align_corners=True), BILINEAR),
    ("bilinear-size", module(horizon_nn.Interpolate, size=(9, 4)), BILINEAR),
    ("bilinear-size-corners", module(horizon_nn.Interpolate, size=(9, 4), align_corners=True), BILINEAR),
    ("bilinear-one-pixel", module(horizon_nn.Interpolate, size=1, align_corners=True), BILINEAR),
    ("functional-bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False), BILINEAR),
    ("upsample-bilinear", module(nn.Upsample, scale_factor=1.3, mode="bilinear"), BILINEAR),
    ("upsample-corners", module(nn.Upsample, size=(13, 11), mode="bilinear", align_corners=True), BILINEAR),
    ("upsampling-bilinear", module(nn.UpsamplingBilinear2d, scale_factor=2), BILINEAR),
    ("upsampling-bilinear-down", module(nn.UpsamplingBilinear2d, scale_factor=0.7), BILINEAR),
)  # fmt: skip

# A position is off by half a unit on each axis, as a weight above. Gradients in the grid jump from pixel to pixel, so
# they differ where rounding takes a point into another pixel.
SAMPLED = dict(shapes=((2, 6, 7, 9), (2, 5, 8, 2)), steps8=1.5, steps16=1.5)
NEAREST = dict(SAMPLED, steps8=0, steps16=0, is_smooth=False)
JUMPING = dict(SAMPLED, is_smooth=False)


def _grid(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.rand(2, 5, 8, 2, generator=generator) * 3 - 1.5,)


class ConstantGrid(nn.Module):
    """A grid that is part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", _grid(torch.Generator().manual_seed(7))[0])

    def forward(self, x: Tensor) -> Tensor:
        return F.grid_sample(x, self.grid, align_corners=False)


SAMPLES = cases(
    ("grid-sample", module(horizon_nn.GridSample), SAMPLED),
    ("grid-sample-corners", module(horizon_nn.GridSample, "bilinear", "zeros", True), JUMPING),
    ("grid-sample-border", module(horizon_nn.GridSample, padding_mode="border", align_corners=False), SAMPLED),
    ("grid-sample-border-corners", module(horizon_nn.GridSample, "bilinear", "border", True), SAMPLED),
    ("grid-sample-reflection", module(horizon_nn.GridSample, "bilinear", "reflection"), SAMPLED),
    ("grid-sample-reflection-corners", module(horizon_nn.GridSample, "bilinear", "reflection", True), SAMPLED),
    ("grid-sample-nearest", module(horizon_nn.GridSample, "nearest"), NEAREST),
    ("grid-sample-nearest-border-corners", module(horizon_nn.GridSample, "nearest", "border", True), NEAREST),
    ("functional-grid-sample", lambda x, grid: F.grid_sample(x, grid, align_corners=False), SAMPLED),
    ("functional-grid-sample-nearest",
     lambda x, grid: F.grid_sample(x, grid, mode="nearest", align_corners=True), NEAREST),
    ("autocasted-grid-sample", lambda x, grid: autocasted_grid_sample_outer(x, grid, align_corners=True), JUMPING),
    ("grid-sample-real-grid", module(horizon_nn.GridSample), dict(SAMPLED, shapes=((2, 6, 7, 9),), others=_grid)),
    ("grid-sample-nearest-real-grid", module(horizon_nn.GridSample, "nearest", "reflection"),
     dict(NEAREST, shapes=((2, 6, 7, 9),), others=_grid)),
    ("grid-sample-constant-grid", module(ConstantGrid), dict(SAMPLED, shapes=((2, 6, 7, 9),))),
    ("grid-sample-one-pixel", module(horizon_nn.GridSample, "bilinear", "zeros", True),
     dict(SAMPLED, shapes=((2, 3, 1, 1), (2, 2, 2, 2)))),
    ("warp", lambda x, flow: warp(x, flow), SAMPLED),
    ("warp-module", module(Warp, padding_mode="border"), SAMPLED),
    ("warp-nearest", lambda x, flow: warp(x, flow, mode="nearest", padding_mode="border"), NEAREST),
)  # fmt: skip

# Places of pixels are rounded to 2**-14: half of that times two numbers of theta, in steps of the output.
AFFINE = dict(shapes=((2, 2, 3),), steps8=0.51, steps16=1.5)
GRIDS = cases(
    ("affine-grid", lambda theta: F.affine_grid(theta, (2, 3, 5, 6), align_corners=False), AFFINE),
    ("affine-grid-corners", module(horizon_nn.AffineGrid, (2, 3, 5, 6), True), AFFINE),
    ("affine-grid-powers-of-two", module(horizon_nn.AffineGrid, (2, 3, 4, 8)), dict(AFFINE, steps8=0.51, steps16=0.54)),
    ("affine-grid-size-of-image", lambda theta, x: F.affine_grid(theta, x.size(), align_corners=False),
     dict(AFFINE, shapes=((2, 2, 3), (2, 3, 5, 6)))),
    # A step of the grid moves a sample.
    ("affine-grid-sample",
     lambda theta, x: F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False),
     dict(shapes=((2, 2, 3), (2, 3, 5, 6)), steps8=9, steps16=9)),
)  # fmt: skip


class Rois(nn.Module):
    """Two feature maps, and the boxes of two images."""

    def __init__(self, align: nn.Module) -> None:
        super().__init__()
        self.align = align

    def forward(self, fine: Tensor, coarse: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.align([fine, coarse], [a, b])


class OneMap(nn.Module):
    """A feature map, and the boxes of two images."""

    def __init__(self, align: nn.Module) -> None:
        super().__init__()
        self.align = align

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.align(x, [a, b])


def _boxes(generator: torch.Generator) -> tuple[Tensor, ...]:
    """Two images' boxes; some reach out of the image, one is empty."""
    corners = torch.rand(2, 5, 2, generator=generator) * 90 - 20
    sides = torch.rand(2, 5, 2, generator=generator) * 60
    sides[0, 0] = 0
    return tuple(torch.cat((corners, corners + sides), -1))


ROI = dict(steps8=1.5, steps16=1.5)  # as sampling
MAPS = dict(ROI, shapes=((2, 3, 16, 18), (2, 3, 8, 9)), others=_boxes)
ROIS = cases(
    ("multi-scale-roi-align", module(lambda: Rois(
        horizon_nn.MultiScaleRoIAlign((3, 2), [4, 8], 2, canonical_box_size=32, canonical_level=3))), MAPS),
    ("multi-scale-roi-align-aligned", module(lambda: Rois(
        horizon_nn.MultiScaleRoIAlign(2, [4, 8], 3, 32, 3, aligned=True))), MAPS),
    ("roi-align-module", module(lambda: OneMap(horizon_nn.RoIAlign((2, 3), 0.25, 2))),
     dict(ROI, shapes=((2, 3, 16, 18),), others=_boxes)),
    ("roi-align", lambda x, a, b: roi_align(x, [a, b], 2, 0.25, 1, True),
     dict(ROI, shapes=((2, 3, 16, 18),), others=_boxes)),
    ("roi-align-quantized-boxes", lambda x, boxes: roi_align(x, [boxes], 2, 4.0, 2),
     dict(ROI, shapes=((1, 3, 9, 8), (4, 4)))),
)  # fmt: skip

CORRELATIONS = cases(
    ("correlation", module(horizon_nn.Correlation)),
    ("correlation-flownet", module(horizon_nn.Correlation, 1, 4, 1, 2, 4)),
    ("correlation-patches", module(horizon_nn.Correlation, 3, 2, 2, 1, 3)),
    ("correlation-odd-reach", module(horizon_nn.Correlation, max_displacement=3, stride2=2, pad_size=1)),
    shapes=((2, 6, 7, 9), (2, 6, 7, 9)),
    steps16=0.54,  # a multiplier has 20 bits
)


def _coords(generator: torch.Generator) -> tuple[Tensor, ...]:
    """Places (n, z, y, x) in two images of 5 x 6; some twice, some outside."""
    columns = [torch.randint(low, high, (40,), generator=generator) for low, high in ((0, 2), (0, 1), (-1, 6), (0, 6))]
    return (torch.stack(columns, 1),)


def _ranks(generator: torch.Generator) -> tuple[Tensor, ...]:
    """50 points of 2 x 4 x 3 x 5 depths and 2 x 3 x 5 features in 7 of 24 cells."""
    lengths = torch.tensor([4, 1, 20, 3, 10, 5, 7])
    cells = torch.randperm(24, generator=generator)[:7].sort()[0]
    ranks_depth = torch.randint(0, 120, (50,), generator=generator)
    ranks_feat = torch.randint(0, 30, (50,), generator=generator)
    return ranks_depth, ranks_feat, cells.repeat_interleave(lengths), lengths


class Pool(nn.Module):
    """Intervals from their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = horizon_nn.BevPoolV2()
        self.register_buffer("starts", torch.tensor([0, 4, 5, 25, 28, 38, 43]))

    def forward(
        self, depth: Tensor, feat: Tensor, ranks_depth: Tensor, ranks_feat: Tensor, ranks_bev: Tensor, lengths: Tensor
    ) -> Tensor:
        shape = (1, 2, 3, 4, 6)
        return self.pool(depth, feat, ranks_depth, ranks_feat, ranks_bev, self.starts, lengths, shape)


VIEWS = cases(
    ("point-pillars-scatter", module(horizon_nn.PointPillarsScatter, (2, 7, 5, 6)),
     dict(shapes=((40, 7),), others=_coords, steps8=0, steps16=0)),
    ("functional-point-pillars-scatter", lambda x, coords: point_pillars_scatter(x, coords, (2, 7, 5, 6)),
     dict(shapes=((40, 7, 1, 1),), others=_coords, steps8=0, steps16=0)),
    ("bev-pool", module(Pool),
     dict(shapes=((1, 2, 4, 3, 5), (1, 2, 3, 5, 6)), others=_ranks, steps16=0.54)),  # a multiplier has 20 bits
)  # fmt: skip


class Deformable(nn.Module):
    """Deformable attention on two feature maps of 6 x 5 and 3 x 4 positions."""

    def __init__(self, has_all: bool = False, **arguments: Any) -> None:
        super().__init__()
        self.attention = horizon_nn.MultiScaleDeformableAttention(8, 2, 2, 3, dropout=0.0, **arguments)
        for layer in (self.attention.sampling_offsets, self.attention.attention_weights):
            nn.init.uniform_(layer.weight, -0.4, 0.4)
        self.has_all = has_all

    def forward(self, query: Tensor, value: Tensor, pos: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        shapes = [(6, 5), (3, 4)]
        if not self.has_all:
            return self.attention(query, value=value, reference_points=reference, spatial_shapes=shapes)
        return self.attention(query, None, value, value[:7], pos, mask, reference, shapes)


def _references(numbers: int) -> Any:
    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        reference = torch.rand(2, 7, 2, numbers, generator=generator) * 1.2 - 0.1
        return reference, torch.rand(2, 42, generator=generator) < 0.2

    return make


# Four linear layers, softmax, sampling and an add: each its own rounding.
ATTENTION = dict(has_weight=True, steps8=1.5, steps16=2)
DEFORMABLE = cases(
    ("deformable-attention", module(Deformable, batch_first=True),
     dict(ATTENTION, shapes=((2, 7, 8), (2, 42, 8), (2, 7, 8)), others=_references(2))),
    ("deformable-attention-all-inputs", module(Deformable, True, value_proj_ratio=0.5),
     dict(ATTENTION, shapes=((7, 2, 8), (42, 2, 8), (7, 2, 8)), others=_references(4))),
)  # fmt: skip


CASES = [*RESIZES, *SAMPLES, *GRIDS, *ROIS, *CORRELATIONS, *VIEWS, *DEFORMABLE]
