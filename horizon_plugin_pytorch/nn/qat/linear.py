"""QAT linear layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.qat.gemm import QATGemm, register_layers
from horizon_plugin_pytorch.nn.qat.module import relu_limits
from horizon_plugin_pytorch.nn.quantized import linear as quantized
from horizon_plugin_pytorch.nn.support import FROM_BAYES


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


register_layers(
    "linear",
    Linear,
    (
        LinearReLU,
        LinearReLU6,
        LinearAdd,
        LinearAddReLU,
        LinearAddReLU6,
    ),
    marches=FROM_BAYES,
)
