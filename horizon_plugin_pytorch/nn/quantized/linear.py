"""Linear layers on integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.intrinsic import FORMS, check_rank, derive
from horizon_plugin_pytorch.nn.quantized.gemm import QuantizedGemm
from horizon_plugin_pytorch.qtensor import QTensor


def _real(x: QTensor | Tensor) -> Tensor:
    return x.as_real() if isinstance(x, QTensor) else x


class Linear(QuantizedGemm):
    """Linear on integers."""

    def copy_geometry(self, mod: Any) -> None:
        self.in_features, self.out_features = mod.in_features, mod.out_features
        self.dynamic: fp.Blocks | None = None
        if mod.dynamic is not None:
            size = mod.dynamic.size_of_block(mod.in_features)
            self.dynamic = fp.Blocks(size, mod.dynamic.quant_min, mod.dynamic.quant_max)

    def forward(self, x: QTensor | Tensor, residual: QTensor | Tensor | None = None) -> QTensor | Tensor:
        """Integers, or real numbers where they are quantized here, to integers or real numbers."""
        if self.dynamic is None:
            return super().forward(x, residual)  # type: ignore[arg-type]
        check_rank(x, self.input_rank)
        weight = self._plans.get((), "carrier", self._carrier)
        out = fp.dynamic_linear(_real(x), weight, self.weight_scale, self.bias, *fp.flatten(self.dynamic))
        if residual is not None:
            out = out + _real(residual)
        return self.real_output(out)

    def _carrier(self) -> Tensor:
        """The weight in a type in which the sums are exact."""
        assert self.dynamic is not None
        return self.weight.to(fp.sum_dtype(self.weight, self.dynamic))

    def compute(self, x: Tensor, residual: Tensor | None, plan: fp.AccumulatorPlan) -> Tensor:
        return fp.linear(x, residual, *fp.flatten(plan))


LinearReLU, LinearReLU6, LinearAdd, LinearAddReLU, LinearAddReLU6 = derive(Linear, nn.Linear, FORMS, __name__)
