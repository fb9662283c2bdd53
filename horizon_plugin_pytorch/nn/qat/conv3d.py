"""QAT convolutions over three axes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.convolution import QATConvolution
from horizon_plugin_pytorch.nn.qat.gemm import CONV, layer_function, qat_forms, register_layers
from horizon_plugin_pytorch.nn.quantized import conv3d as quantized
from horizon_plugin_pytorch.operators.layer_support import CONV3D


class Conv3d(QATConvolution, nn.Conv3d):
    """Conv3d with rounded weights and output."""

    float_class = nn.Conv3d
    quantized_class = quantized.Conv3d


FUSED = qat_forms(Conv3d, quantized, __name__)
ConvReLU3d, ConvReLU63d, ConvAdd3d, ConvAddReLU3d, ConvAddReLU63d = FUSED

register_layers("conv3d", Conv3d, FUSED, CONV3D, {F.conv3d: layer_function(nn.Conv3d, CONV)})
