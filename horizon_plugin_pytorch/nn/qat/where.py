"""Choosing between two tensors while training."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.fake_quant.route import is_written
from horizon_plugin_pytorch.function_handlers import described, handle
from horizon_plugin_pytorch.nn.comparison import truth
from horizon_plugin_pytorch.nn.qat.masked_scores import INFINITE, REACH, within_reach
from horizon_plugin_pytorch.nn.qat.module import RoundedModule, real
from horizon_plugin_pytorch.nn.quantized import where as quantized
from horizon_plugin_pytorch.nn.quantized.functional_modules import is_number
from horizon_plugin_pytorch.nn.where import Where as _Float
from horizon_plugin_pytorch.operators.support import INT8, Support, on
from horizon_plugin_pytorch.operators.table import (
    AS_IT_IS,
    Call,
    Counts,
    NotBindable,
    Operator,
    ScaleRule,
    Trait,
    register,
)
from horizon_plugin_pytorch.qtensor import QTensor

BEYOND = 100.0  # a number that is this many times the largest value beside it stands for infinity
USUAL = 10000.0  # from here on, models write numbers in masks


class Where(RoundedModule):
    """``where(condition, x, y)`` with a scale of its own."""

    quantized_class = quantized.Where
    softmax_axis: int | None = None  # of the softmax that takes what is chosen, if nothing else does
    is_added_to: bool = False  # does a bias or a mask come between?

    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()
        self.qconfig = qconfig
        self.activation_post_process = qconfig.activation(channel_len=1)
        self._largest = 0.0  # magnitude of what was chosen from beside a number, over all batches
        self._has_warned = False

    @classmethod
    def from_float(cls, mod: nn.Module) -> Where:
        """The QAT form of a `Where`."""
        self = cls(mod.qconfig)
        self.softmax_axis = getattr(mod, "softmax_axis", None)
        self.is_added_to = getattr(mod, "is_added_to", False)
        return self

    def forward(self, condition: Any, x: Any, y: Any) -> Any:
        return super().forward(truth(condition), x, y)

    def _train(self, condition: Tensor, x: Any, y: Any) -> Any:
        assert self.activation_post_process is not None
        x, y = real(x), real(y)
        chosen = torch.where(condition, self._bounded(x, y), self._bounded(y, x))
        if self.activation_post_process.is_observing:
            chosen = within_reach(chosen, self.softmax_axis, self.is_added_to)
        out = self.activation_post_process(chosen)
        if not out.is_rounded or not (is_number(x) or is_number(y)):
            return out
        twin: Any = self.twin()
        for number, mask in ((x, condition), (y, ~condition)):
            if is_number(number):  # what stands for infinity is at the end of the range, whatever this batch's values
                out = out.like(torch.where(mask, twin.steps(number) * out.scale.reshape(()), out.plain()))
        return out

    def _bounded(self, x: Any, other: Any) -> Any:
        """A number that stands for infinity, no further than `REACH` beyond the other operand's values."""
        if not is_number(x) or abs(x) < INFINITE or is_number(other) or other.numel() == 0:
            return x
        if is_written():  # a file is not for one batch only, and where it rounds the end of the range follows
            largest = self._largest
        else:
            largest = float(other.detach().abs().max())
            self._largest = max(self._largest, largest)
        if abs(x) < BEYOND * self._largest:
            return x
        if abs(x) < USUAL and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"`Where` {self.place}: {x:g} is {BEYOND:g} times or more beyond the values that it is chosen beside "
                f"(up to {largest:.4g}) and is taken as infinity: the result has the end of its range there. Where the "
                "number itself matters, dequantize before this operator.",
                QuantizationWarning,
                stacklevel=2,
            )
        limit = largest + REACH
        return max(-limit, min(limit, float(x)))


def _where(condition: Any, x: Any = None, y: Any = None, *, input: Any = None, other: Any = None) -> Call:
    x, y = (input if x is None else x), (other if y is None else y)
    if x is None or y is None:
        raise NotBindable("the number of its results depends on values; give torch.where both alternatives")
    return Call(_Float, (condition, x, y))


def _method_where(x: Any, condition: Any, other: Any) -> Call:
    return Call(_Float, (condition, x, other))


def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return AS_IT_IS if is_number(value) and value == 0 else Call(_Float, (mask, value, x))


_bayes = on(bayes=Support())
register(Operator(
    "where", ScaleRule.OWN, Where, quantized.Where, (_Float,), {torch.where: _where}, {"where": _method_where}, _bayes,
    traits=Trait.CHOICE | Trait.NUMBERS, counts=Counts(1, 3),
))  # fmt: skip
register(Operator(
    "masked_fill", ScaleRule.OWN, Where, quantized.Where, functions={torch.masked_fill: _masked_fill},
    methods={"masked_fill": _masked_fill, "masked_fill_": _masked_fill},
    marches=on(bayes=Support(INT8, INT8), nash=Support()),
    traits=Trait.CHOICE | Trait.KEEPS_BOOLEANS | Trait.NUMBERS,
))  # fmt: skip


@handle(torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)
def masked_fill(func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Fill with a number that the input's grid has; the scale is kept."""
    call = dict(zip(("input", "mask", "value"), args, strict=False)) | kwargs
    x, mask, value = call["input"], truth(call["mask"]), call["value"]
    if not isinstance(x, QTensor):
        return torch.masked_fill(x, mask, value)
    if isinstance(value, Tensor) and not isinstance(value, QTensor) and value.numel() == 1:
        value = value.item()
    if not is_number(value):
        raise NotImplementedError(f"{described(func)} takes a number; choose between tensors with `nn.Where()`.")
    if not x.is_rounded:
        return x.like(x.plain().masked_fill(mask, float(value)))
    steps = round(float(value) / float(x.scale)) if abs(value) < float("inf") else value
    if not x.dtype.min <= steps <= x.dtype.max:
        raise NotImplementedError(
            f"{described(func)} with {value} leaves the range of its input, whose scale is {float(x.scale):.4g}. Call "
            "`horizon_plugin_pytorch.nn.Where()(mask, value, x)`, which has a scale of its own; `prepare_qat_fx` does "
            "it by itself."
        )
    grid = None if x.grid is None else x.grid.masked_fill(mask, steps)
    if x.is_integer:
        out = x.like(grid)  # type: ignore[arg-type]
    else:
        out = x.like(x.plain().masked_fill(mask, float(x.scale * steps)), grid)
    out.set_range(min(x.range[0], int(steps)), max(x.range[1], int(steps)))
    return out
