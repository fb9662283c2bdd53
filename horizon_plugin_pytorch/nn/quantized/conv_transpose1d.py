"""Transposed convolutions over one axis, on integers."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.nn.intrinsic import FORMS, derive
from horizon_plugin_pytorch.nn.quantized.convolution import TransposedConvolution


class ConvTranspose1d(TransposedConvolution):
    """ConvTranspose1d on integers."""


(
    ConvTransposeReLU1d,
    ConvTransposeReLU61d,
    ConvTransposeAdd1d,
    ConvTransposeAddReLU1d,
    ConvTransposeAddReLU61d,
) = derive(ConvTranspose1d, nn.ConvTranspose1d, FORMS, __name__)
