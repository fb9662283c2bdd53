"""Softmax while training: sub, exp, sum and reciprocal in int16, the product in the qconfig's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.fake_quant.qconfig import default_qat_8bit_fake_quant_qconfig
from horizon_plugin_pytorch.nn.qat.composite import PartedModule, on_both, shown_qconfig
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.module import real
from horizon_plugin_pytorch.nn.qat.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.quantized import softmax as quantized
from horizon_plugin_pytorch.nn.quantized.softmax import EXP_SCALE, softmax_axis
from horizon_plugin_pytorch.nn.softmax import SoftmaxBernoulli2 as _FloatBernoulli2
from horizon_plugin_pytorch.operators.support import INT8, INTS, Support, on
from horizon_plugin_pytorch.operators.table import (
    Binder,
    Kind,
    NotBindable,
    Operator,
    ScaleRule,
    as_module,
    register,
)
from horizon_plugin_pytorch.qtensor import QTensor


class Softmax(PartedModule):
    """``exp(x - max) / sum(exp(x - max))``, shown as the parts that the guides name.

    `forward` takes a mask as well: positions where it is True are left out and count as exactly 0. A group that has no
    others gives zeros.
    """

    quantized_class: ClassVar[Any] = quantized.Softmax
    last = "mul"

    def __init__(self, dim: int | None = None, qconfig: Any = None, is_negated: bool = False) -> None:
        super().__init__()
        self.dim, self.qconfig, self.is_negated = dim, qconfig, is_negated
        inner = shown_qconfig(qconfig)
        self.sub = FloatFunctional(inner)
        self.exp = SegmentLUT(torch.exp, "exp", shown_qconfig(qconfig, EXP_SCALE))
        self.sum = FloatFunctional(inner)
        self.reciprocal = SegmentLUT(_reciprocal, "reciprocal", inner)
        self.mul = FloatFunctional(qconfig)

    @classmethod
    def from_float(cls, mod: Any) -> Any:
        """The QAT form of a softmax module."""
        dim = -3 if isinstance(mod, nn.Softmax2d) else mod.dim
        return cls(dim, mod.qconfig, isinstance(mod, nn.Softmin))

    def real_value(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        dim = softmax_axis(self.dim, x.dim())
        x = -x if self.is_negated else x
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
        exponential = self.exp(self._shifted(x, dim))
        if hidden is not None:
            exponential = on_both(lambda v: torch.where(hidden, 0.0, v), exponential)
        self.reciprocal(self.sum.sum(exponential, dim, keepdim=True))

    def _shifted(self, x: QTensor, dim: int) -> Any:
        if self.is_negated:
            return self.sub.sub(x.amin(dim, keepdim=True), x)
        return self.sub.sub(x, x.amax(dim, keepdim=True))


class LogSoftmax(PartedModule):
    """``x - max - log(sum(exp(x - max)))``, shown as parts like those of softmax."""

    quantized_class = quantized.LogSoftmax
    last = "log_sub"
    is_negated = False

    def __init__(self, dim: int | None = None, qconfig: Any = None) -> None:
        super().__init__()
        self.dim, self.qconfig = dim, qconfig
        inner = shown_qconfig(qconfig)
        self.sub = FloatFunctional(inner)
        self.exp = SegmentLUT(torch.exp, "exp", shown_qconfig(qconfig, EXP_SCALE))
        self.sum = FloatFunctional(inner)
        self.log = SegmentLUT(_log, "log", inner)
        self.log_sub = FloatFunctional(qconfig)

    @classmethod
    def from_float(cls, mod: nn.LogSoftmax) -> LogSoftmax:
        """The QAT form of a log softmax module."""
        return cls(mod.dim, mod.qconfig)

    def real_value(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        return F.log_softmax(x, softmax_axis(self.dim, x.dim()))

    def show_parts(self, x: QTensor, *masks: Tensor | None) -> None:
        dim = softmax_axis(self.dim, x.dim())
        self.log(self.sum.sum(self.exp(self.sub.sub(x, x.amax(dim, keepdim=True))), dim, keepdim=True))


class SoftmaxBernoulli2(SegmentLUT):
    """SoftmaxBernoulli2 of which ``exp(x)`` is rounded to 8 bits; the rest is float."""

    quantized_class = quantized.SoftmaxBernoulli2

    @classmethod
    def from_float(cls, mod: Any) -> SoftmaxBernoulli2:
        """The QAT form; the qconfig's format is not used, as documented."""
        self = cls(torch.exp, "exp", default_qat_8bit_fake_quant_qconfig)
        self.max_value_only = mod.max_value_only
        return self

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        rounded = super()._train(*args, **kwargs)
        entries = real(rounded)
        total = entries.sum(1, keepdim=True).clamp(min=float(rounded.scale))  # all of a position may round to 0
        return (entries.amax(1, keepdim=True) if self.max_value_only else entries) / total


def _log(x: Tensor) -> Tensor:
    return torch.log(x.clamp(min=0.5))  # likewise


def _reciprocal(x: Tensor) -> Tensor:
    return torch.reciprocal(x.clamp(min=0.5))  # a sum that contains exp(0) is at least 1


def _bind(cls: Callable[..., nn.Module], signature: str) -> Binder:
    def make(dim: int | None, dtype: Any = None, **unused: Any) -> nn.Module:
        if dtype not in (None, torch.float32):  # which it has in float
            raise NotBindable("it takes its format from the qconfig; leave dtype out")
        return cls(dim)

    return as_module(make, signature)


MARCHES = on(bayes=Support(INT8, INTS, note="made of look-up tables and a sum"))
_ANY, _GIVEN = "input, dim=None, _stacklevel=3, dtype=None", "input, dim, dtype=None"
_softmax, _log_softmax = _bind(nn.Softmax, _GIVEN), _bind(nn.LogSoftmax, _GIVEN)
register(Operator(
    "softmax", ScaleRule.OWN, Softmax, quantized.Softmax, (nn.Softmax, nn.Softmax2d, nn.Softmin),
    {F.softmax: _bind(nn.Softmax, _ANY), F.softmin: _bind(nn.Softmin, _ANY), torch.softmax: _softmax,
     torch.special.softmax: _softmax},
    {"softmax": _softmax},
    MARCHES,
))  # fmt: skip
register(Operator(
    "log_softmax", ScaleRule.OWN, LogSoftmax, quantized.LogSoftmax, (nn.LogSoftmax,),
    {F.log_softmax: _bind(nn.LogSoftmax, _ANY), torch.log_softmax: _log_softmax,
     torch.special.log_softmax: _log_softmax},
    {"log_softmax": _log_softmax},
    on(bayes=Support(INTS, INTS, note="made of look-up tables and a sum")),
))  # fmt: skip
register(Operator(
    "softmax_bernoulli2", ScaleRule.OWN, SoftmaxBernoulli2, quantized.SoftmaxBernoulli2, (_FloatBernoulli2,),
    marches=on(bernoulli2=Support(INT8, ("float32",), note="dim 1; its result feeds no quantized operator")),
    results=(Kind.FLOAT,),
))  # fmt: skip
