"""Camera features lifted into a bird's eye view while training."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch.nn.bev_pool_v2 import BevPoolV2 as _Float
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.quantized import bev_pool_v2 as quantized
from horizon_plugin_pytorch.operators.support import INTS, Support, on
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, register


class BevPoolV2(RoundedModule, _Float):
    """BevPoolV2 with its output rounded."""

    quantized_class = quantized.BevPoolV2

    @classmethod
    def from_float(cls, mod: Any) -> BevPoolV2:
        """The QAT form of the pooling."""
        self = cls()
        self.qconfig = mod.qconfig
        self.activation_post_process = mod.qconfig.activation(channel_len=1)
        return self


register(Operator(
    "bev_pool_v2", ScaleRule.OWN, BevPoolV2, quantized.BevPoolV2, (_Float,),
    marches=on(bayes=Support(INTS, INTS, note="the published tables name it without limits")),
))  # fmt: skip
