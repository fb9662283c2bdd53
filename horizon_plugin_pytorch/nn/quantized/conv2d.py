"""Convolutions over two axes, on integers."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.nn.intrinsic import FORMS, derive
from horizon_plugin_pytorch.nn.quantized.convolution import Convolution


class Conv2d(Convolution):
    """Conv2d on integers."""


ConvReLU2d, ConvReLU62d, ConvAdd2d, ConvAddReLU2d, ConvAddReLU62d = derive(Conv2d, nn.Conv2d, FORMS, __name__)
