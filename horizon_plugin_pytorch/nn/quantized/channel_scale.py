"""A factor for each channel, on integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class ChannelScale2d(QuantizedModule):
    """ChannelScale2d on integers, in one rounding."""

    weight: Tensor

    def configure(self, mod: Any) -> None:
        self.num_features = mod.num_features
        self.register_buffer("weight", mod.weight.detach().clone())

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        assert self.scale is not None
        out_scale = self.scale.double()
        factor = self._plans.get((x,), "factor", lambda: (self.weight.double() * x.scale.double() / out_scale).float())
        return self.output(fp.requantize(x.plain(), factor, x.dim() - 3, self.low, self.high))
