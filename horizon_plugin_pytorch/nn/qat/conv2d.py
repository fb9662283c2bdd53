"""QAT convolutions over two axes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.convolution import QATConvolution
from horizon_plugin_pytorch.nn.qat.gemm import CONV, layer_function, qat_forms, register_layers
from horizon_plugin_pytorch.nn.quantized import conv2d as quantized
from horizon_plugin_pytorch.operators.layer_support import CONV2D


class Conv2d(QATConvolution, nn.Conv2d):
    """Conv2d with rounded weights and output."""

    float_class = nn.Conv2d
    quantized_class = quantized.Conv2d


FUSED = qat_forms(Conv2d, quantized, __name__)
ConvReLU2d, ConvReLU62d, ConvAdd2d, ConvAddReLU2d, ConvAddReLU62d = FUSED

register_layers("conv2d", Conv2d, FUSED, CONV2D, {F.conv2d: layer_function(nn.Conv2d, CONV)})
