"""QAT convolutions over one axis whose batch normalisation goes on training."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.qat import conv1d, conv_transpose1d
from horizon_plugin_pytorch.nn.qat.gemm_bn import with_bn
from horizon_plugin_pytorch.nn.quantized import conv1d as quantized_conv
from horizon_plugin_pytorch.nn.quantized import conv_transpose1d as quantized_conv_transpose

(
    ConvBN1d,
    ConvBNReLU1d,
    ConvBNReLU61d,
    ConvBNAdd1d,
    ConvBNAddReLU1d,
    ConvBNAddReLU61d,
) = with_bn(conv1d.Conv1d, conv1d.FUSED, quantized_conv, __name__)

(
    ConvTransposeBN1d,
    ConvTransposeBNReLU1d,
    ConvTransposeBNReLU61d,
    ConvTransposeBNAdd1d,
    ConvTransposeBNAddReLU1d,
    ConvTransposeBNAddReLU61d,
) = with_bn(conv_transpose1d.ConvTranspose1d, conv_transpose1d.FUSED, quantized_conv_transpose, __name__)
