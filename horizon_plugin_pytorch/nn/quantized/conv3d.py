"""Convolutions over three axes, on integers."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.nn.intrinsic import FORMS, derive
from horizon_plugin_pytorch.nn.quantized.convolution import Convolution


class Conv3d(Convolution):
    """Conv3d on integers."""


ConvReLU3d, ConvReLU63d, ConvAdd3d, ConvAddReLU3d, ConvAddReLU63d = derive(Conv3d, nn.Conv3d, FORMS, __name__)
