"""A factor for each channel, while training."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch.nn.norms import ChannelScale2d as _Float
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.quantized import channel_scale as quantized
from horizon_plugin_pytorch.operators.support import INT8, INTS, Support, on
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, register


class ChannelScale2d(RoundedModule, _Float):
    """ChannelScale2d whose output is rounded."""

    quantized_class = quantized.ChannelScale2d

    @classmethod
    def from_float(cls, mod: Any) -> ChannelScale2d:
        """The QAT form; the weight is shared with `mod`."""
        self = cls(mod.num_features)
        self.weight, self.qconfig = mod.weight, mod.qconfig
        self.activation_post_process = mod.qconfig.activation(channel_len=1)
        return self


register(Operator(
    "channel_scale2d", ScaleRule.OWN, ChannelScale2d, quantized.ChannelScale2d, (_Float,),
    marches=on(bernoulli2=Support(INT8, INT8), bayes=Support(INTS, INTS)),
))  # fmt: skip
