"""Transposed convolutions over two axes, on integers."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.nn.intrinsic import FORMS, derive
from horizon_plugin_pytorch.nn.quantized.convolution import TransposedConvolution


class ConvTranspose2d(TransposedConvolution):
    """ConvTranspose2d on integers."""


(
    ConvTransposeReLU2d,
    ConvTransposeReLU62d,
    ConvTransposeAdd2d,
    ConvTransposeAddReLU2d,
    ConvTransposeAddReLU62d,
) = derive(ConvTranspose2d, nn.ConvTranspose2d, FORMS, __name__)
