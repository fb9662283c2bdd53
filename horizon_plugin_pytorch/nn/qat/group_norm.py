"""Group normalisation while training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.qat.normalization import NORM, Normalization, norm_function, with_parameters
from horizon_plugin_pytorch.nn.quantized import group_norm as quantized
from horizon_plugin_pytorch.nn.quantized.normalization import Groups, channel_groups
from horizon_plugin_pytorch.operators.table import Operator, ScaleRule, register


class GroupNorm(Normalization):
    """GroupNorm whose output is rounded."""

    quantized_class = quantized.GroupNorm

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.num_groups = source.num_groups

    @classmethod
    def from_float(cls, mod: nn.GroupNorm) -> GroupNorm:
        """The QAT form of a group norm; weight and bias are shared with it."""
        return cls(mod)

    @property
    def groups(self) -> Callable[[tuple[int, ...]], Groups]:
        return partial(channel_groups, num_groups=self.num_groups)

    def real_value(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def _make(num_groups: int, weight: Any, bias: Any, eps: float, **unused: Any) -> nn.GroupNorm:
    return with_parameters(nn.GroupNorm(num_groups, num_groups, eps, affine=False), weight, bias)


_SIGNATURE = "input, num_groups, weight=None, bias=None, eps=1e-05"
register(Operator(
    "group_norm", ScaleRule.OWN, GroupNorm, quantized.GroupNorm, (nn.GroupNorm,),
    {F.group_norm: norm_function(_make, _SIGNATURE),
     torch.group_norm: norm_function(_make, f"{_SIGNATURE}, cudnn_enabled=True")},
    marches=NORM,
))  # fmt: skip
