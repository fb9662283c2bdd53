"""QAT transposed convolutions over one axis."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.convolution import QATTransposedConvolution
from horizon_plugin_pytorch.nn.qat.gemm import CONV_TRANSPOSE, layer_function, qat_forms, register_layers
from horizon_plugin_pytorch.nn.quantized import conv_transpose1d as quantized
from horizon_plugin_pytorch.operators.layer_support import CONV_TRANSPOSE1D
from horizon_plugin_pytorch.operators.table import Trait


class ConvTranspose1d(QATTransposedConvolution, nn.ConvTranspose1d):
    """ConvTranspose1d with rounded weights and output."""

    float_class = nn.ConvTranspose1d
    quantized_class = quantized.ConvTranspose1d


FUSED = qat_forms(ConvTranspose1d, quantized, __name__)
(
    ConvTransposeReLU1d,
    ConvTransposeReLU61d,
    ConvTransposeAdd1d,
    ConvTransposeAddReLU1d,
    ConvTransposeAddReLU61d,
) = FUSED

register_layers(
    "conv_transpose1d",
    ConvTranspose1d,
    FUSED,
    CONV_TRANSPOSE1D,
    {F.conv_transpose1d: layer_function(nn.ConvTranspose1d, CONV_TRANSPOSE)},
    Trait.SIZED,
)
