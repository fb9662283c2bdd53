"""PReLU on integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class PReLU(QuantizedModule):
    """One factor for integers from 0 up, one per channel below, in one rounding."""

    weight: Tensor

    def configure(self, mod: Any) -> None:
        self.register_buffer("weight", mod.weight.detach().clone())

    def _plan(self, x: QTensor) -> tuple[Tensor, Tensor]:
        assert self.scale is not None
        ratio = x.scale.detach().double() / self.scale.double()
        return fp.choose_slopes(ratio, self.weight, self.low, self.high, float(-x.dtype.min))

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        above, below = self._plans.get((x.scale,), str(x.dtype), lambda: self._plan(x))
        axis = 1 if x.dim() > 1 else -1
        return self.output(fp.prelu(x.plain(), above, below, axis, self.low, self.high))
