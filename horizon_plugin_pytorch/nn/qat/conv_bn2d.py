"""QAT convolutions over two axes whose batch normalisation goes on training."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.qat import conv2d, conv_transpose2d
from horizon_plugin_pytorch.nn.qat.gemm_bn import with_bn
from horizon_plugin_pytorch.nn.quantized import conv2d as quantized_conv
from horizon_plugin_pytorch.nn.quantized import conv_transpose2d as quantized_conv_transpose

(
    ConvBN2d,
    ConvBNReLU2d,
    ConvBNReLU62d,
    ConvBNAdd2d,
    ConvBNAddReLU2d,
    ConvBNAddReLU62d,
) = with_bn(conv2d.Conv2d, conv2d.FUSED, quantized_conv, __name__)

(
    ConvTransposeBN2d,
    ConvTransposeBNReLU2d,
    ConvTransposeBNReLU62d,
    ConvTransposeBNAdd2d,
    ConvTransposeBNAddReLU2d,
    ConvTransposeBNAddReLU62d,
) = with_bn(conv_transpose2d.ConvTranspose2d, conv_transpose2d.FUSED, quantized_conv_transpose, __name__)
