"""Adaptive average pooling of images while training."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.adaptive_avg_pool import ADAPTIVE
from horizon_plugin_pytorch.nn.qat.module import CopiedModule
from horizon_plugin_pytorch.nn.quantized import adaptive_avg_pool2d as quantized
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, Trait, as_module, register


class AdaptiveAvgPool2d(CopiedModule, nn.AdaptiveAvgPool2d):
    """AdaptiveAvgPool2d whose output is rounded."""

    quantized_class = quantized.AdaptiveAvgPool2d
    copied = ("output_size",)


register(Operator(
    "adaptive_avg_pool2d", ScaleRule.OWN, AdaptiveAvgPool2d, quantized.AdaptiveAvgPool2d, (nn.AdaptiveAvgPool2d,),
    {F.adaptive_avg_pool2d: as_module(nn.AdaptiveAvgPool2d, "input, output_size")},
    marches=ADAPTIVE, traits=Trait.AVERAGE,
))  # fmt: skip
