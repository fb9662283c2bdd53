"""Softmax while training: sub, exp, sum and reciprocal in int16, the product in the qconfig's format."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from horizon_plugin_pytorch.nn.operator_table import (
    NotBindable,
    Operator,
    ScaleRule,
    as_module,
    register,
)
from horizon_plugin_pytorch.nn.qat.composite import inner_qconfig
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.support import FROM_BAYES
from horizon_plugin_pytorch.qtensor import QTensor

_EXP_SCALE = 2 / 65535  # exp(x - max) lies in [0, 1], published as 0.0000305


class Softmax(nn.Module):
    """``exp(x - max) / sum(exp(x - max))`` from smaller operators; conversion replaces these."""

    def __init__(self, dim: int | None = None, qconfig: Any = None) -> None:
        super().__init__()
        self.dim, self.qconfig = dim, qconfig
        inner = inner_qconfig(qconfig)
        self.sub = FloatFunctional(inner)
        self.exp = SegmentLUT(torch.exp, "exp", inner_qconfig(qconfig, _EXP_SCALE))
        self.sum = FloatFunctional(inner)
        self.reciprocal = SegmentLUT(_reciprocal, "reciprocal", inner)
        self.mul = FloatFunctional(qconfig)

    @classmethod
    def from_float(cls, mod: nn.Softmax) -> Softmax:
        """The QAT form of a softmax module."""
        return cls(mod.dim, mod.qconfig)

    def forward(self, x: Any) -> Any:
        if not isinstance(x, QTensor):
            return F.softmax(x, self._axis(x))
        dim = self._axis(x)
        shifted = self.sub.sub(x, x.amax(dim, keepdim=True))
        exponential = self.exp(shifted)
        total = self.sum.sum(exponential, dim, keepdim=True)
        return self.mul.mul(exponential, self.reciprocal(total))

    def _axis(self, x: Any) -> int:
        if self.dim is not None:
            return self.dim
        return 0 if x.dim() in (0, 1, 3) else 1  # torch's choice for dim=None


def _reciprocal(x: torch.Tensor) -> torch.Tensor:
    return torch.reciprocal(x.clamp(min=0.5))  # a sum that contains exp(0) is at least 1


def _make(dim: int | None, dtype: Any = None, **kwargs: Any) -> nn.Softmax:
    if dtype is not None:
        raise NotBindable("softmax takes its format from the qconfig; leave dtype out")
    return nn.Softmax(dim)


register(Operator(
    "softmax", ScaleRule.OWN, Softmax, Softmax, (nn.Softmax,),
    {F.softmax: as_module(_make, "input, dim=None, _stacklevel=3, dtype=None"),
     torch.softmax: as_module(_make, "input, dim, dtype=None")},
    {"softmax": as_module(_make, "input, dim, dtype=None")},
    FROM_BAYES,
))  # fmt: skip
