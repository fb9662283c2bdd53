"""Linear layers on integers."""

from __future__ import annotations

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.gemm import QuantizedGemm


class Linear(QuantizedGemm):
    """Linear on integers."""

    def compute(self, x: Tensor, residual: Tensor | None, plan: fp.AccumulatorPlan) -> Tensor:
        return fp.linear(
            x, plan.weights, plan.bias, residual, plan.residual_factor, plan.factor, plan.input_digits, plan.parts,
            plan.is_double, plan.limit, plan.low, plan.high, plan.is_real,
        )  # fmt: skip


class LinearReLU(Linear):
    """Linear and ReLU on integers."""


class LinearReLU6(Linear):
    """Linear and ReLU6 on integers."""


class LinearAdd(Linear):
    """Linear plus another tensor, on integers."""

    has_add = True


class LinearAddReLU(LinearAdd):
    """Linear plus another tensor, and ReLU, on integers."""


class LinearAddReLU6(LinearAdd):
    """Linear plus another tensor, and ReLU6, on integers."""
