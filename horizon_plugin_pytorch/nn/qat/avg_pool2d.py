"""Average pooling while training: it has a scale of its own."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.operator_table import Operator, ScaleRule, as_module, register
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.quantized import avg_pool2d as quantized


class Pool(RoundedModule):
    """A pooling module whose output is rounded."""

    copied: tuple[str, ...]

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form of a pooling module."""
        self = cls(**{name: getattr(mod, name) for name in cls.copied})
        self.qconfig = mod.qconfig
        self.activation_post_process = mod.qconfig.activation(channel_len=1)
        return self


class AvgPool2d(Pool, nn.AvgPool2d):
    """AvgPool2d whose output is rounded."""

    quantized_class = quantized.AvgPool2d
    copied = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


register(Operator(
    "avg_pool2d", ScaleRule.OWN, AvgPool2d, quantized.AvgPool2d, (nn.AvgPool2d,),
    {F.avg_pool2d: as_module(
        nn.AvgPool2d,
        "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None",
    )},
))  # fmt: skip
