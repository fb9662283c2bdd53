"""ReLU and ReLU6 on integers: they keep the scale of their input."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch.fake_quant.rounding import integer_limits
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class ReLU(QuantizedModule):
    """``max(q, 0)``."""

    limits = (0.0, float("inf"))

    def forward(self, x: Any) -> Any:
        if not isinstance(x, QTensor):
            return x.clamp(*self.limits)
        x = self.quantized_input(x)
        low, high = integer_limits(x.scale, x.dtype.min, x.dtype.max, self.limits)
        out = x.like(x.plain().clamp(low, high))
        out.set_range(low, high)
        return out

    def extra_repr(self) -> str:
        return ""


class ReLU6(ReLU):
    """``clamp(q, 0, round(6 / scale))``."""

    limits = (0.0, 6.0)
