"""Average pooling while training: it has a scale of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.qat.module import CopiedModule
from horizon_plugin_pytorch.nn.quantized import avg_pool as quantized
from horizon_plugin_pytorch.operators.support import INT8, Limit, Support, at_most, between, on
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, Trait, advise, as_module, register


class AvgPool1d(CopiedModule, nn.AvgPool1d):
    """AvgPool1d whose output is rounded."""

    quantized_class = quantized.AvgPool1d
    copied = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")


class AvgPool3d(CopiedModule, nn.AvgPool3d):
    """AvgPool3d whose output is rounded."""

    quantized_class = quantized.AvgPool3d
    copied = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


_SMALLER = "use a smaller window, or several pools in a row"
WINDOW: tuple[Limit, ...] = (
    between("kernel_size", 1, 256, _SMALLER), between("stride", 1, 256, _SMALLER), at_most("padding", 256, _SMALLER),
)  # fmt: skip
AVERAGE = on(
    bernoulli2=Support(INT8, INT8, limits=(between("kernel_size", 1, 7, _SMALLER), between("stride", 1, 185))),
    bayes=Support(INT8, INT8, limits=WINDOW),
)
UNPUBLISHED = on(bayes=Support(INT8, INT8, limits=WINDOW, note="not in the published tables"))
WINDOW_ARGUMENTS = "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True"

register(Operator(
    "avg_pool1d", ScaleRule.OWN, AvgPool1d, quantized.AvgPool1d, (nn.AvgPool1d,),
    {torch.avg_pool1d: as_module(nn.AvgPool1d, WINDOW_ARGUMENTS)},
    marches=UNPUBLISHED, traits=Trait.AVERAGE,
))  # fmt: skip
register(Operator(
    "avg_pool3d", ScaleRule.OWN, AvgPool3d, quantized.AvgPool3d, (nn.AvgPool3d,),
    {F.avg_pool3d: as_module(nn.AvgPool3d, f"{WINDOW_ARGUMENTS}, divisor_override=None")},
    marches=UNPUBLISHED, traits=Trait.AVERAGE,
))  # fmt: skip
advise("use average or max pooling; a p-norm over windows has no integer form", F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)
advise(
    "it divides by a power of a sum over channels, which no chip has; use batch, group or layer normalisation",
    F.local_response_norm,
)
