"""QAT convolutions over three axes whose batch normalisation goes on training."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.qat import conv3d, conv_transpose3d
from horizon_plugin_pytorch.nn.qat.gemm_bn import with_bn
from horizon_plugin_pytorch.nn.quantized import conv3d as quantized_conv
from horizon_plugin_pytorch.nn.quantized import conv_transpose3d as quantized_conv_transpose

(
    ConvBN3d,
    ConvBNReLU3d,
    ConvBNReLU63d,
    ConvBNAdd3d,
    ConvBNAddReLU3d,
    ConvBNAddReLU63d,
) = with_bn(conv3d.Conv3d, conv3d.FUSED, quantized_conv, __name__)

(
    ConvTransposeBN3d,
    ConvTransposeBNReLU3d,
    ConvTransposeBNReLU63d,
    ConvTransposeBNAdd3d,
    ConvTransposeBNAddReLU3d,
    ConvTransposeBNAddReLU63d,
) = with_bn(conv_transpose3d.ConvTranspose3d, conv_transpose3d.FUSED, quantized_conv_transpose, __name__)
