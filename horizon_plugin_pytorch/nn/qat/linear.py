"""QAT linear layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn import intrinsic
from horizon_plugin_pytorch.nn.operator_table import Operator, ScaleRule, register
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.module import relu_limits
from horizon_plugin_pytorch.nn.quantized import linear as quantized


class Linear(QATGemm, nn.Linear):  # type: ignore[misc] # torch says that `bias` is never None
    """Linear with rounded weights and output."""

    float_class = nn.Linear
    quantized_class = quantized.Linear

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)


class LinearReLU(Linear):
    """Linear and ReLU; only the result is rounded."""

    limits = relu_limits(True, False)
    quantized_class = quantized.LinearReLU


class LinearReLU6(Linear):
    """Linear and ReLU6; only the result is rounded."""

    limits = relu_limits(True, True)
    quantized_class = quantized.LinearReLU6


class LinearAdd(Linear):
    """Linear plus another tensor; only the result is rounded."""

    has_add = True
    quantized_class = quantized.LinearAdd


class LinearAddReLU(LinearAdd):
    """Linear plus another tensor, and ReLU; only the result is rounded."""

    limits = relu_limits(True, False)
    quantized_class = quantized.LinearAddReLU


class LinearAddReLU6(LinearAdd):
    """Linear plus another tensor, and ReLU6; only the result is rounded."""

    limits = relu_limits(True, True)
    quantized_class = quantized.LinearAddReLU6


register(Operator("linear", ScaleRule.OWN, Linear, quantized.Linear, (nn.Linear,)))
for _fused, _qat in (
    (intrinsic.LinearReLU, LinearReLU),
    (intrinsic.LinearReLU6, LinearReLU6),
    (intrinsic.LinearAdd, LinearAdd),
    (intrinsic.LinearAddReLU, LinearAddReLU),
    (intrinsic.LinearAddReLU6, LinearAddReLU6),
):
    register(Operator(_fused.__name__, ScaleRule.OWN, _qat, _qat.quantized_class, (_fused,)))
