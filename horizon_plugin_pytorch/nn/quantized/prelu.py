"""PReLU on integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class PReLU(QuantizedModule):
    """One factor for integers from 0 up, one per channel below; one float32 product and one rounding."""

    weight: Tensor

    def configure(self, mod: Any) -> None:
        self.register_buffer("weight", mod.weight.detach().clone())

    def _plan(self, x: QTensor) -> tuple[Tensor, Tensor, bool]:
        assert self.scale is not None
        ratio = x.scale.detach().double() / self.scale.double()
        above, below = ratio.float(), (ratio * self.weight.double()).float()
        return above, below, bool((below <= above).all())

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        above, below, is_convex = self._plans.get((x,), "factors", lambda: self._plan(x))
        axis = 1 if x.dim() > 1 else -1
        return self.output(fp.prelu(x.plain(), above, below, axis, is_convex, self.low, self.high))
