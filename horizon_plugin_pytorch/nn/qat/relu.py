"""ReLU and ReLU6 while training: they keep the scale of their input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.fake_quant.rounding import integer_limits
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized import relu as quantized
from horizon_plugin_pytorch.operators.support import INT8, Support, on
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, Trait, as_module, register
from horizon_plugin_pytorch.qtensor import QTensor


class ReLU(QATModule):
    """ReLU on real values or on a QTensor."""

    quantized_class = quantized.ReLU
    limits = (0.0, float("inf"))

    def __init__(self) -> None:
        super().__init__()
        self.qconfig = None  # it has no quantization parameters of its own
        self.activation_post_process = None

    @classmethod
    def from_float(cls, mod: nn.Module) -> Any:
        """The QAT form of a ReLU module."""
        self = cls()
        return self

    def forward(self, x: Any) -> Any:
        if not isinstance(x, QTensor):
            return x.clamp(*self.limits)
        low, high = integer_limits(x.scale, x.dtype.min, x.dtype.max, self.limits)
        grid = None if x.grid is None else x.grid.clamp(low, high)
        if grid is not None and not (torch.is_grad_enabled() and x.requires_grad):
            out = x.with_grid(grid)
        elif self.limits[1] == float("inf"):
            out = x.like(torch.relu(x.plain()), grid)
        else:
            # On the grid, 6 is the nearest multiple of the scale; the product in float32 is what conversion gives.
            upper = float(high * x.scale) if x.is_rounded else self.limits[1]
            out = x.like(x.plain().clamp(0.0, upper), grid)
        out.set_range(low, high)  # also where a gradient is wanted: the plans of the layers behind it depend on it
        return out


class ReLU6(ReLU):
    """ReLU6 on real values or on a QTensor."""

    quantized_class = quantized.ReLU6
    limits = (0.0, 6.0)


_MARCHES = on(bernoulli2=Support(INT8, INT8), bayes=Support())
_relu = as_module(lambda inplace: nn.ReLU(), "input, inplace=False")
_relu6 = as_module(lambda inplace: nn.ReLU6(), "input, inplace=False")
register(Operator(
    "relu", ScaleRule.INHERIT, ReLU, quantized.ReLU, (nn.ReLU,),
    {F.relu: _relu, torch.relu: _relu, torch.relu_: _relu, F.relu_: _relu}, {"relu": _relu, "relu_": _relu},
    _MARCHES, traits=Trait.FUSED,
))  # fmt: skip
register(Operator(
    "relu6", ScaleRule.INHERIT, ReLU6, quantized.ReLU6, (nn.ReLU6,), {F.relu6: _relu6}, marches=_MARCHES,
    traits=Trait.FUSED,
))  # fmt: skip
