"""QAT transposed convolutions over two axes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.convolution import QATTransposedConvolution
from horizon_plugin_pytorch.nn.qat.gemm import CONV_TRANSPOSE, layer_function, qat_forms, register_layers
from horizon_plugin_pytorch.nn.quantized import conv_transpose2d as quantized
from horizon_plugin_pytorch.operators.layer_support import CONV_TRANSPOSE2D
from horizon_plugin_pytorch.operators.table import Trait


class ConvTranspose2d(QATTransposedConvolution, nn.ConvTranspose2d):
    """ConvTranspose2d with rounded weights and output."""

    float_class = nn.ConvTranspose2d
    quantized_class = quantized.ConvTranspose2d


FUSED = qat_forms(ConvTranspose2d, quantized, __name__)
(
    ConvTransposeReLU2d,
    ConvTransposeReLU62d,
    ConvTransposeAdd2d,
    ConvTransposeAddReLU2d,
    ConvTransposeAddReLU62d,
) = FUSED

register_layers(
    "conv_transpose2d",
    ConvTranspose2d,
    FUSED,
    CONV_TRANSPOSE2D,
    {F.conv_transpose2d: layer_function(nn.ConvTranspose2d, CONV_TRANSPOSE)},
    Trait.SIZED,
)
