"""Upsample modules on integers."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.quantized.interpolate import Interpolate


class Upsample(Interpolate):
    """Upsample on integers."""


class UpsamplingBilinear2d(Interpolate):
    """UpsamplingBilinear2d on integers."""


class UpsamplingNearest2d(Interpolate):
    """UpsamplingNearest2d on integers."""
