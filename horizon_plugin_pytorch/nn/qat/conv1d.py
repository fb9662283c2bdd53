"""QAT convolutions over one axis."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.convolution import QATConvolution
from horizon_plugin_pytorch.nn.qat.gemm import CONV, layer_function, qat_forms, register_layers
from horizon_plugin_pytorch.nn.quantized import conv1d as quantized
from horizon_plugin_pytorch.operators.layer_support import CONV1D


class Conv1d(QATConvolution, nn.Conv1d):
    """Conv1d with rounded weights and output."""

    float_class = nn.Conv1d
    quantized_class = quantized.Conv1d


FUSED = qat_forms(Conv1d, quantized, __name__)
ConvReLU1d, ConvReLU61d, ConvAdd1d, ConvAddReLU1d, ConvAddReLU61d = FUSED

register_layers("conv1d", Conv1d, FUSED, CONV1D, {F.conv1d: layer_function(nn.Conv1d, CONV)})
