"""The angle of a point: atan2 from three tables, without a division.

``atan(|y| / |x|)`` is a smooth function of ``log|y| - log|x|``, so the two logarithms are looked up, subtracted as
integers, and the angle is looked up by their difference. The signs choose the quadrant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_plugin_pytorch.dtype import QuantDType
from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.table import lookup

_HALF = 1 << 15
_STEP = (
    math.log(65536) / _HALF
)  # differences of 16 bits reach ratios of 65536, where the angle is within 2e-5 of its end
_LARGEST_LOG = float(1 << 17)
_LOG_OF_0 = -float(1 << 19)  # below every other logarithm, by more than 16 bits


@dataclass(frozen=True)
class AngleTables:
    """Logarithms of both inputs in steps of `_STEP`, and angles in output steps for x >= 0 and then for x < 0."""

    y_log: Tensor
    x_log: Tensor
    angles: Tensor


def _logarithms(dtype: QuantDType, offset: float) -> Tensor:
    q = torch.arange(dtype.min, dtype.max + 1, dtype=torch.float64).abs()
    steps = ((torch.log(q) + offset) / _STEP).round().clamp(-_LARGEST_LOG, _LARGEST_LOG)
    return torch.where(q == 0, _LOG_OF_0, steps).float()


def build_angles(
    y_scale: Tensor, y_dtype: QuantDType, x_scale: Tensor, x_dtype: QuantDType, out_scale: Tensor
) -> AngleTables:
    """The tables between these scales."""
    y_log = _logarithms(y_dtype, math.log(float(y_scale)) - math.log(float(x_scale)))
    # The origin has the angle 0, as y = 0 has everywhere: its logarithm is lower still.
    y_log = torch.where(y_log == _LOG_OF_0, 2 * _LOG_OF_0, y_log)
    angle = torch.atan(torch.exp(torch.arange(-_HALF, _HALF, dtype=torch.float64) * _STEP))
    angle[0], angle[-1] = 0.0, math.pi / 2
    steps = torch.cat([angle, math.pi - angle]) / out_scale.detach().double().cpu()
    return AngleTables(y_log, _logarithms(x_dtype, 0.0), steps.round().float())


@operator(
    "atan2(Tensor y, Tensor x, Tensor y_log, Tensor x_log, Tensor angles, int y_min, int x_min, int low, int high) "
    "-> Tensor"
)
def atan2(
    y: Tensor, x: Tensor, y_log: Tensor, x_log: Tensor, angles: Tensor, y_min: int, x_min: int, low: int, high: int
) -> Tensor:
    """``atan2(y, x)`` on integers."""
    ratio = (lookup(y, y_log, y_min) - lookup(x, x_log, x_min)).clamp_(-_HALF, _HALF - 1)
    ratio += x.clamp(-1, 0).mul_(-2.0 * _HALF)  # the second table for x < 0
    return lookup(ratio, angles, -_HALF).mul_(y.clamp(-1, 0).mul_(2).add_(1)).clamp_(low, high)
