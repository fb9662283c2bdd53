"""QAT linear layers whose batch normalisation goes on training."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.qat import linear
from horizon_plugin_pytorch.nn.qat.gemm_bn import with_bn
from horizon_plugin_pytorch.nn.quantized import linear as quantized

LinearBN, LinearBNReLU, LinearBNReLU6, LinearBNAdd, LinearBNAddReLU, LinearBNAddReLU6 = with_bn(
    linear.Linear, linear.FUSED, quantized, __name__
)
