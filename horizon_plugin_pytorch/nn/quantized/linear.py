"""Linear layers on integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.intrinsic import FORMS, derive
from horizon_plugin_pytorch.nn.quantized.gemm import QuantizedGemm


class Linear(QuantizedGemm):
    """Linear on integers."""

    def copy_geometry(self, mod: Any) -> None:
        self.in_features, self.out_features = mod.in_features, mod.out_features

    def compute(self, x: Tensor, residual: Tensor | None, plan: fp.AccumulatorPlan) -> Tensor:
        return fp.linear(x, residual, *fp.flatten(plan))


LinearReLU, LinearReLU6, LinearAdd, LinearAddReLU, LinearAddReLU6 = derive(Linear, nn.Linear, FORMS, __name__)
