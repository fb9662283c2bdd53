"""Softmax while training: sub, exp, sum and reciprocal in int16, the product in the qconfig's format."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.operator_table import (
    NotBindable,
    Operator,
    ScaleRule,
    as_module,
    register,
)
from horizon_plugin_pytorch.nn.qat.composite import PartedModule, inner_qconfig, on_both
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.quantized import softmax as quantized
from horizon_plugin_pytorch.nn.quantized.softmax import EXP_SCALE, softmax_axis
from horizon_plugin_pytorch.nn.support import INT8, INTS, Support, on
from horizon_plugin_pytorch.qtensor import QTensor


class Softmax(PartedModule):
    """``exp(x - max) / sum(exp(x - max))``, shown as the parts that the guides name.

    `forward` takes a mask as well: positions where it is True are left out and count as exactly 0. A group that has no
    others gives zeros.
    """

    quantized_class: ClassVar[Any] = quantized.Softmax
    last = "mul"

    def __init__(self, dim: int | None = None, qconfig: Any = None) -> None:
        super().__init__()
        self.dim, self.qconfig = dim, qconfig
        inner = inner_qconfig(qconfig)
        self.sub = FloatFunctional(inner)
        self.exp = SegmentLUT(torch.exp, "exp", inner_qconfig(qconfig, EXP_SCALE))
        self.sum = FloatFunctional(inner)
        self.reciprocal = SegmentLUT(_reciprocal, "reciprocal", inner)
        self.mul = FloatFunctional(qconfig)

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form of a softmax module."""
        return cls(mod.dim, mod.qconfig)

    def value(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        dim = softmax_axis(self.dim, x.dim())
        hidden = masks[0] if masks else None
        if hidden is None:
            return F.softmax(x, dim)
        # Of finite numbers, so that a group without any position has no NaN, nor its gradient.
        return F.softmax(x.masked_fill(hidden, torch.finfo(x.dtype).min), dim).masked_fill(hidden, 0.0)

    def show_parts(self, x: QTensor, *masks: Tensor | None) -> None:
        dim = softmax_axis(self.dim, x.dim())
        hidden = masks[0] if masks else None
        if hidden is not None:  # the smallest value of a group in their place changes no maximum
            x = on_both(lambda v: torch.where(hidden, v.amin(dim, keepdim=True), v), x)
        exponential = self.exp(self.sub.sub(x, x.amax(dim, keepdim=True)))
        if hidden is not None:
            exponential = on_both(lambda v: torch.where(hidden, 0.0, v), exponential)
        self.reciprocal(self.sum.sum(exponential, dim, keepdim=True))


def _reciprocal(x: Tensor) -> Tensor:
    return torch.reciprocal(x.clamp(min=0.5))  # a sum that contains exp(0) is at least 1


def _make(dim: int | None, dtype: Any = None, **kwargs: Any) -> nn.Softmax:
    if dtype is not None:
        raise NotBindable("softmax takes its format from the qconfig; leave dtype out")
    return nn.Softmax(dim)


MARCHES = on(bayes=Support(INT8, INTS, note="made of look-up tables and a sum"))
_softmax = as_module(_make, "input, dim, dtype=None")
register(Operator(
    "softmax", ScaleRule.OWN, Softmax, quantized.Softmax, (nn.Softmax,),
    {F.softmax: as_module(_make, "input, dim=None, _stacklevel=3, dtype=None"), torch.softmax: _softmax,
     torch.special.softmax: _softmax},
    {"softmax": _softmax},
    MARCHES,
))  # fmt: skip
