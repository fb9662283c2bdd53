"""Convolutions over one axis, on integers."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.nn.intrinsic import FORMS, derive
from horizon_plugin_pytorch.nn.quantized.convolution import Convolution


class Conv1d(Convolution):
    """Conv1d on integers."""


ConvReLU1d, ConvReLU61d, ConvAdd1d, ConvAddReLU1d, ConvAddReLU61d = derive(Conv1d, nn.Conv1d, FORMS, __name__)
