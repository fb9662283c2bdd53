"""Average pooling of images while training."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.avg_pool import AVERAGE, WINDOW_ARGUMENTS
from horizon_plugin_pytorch.nn.qat.module import CopiedModule
from horizon_plugin_pytorch.nn.quantized import avg_pool2d as quantized
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, Trait, as_module, register


class AvgPool2d(CopiedModule, nn.AvgPool2d):
    """AvgPool2d whose output is rounded."""

    quantized_class = quantized.AvgPool2d
    copied = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


register(Operator(
    "avg_pool2d", ScaleRule.OWN, AvgPool2d, quantized.AvgPool2d, (nn.AvgPool2d,),
    {F.avg_pool2d: as_module(nn.AvgPool2d, f"{WINDOW_ARGUMENTS}, divisor_override=None",
        remedy="for the mean of all positions use F.adaptive_avg_pool2d(x, 1)",
    )},
    marches=AVERAGE, traits=Trait.AVERAGE,
))  # fmt: skip
