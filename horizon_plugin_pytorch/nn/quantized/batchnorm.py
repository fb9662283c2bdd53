"""A batch normalisation that follows no layer, on integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.intrinsic import gain_of
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor


class BatchNorm(QuantizedModule):
    """``gain * x + shift`` per channel, in one rounding."""

    gain: Tensor
    shift: Tensor

    def configure(self, mod: Any) -> None:
        self.num_features = mod.num_features
        gain = gain_of(mod).detach()
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
            (x,),
            "affine",
            lambda: fp.choose_affine(
                self.gain * x.scale.double() / scale, self.shift / scale, x.range, self.low, self.high
            ),
        )
        return self.output(fp.affine(x.plain(), factor, offset, 1, self.low, self.high))


class BatchNorm1d(BatchNorm):
    """BatchNorm1d on integers."""


class BatchNorm2d(BatchNorm):
    """BatchNorm2d on integers."""


class BatchNorm3d(BatchNorm):
    """BatchNorm3d on integers."""


class SyncBatchNorm(BatchNorm):
    """SyncBatchNorm on integers."""
