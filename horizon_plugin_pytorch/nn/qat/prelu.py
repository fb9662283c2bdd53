"""PReLU while training: its slopes are parameters, so it is not a table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.gemm import share_tensor, tensor_of
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.quantized import prelu as quantized
from horizon_plugin_pytorch.operators.support import FROM_BAYES
from horizon_plugin_pytorch.operators.table import Call, NotBindable, Operator, ScaleRule, Trait, register


class PReLU(RoundedModule, nn.PReLU):
    """PReLU with a rounded output; one slope, or one for each channel."""

    quantized_class = quantized.PReLU

    @classmethod
    def from_float(cls, mod: Any) -> PReLU:
        """The QAT form; the slopes are shared with `mod`."""
        self = cls(mod.num_parameters)
        share_tensor(self, "weight", mod.weight)  # a buffer, or a constant of the forward, is a buffer here
        self.qconfig = mod.qconfig
        self.activation_post_process = mod.qconfig.activation(channel_len=1)
        return self


def _make(weight: Any) -> nn.PReLU:
    slopes = tensor_of(weight, "weight")
    if slopes.dim() != 1:
        raise NotBindable("its weight must have one axis, as that of `torch.nn.PReLU` has")
    module = nn.PReLU(len(slopes))
    share_tensor(module, "weight", slopes)
    return module


def _bind(input: Any, weight: Any) -> Call:
    return Call(_make, (input,), settings={"weight": weight})


register(Operator(
    "prelu", ScaleRule.OWN, PReLU, quantized.PReLU, (nn.PReLU,), {F.prelu: _bind, torch.prelu: _bind},
    {"prelu": _bind}, FROM_BAYES, traits=Trait.CPU,
))  # fmt: skip
