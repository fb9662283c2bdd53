"""Upsample modules while training."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.nn.qat.interpolate import RESIZE_MARCHES, UPSAMPLING_MARCHES, _Resize
from horizon_plugin_pytorch.nn.quantized import upsampling as quantized
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, register

_COPIED = ("name", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")


class Upsample(_Resize, nn.Upsample):
    """Upsample on the grid of its input."""

    quantized_class = quantized.Upsample
    copied = _COPIED


class UpsamplingBilinear2d(_Resize, nn.UpsamplingBilinear2d):
    """UpsamplingBilinear2d on the grid of its input."""

    quantized_class = quantized.UpsamplingBilinear2d
    copied = _COPIED


class UpsamplingNearest2d(_Resize, nn.UpsamplingNearest2d):
    """UpsamplingNearest2d on the grid of its input."""

    quantized_class = quantized.UpsamplingNearest2d
    copied = _COPIED


for _name, _cls, _float, _marches in (
    ("upsample", Upsample, nn.Upsample, RESIZE_MARCHES),
    ("upsampling_bilinear2d", UpsamplingBilinear2d, nn.UpsamplingBilinear2d, UPSAMPLING_MARCHES),
    ("upsampling_nearest2d", UpsamplingNearest2d, nn.UpsamplingNearest2d, UPSAMPLING_MARCHES),
):
    register(Operator(_name, ScaleRule.INHERIT, _cls, _cls.quantized_class, (_float,), marches=_marches))
