"""Adaptive average pooling while training: it has a scale of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.module import CopiedModule
from horizon_plugin_pytorch.nn.quantized import adaptive_avg_pool as quantized
from horizon_plugin_pytorch.operators.support import INT8, Support, on
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, Trait, as_module, register

ADAPTIVE = on(bayes=Support(INT8, INT8, note="the chip emulates it by AvgPool2d, whose windows may differ"))
_UNPUBLISHED = on(bayes=Support(INT8, INT8, note="not in the published tables"))


class AdaptiveAvgPool1d(CopiedModule, nn.AdaptiveAvgPool1d):
    """AdaptiveAvgPool1d whose output is rounded."""

    quantized_class = quantized.AdaptiveAvgPool1d
    copied = ("output_size",)


class AdaptiveAvgPool3d(CopiedModule, nn.AdaptiveAvgPool3d):
    """AdaptiveAvgPool3d whose output is rounded."""

    quantized_class = quantized.AdaptiveAvgPool3d
    copied = ("output_size",)


register(Operator(
    "adaptive_avg_pool1d", ScaleRule.OWN, AdaptiveAvgPool1d, quantized.AdaptiveAvgPool1d, (nn.AdaptiveAvgPool1d,),
    {torch.adaptive_avg_pool1d: as_module(nn.AdaptiveAvgPool1d, "input, output_size")},
    marches=_UNPUBLISHED, traits=Trait.AVERAGE,
))  # fmt: skip
register(Operator(
    "adaptive_avg_pool3d", ScaleRule.OWN, AdaptiveAvgPool3d, quantized.AdaptiveAvgPool3d, (nn.AdaptiveAvgPool3d,),
    {F.adaptive_avg_pool3d: as_module(nn.AdaptiveAvgPool3d, "input, output_size")},
    marches=_UNPUBLISHED, traits=Trait.AVERAGE,
))  # fmt: skip
