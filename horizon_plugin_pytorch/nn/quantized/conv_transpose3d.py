"""Transposed convolutions over three axes, on integers."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.nn.intrinsic import FORMS, derive
from horizon_plugin_pytorch.nn.quantized.convolution import TransposedConvolution


class ConvTranspose3d(TransposedConvolution):
    """ConvTranspose3d on integers."""


(
    ConvTransposeReLU3d,
    ConvTransposeReLU63d,
    ConvTransposeAdd3d,
    ConvTransposeAddReLU3d,
    ConvTransposeAddReLU63d,
) = derive(ConvTranspose3d, nn.ConvTranspose3d, FORMS, __name__)
