"""Division while training: the reciprocal in int16, the product in the qconfig's format."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.div import Div as _Float
from horizon_plugin_pytorch.nn.elementwise import Reciprocal
from horizon_plugin_pytorch.nn.qat.composite import Composite, constant_stub, inner_qconfig, optional
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional, away_from_zero
from horizon_plugin_pytorch.nn.qat.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.quantized.functional_modules import FloatFunctional as _Functional
from horizon_plugin_pytorch.nn.quantized.functional_modules import is_number
from horizon_plugin_pytorch.operators.support import Support, on
from horizon_plugin_pytorch.operators.table import Call, NotBindable, Operator, ScaleRule, Trait, advise, register
from horizon_plugin_pytorch.qtensor import QTensor

_LARGEST = 1e30  # stands for 1 / 0 in the table, where it saturates


class Div(Composite):
    """``x / y`` from a table and a product; conversion replaces these."""

    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()
        self.qconfig = qconfig
        self.reciprocal = SegmentLUT(_reciprocal, "reciprocal", inner_qconfig(qconfig))
        self.constant = optional(constant_stub(inner_qconfig(qconfig)))  # of the reciprocal of a float divisor
        self.mul = FloatFunctional(qconfig)

    @classmethod
    def from_float(cls, mod: nn.Module) -> Div:
        """The QAT form of a division."""
        return cls(mod.qconfig)

    def forward(self, x: Any, y: Any) -> Any:
        if is_number(y):
            return self.mul.mul(x, 1.0 / y)
        if not isinstance(y, QTensor):
            return self.mul.mul(x, self.constant(torch.reciprocal(y.float())))
        if y.grid is None:
            y = y.like(away_from_zero(y, self.mul, f"`{type(self).__name__}` {self.place}"))
        return self.mul.mul(x, self.reciprocal(y))


def _reciprocal(x: Tensor) -> Tensor:
    is_zero = x == 0
    return torch.where(is_zero, _LARGEST, torch.reciprocal(torch.where(is_zero, 1.0, x)))


def _div(x: Any, y: Any = None, *, other: Any = None, rounding_mode: str | None = None) -> Call | None:
    y = other if y is None else y
    if rounding_mode is not None:
        raise NotBindable("divide first, then round: `torch.floor(x / y)`")
    if is_number(y) and y == 0:
        raise NotBindable("what is divided by 0 is infinite, which no integer stands for")
    if is_number(y):
        return None if is_number(x) else Call(_Functional, (x, 1.0 / y), method="mul_scalar")
    if is_number(x) and x == 1:
        return Call(Reciprocal, (y,))
    return Call(_Float, (x, y))


advise(
    "a remainder jumps where the quotient is whole, so that one step of its input can be a whole period of its result. "
    "Compute it before the QuantStub or after the DeQuantStub",
    torch.remainder, "remainder", "remainder_", torch.fmod, "fmod", "fmod_", operator.mod,
)  # fmt: skip
advise(
    "write it as `torch.floor(x / y)`, whose quotient has a scale of its own",
    torch.floor_divide, "floor_divide", "floor_divide_", operator.floordiv,
)  # fmt: skip
register(Operator(
    "div", ScaleRule.OWN, Div, Div, (_Float,),
    {torch.div: _div, torch.divide: _div, torch.true_divide: _div, operator.truediv: _div},
    dict.fromkeys(("div", "div_", "divide", "divide_", "true_divide", "true_divide_"), _div),
    on(bayes=Support(("qint16",), ("qint16",), note="reciprocal by table in int16")),
    real_inputs=("y",), traits=Trait.NUMBERS | Trait.QUOTIENT,
))  # fmt: skip
