"""Resizing and sampling."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch import nn as horizon_nn
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
)


CASES = [*RESIZES]
