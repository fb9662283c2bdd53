"""QAT linear layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.qat.gemm import QATGemm, layer_function, qat_forms, register_layers
from horizon_plugin_pytorch.nn.quantized import linear as quantized
from horizon_plugin_pytorch.operators.layer_support import LINEAR


class Linear(QATGemm, nn.Linear):  # type: ignore[misc] # torch says that `bias` is never None
    """Linear with rounded weights and output."""

    float_class = nn.Linear
    quantized_class = quantized.Linear
    takes_dynamic = True

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


FUSED = qat_forms(Linear, quantized, __name__)
LinearReLU, LinearReLU6, LinearAdd, LinearAddReLU, LinearAddReLU6 = FUSED

register_layers("linear", Linear, FUSED, LINEAR, {F.linear: layer_function(nn.Linear, "input, weight, bias=None")})
