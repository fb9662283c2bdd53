"""Several elementwise operators in one call while training: the parts in int16, the result in the qconfig's format."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.nn import combination as floats
from horizon_plugin_pytorch.nn.qat.composite import Composite, Times, inner_qconfig
from horizon_plugin_pytorch.nn.qat.div import Div
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.qat.segment_lut import SegmentLUT
from horizon_plugin_pytorch.nn.quantized.functional_modules import is_number
from horizon_plugin_pytorch.nn.quantized.softmax import EXP_SCALE
from horizon_plugin_pytorch.operators.support import INTS, Support, on
from horizon_plugin_pytorch.operators.table import Call, NotBindable, Operator, ScaleRule, register


class Factor(nn.Module):
    """A number that multiplies a part: its size is in the scale, and its sign says whether the part is subtracted.

    Args:
        name: the setting of the operator.
        value: the number, not 0.
    """

    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        self.name, self.is_negative = name, value < 0
        self.times = Times()

    def join(self, functional: FloatFunctional, x: Any, part: Any, value: float) -> Any:
        """``x + value * part``."""
        if value == 0 or (value < 0) != self.is_negative:
            raise QuantizationConfigError(
                f"`{self.name}` {functional.place} cannot become {value}: its sign decides which operator adds. Set it "
                "on the float model, and prepare that again."
            )
        part = self.times(part, abs(value))
        return functional.sub(x, part) if self.is_negative else functional.add(x, part)


class AddProduct(Composite):
    """``x + value * (a * b)``."""

    follows = frozenset({"value"})

    def __init__(self, value: float, qconfig: Any) -> None:
        super().__init__()
        self.value, self.qconfig = value, qconfig
        self.mul, self.add = FloatFunctional(inner_qconfig(qconfig)), FloatFunctional(qconfig)
        self.factor = Factor("value", value)

    @classmethod
    def from_float(cls, mod: floats.AddProduct) -> AddProduct:
        """The QAT form."""
        return cls(mod.value, mod.qconfig)

    def forward(self, x: Any, a: Any, b: Any) -> Any:
        return self.factor.join(self.add, x, self.mul.mul(a, b), self.value)


class AddQuotient(Composite):
    """``x + value * (a / b)``."""

    follows = frozenset({"value"})

    def __init__(self, value: float, qconfig: Any) -> None:
        super().__init__()
        self.value, self.qconfig = value, qconfig
        self.div, self.add = Div(inner_qconfig(qconfig)), FloatFunctional(qconfig)
        self.factor = Factor("value", value)

    @classmethod
    def from_float(cls, mod: floats.AddQuotient) -> AddQuotient:
        """The QAT form."""
        return cls(mod.value, mod.qconfig)

    def forward(self, x: Any, a: Any, b: Any) -> Any:
        return self.factor.join(self.add, x, self.div(a, b), self.value)


class Lerp(Composite):
    """``x + weight * (y - x)``."""

    follows = frozenset({"weight"})

    def __init__(self, weight: float | None, qconfig: Any) -> None:
        super().__init__()
        self.weight, self.qconfig = weight, qconfig
        inner = inner_qconfig(qconfig)
        self.sub, self.add = FloatFunctional(inner), FloatFunctional(qconfig)
        if weight is None:
            self.mul = FloatFunctional(inner)
        else:
            self.factor = Factor("weight", weight)

    @classmethod
    def from_float(cls, mod: floats.Lerp) -> Lerp:
        """The QAT form."""
        return cls(mod.weight, mod.qconfig)

    def forward(self, x: Any, y: Any, weight: Any = None) -> Any:
        difference = self.sub.sub(y, x)
        if self.weight is None:
            return self.add.add(x, self.mul.mul(difference, weight))
        return self.factor.join(self.add, x, difference, self.weight)


class LogSumExp(Composite):
    """``max + log(sum(exp(x - max)))``."""

    follows = frozenset({"dim", "keepdim"})

    def __init__(self, dim: int | tuple[int, ...], keepdim: bool, qconfig: Any) -> None:
        super().__init__()
        self.dim, self.keepdim, self.qconfig = dim, keepdim, qconfig
        inner = inner_qconfig(qconfig)
        self.sub, self.sum = FloatFunctional(inner), FloatFunctional(inner)
        self.exp = SegmentLUT(torch.exp, "exp", inner_qconfig(qconfig, EXP_SCALE))
        self.log, self.add = SegmentLUT(torch.log, "log", inner), FloatFunctional(qconfig)

    @classmethod
    def from_float(cls, mod: floats.LogSumExp) -> LogSumExp:
        """The QAT form."""
        return cls(mod.dim, mod.keepdim, mod.qconfig)

    def forward(self, x: Any) -> Any:
        largest = x.amax(self.dim, keepdim=True)
        total = self.sum.sum(self.exp(self.sub.sub(x, largest)), self.dim, keepdim=True)
        out = self.add.add(self.log(total), largest)
        return out if self.keepdim else _without(out, self.dim)


def _without(x: Any, dim: int | tuple[int, ...]) -> Any:
    axes = {axis % x.dim() for axis in ((dim,) if isinstance(dim, int) else dim)}
    return x.reshape([size for axis, size in enumerate(x.shape) if axis not in axes])


def _three(factory: Any) -> Any:
    def bind(
        x: Any, a: Any = None, b: Any = None, *, value: Any = 1, input: Any = None, tensor1: Any = None,
        tensor2: Any = None, out: Any = None,
    ) -> Call:  # fmt: skip
        if out is not None:
            raise NotBindable("use its result instead of `out`")
        if not is_number(value) or value == 0:
            raise NotBindable("`value` must be a number other than 0")
        operands = (x if input is None else input, a if tensor1 is None else tensor1, b if tensor2 is None else tensor2)
        return Call(factory, operands, settings={"value": float(value)})

    return bind


def _lerp(x: Any, end: Any = None, weight: Any = None, *, input: Any = None, out: Any = None) -> Call:
    if out is not None:
        raise NotBindable("use its result instead of `out`")
    x = x if input is None else input
    if not is_number(weight):
        return Call(floats.Lerp, (x, end, weight), settings={"weight": None})
    if weight == 0:
        raise NotBindable("with weight 0 it is its first operand: use that")
    return Call(floats.Lerp, (x, end), settings={"weight": float(weight)})


def _logsumexp(x: Any, dim: Any = None, keepdim: bool = False, *, input: Any = None, out: Any = None) -> Call:
    if out is not None:
        raise NotBindable("use its result instead of `out`")
    if not isinstance(dim, int):
        dim = tuple(dim)
    return Call(floats.LogSumExp, (x if input is None else input,), settings={"dim": dim, "keepdim": bool(keepdim)})


_addcmul, _addcdiv = _three(floats.AddProduct), _three(floats.AddQuotient)
_SUM = on(bayes=Support(INTS, INTS, note="product in int16"))
register(Operator(
    "addcmul", ScaleRule.OWN, AddProduct, AddProduct, (floats.AddProduct,), {torch.addcmul: _addcmul},
    {"addcmul": _addcmul, "addcmul_": _addcmul}, _SUM,
))  # fmt: skip
register(Operator(
    "addcdiv", ScaleRule.OWN, AddQuotient, AddQuotient, (floats.AddQuotient,), {torch.addcdiv: _addcdiv},
    {"addcdiv": _addcdiv, "addcdiv_": _addcdiv},
    on(bayes=Support(("qint16",), INTS, note="reciprocal by table in int16")), real_inputs=("b",),
))  # fmt: skip
register(Operator(
    "lerp", ScaleRule.OWN, Lerp, Lerp, (floats.Lerp,), {torch.lerp: _lerp}, {"lerp": _lerp, "lerp_": _lerp}, _SUM,
))  # fmt: skip
register(Operator(
    "logsumexp", ScaleRule.OWN, LogSumExp, LogSumExp, (floats.LogSumExp,),
    {torch.logsumexp: _logsumexp, torch.special.logsumexp: _logsumexp}, {"logsumexp": _logsumexp},
    on(bayes=Support(INTS, INTS, note="exponential and logarithm by tables in int16")),
))  # fmt: skip
