"""A factor for each channel, on integers."""

from __future__ import annotations

from typing import Any

import torch

from horizon_plugin_pytorch.nn.quantized.batchnorm import BatchNorm


class ChannelScale2d(BatchNorm):
    """ChannelScale2d on integers, in one rounding."""

    def configure(self, mod: Any) -> None:
        self.num_features = mod.num_features
        gain = mod.weight.detach().double()
        self.register_buffer("gain", gain)
        self.register_buffer("shift", torch.zeros_like(gain))
