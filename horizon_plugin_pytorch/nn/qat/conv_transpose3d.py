"""QAT transposed convolutions over three axes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.convolution import QATTransposedConvolution
from horizon_plugin_pytorch.nn.qat.gemm import CONV_TRANSPOSE, layer_function, qat_forms, register_layers
from horizon_plugin_pytorch.nn.quantized import conv_transpose3d as quantized
from horizon_plugin_pytorch.operators.layer_support import CONV_TRANSPOSE3D
from horizon_plugin_pytorch.operators.table import Trait


class ConvTranspose3d(QATTransposedConvolution, nn.ConvTranspose3d):
    """ConvTranspose3d with rounded weights and output."""

    float_class = nn.ConvTranspose3d
    quantized_class = quantized.ConvTranspose3d


FUSED = qat_forms(ConvTranspose3d, quantized, __name__)
(
    ConvTransposeReLU3d,
    ConvTransposeReLU63d,
    ConvTransposeAdd3d,
    ConvTransposeAddReLU3d,
    ConvTransposeAddReLU63d,
) = FUSED

register_layers(
    "conv_transpose3d",
    ConvTranspose3d,
    FUSED,
    CONV_TRANSPOSE3D,
    {F.conv_transpose3d: layer_function(nn.ConvTranspose3d, CONV_TRANSPOSE)},
    Trait.SIZED,
)
