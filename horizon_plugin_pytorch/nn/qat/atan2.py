"""The angle of a point, while training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.nn.atan2 import Atan2 as _Float
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.qat.segment_lut import FROM_BAYES
from horizon_plugin_pytorch.nn.quantized import atan2 as quantized
from horizon_plugin_pytorch.operators import finite
from horizon_plugin_pytorch.operators.table import Call, Operator, ScaleRule, register


class Atan2(RoundedModule):
    """``atan2(y, x)`` with a rounded output."""

    quantized_class = quantized.Atan2

    @classmethod
    def from_float(cls, mod: Any) -> Atan2:
        """The QAT form."""
        self = cls()
        self.qconfig = mod.qconfig
        self.activation_post_process = mod.qconfig.activation(channel_len=1)
        return self

    def real_value(self, y: Tensor, x: Tensor) -> Tensor:
        return finite.atan2(y, x)


def _bind(input: Any, other: Any) -> Call:
    return Call(_Float, (input, other))


_NAMES = ("atan2", "arctan2", "atan2_", "arctan2_")
register(Operator(
    "atan2", ScaleRule.OWN, Atan2, quantized.Atan2, (_Float,), {torch.atan2: _bind, torch.arctan2: _bind},
    dict.fromkeys(_NAMES, _bind), FROM_BAYES,
))  # fmt: skip
