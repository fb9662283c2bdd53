"""A batch normalisation that follows no convolution, on integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class BatchNorm2d(QuantizedModule):
    """``gain * x + shift`` per channel, in one rounding."""

    gain: Tensor
    shift: Tensor

    def configure(self, mod: Any) -> None:
        gain = torch.rsqrt(mod.running_var.double() + mod.eps)
        if mod.weight is not None:
            gain = gain * mod.weight.detach().double()
        shift = -mod.running_mean.double() * gain
        if mod.bias is not None:
            shift = shift + mod.bias.detach().double()
        self.register_buffer("gain", gain)
        self.register_buffer("shift", shift)

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        assert self.scale is not None
        scale = self.scale.double()
        factor, offset = self._plans.get(
            (x.scale,), "affine", lambda: fp.choose_affine(self.gain * x.scale.double() / scale, self.shift / scale)
        )
        return self.output(fp.affine(x.plain(), factor, offset, 1, self.low, self.high))
