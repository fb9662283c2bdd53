"""Products of tensors while training: matrix products, sums with them, and einsum."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fake_quant.qconfig import default_qat_8bit_fake_quant_qconfig
from horizon_plugin_pytorch.nn import matmul as floats
from horizon_plugin_pytorch.nn.qat.composite import Composite, Times, inner_qconfig
from horizon_plugin_pytorch.nn.qat.functional_modules import FloatFunctional
from horizon_plugin_pytorch.nn.quantized.functional_modules import FloatFunctional as _Float
from horizon_plugin_pytorch.nn.quantized.functional_modules import QFunctional, is_number
from horizon_plugin_pytorch.operators.support import INT8, INTS, WIDE, Support, at_most, on
from horizon_plugin_pytorch.operators.table import Call, Counts, NotBindable, Operator, ScaleRule, Trait, register


class AddMatmul(Composite):
    """``beta * x + alpha * (a @ b)``: the product in int16, the sum in the qconfig's format.

    The numbers are part of the scales: they cost no operator and no rounding.
    """

    follows = frozenset({"beta", "alpha"})
    adds_product: ClassVar[bool] = True

    def __init__(self, beta: float, alpha: float, qconfig: Any) -> None:
        super().__init__()
        self.beta, self.alpha, self.qconfig = beta, alpha, qconfig
        self.alpha_times = Times()
        self.matmul = FloatFunctional(qconfig if beta == 0 else inner_qconfig(qconfig))
        if beta != 0:
            self.beta_times = Times()
            self.add = FloatFunctional(qconfig)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("beta", "alpha") and name in self.__dict__:
            self._require_form(name, value)
        super().__setattr__(name, value)

    def _require_form(self, name: str, value: Any) -> None:
        """Insist on a number for which the parts are there."""
        is_skipped = "add" not in self._modules
        fits = is_number(value) and (value > 0 or (name == "beta" and value == 0))
        if not fits or (name == "beta" and (value == 0) != is_skipped):
            parts = (
                "it was 0 when the model was prepared, so that nothing adds its operand"
                if is_skipped
                else ("the parts that were made when the model was prepared take positive numbers")
            )
            raise QuantizationConfigError(
                f"`AddMatmul.{name}` {self.place} cannot become {value!r}: {parts}. Set it on the float model, and "
                "prepare that again."
            )

    @classmethod
    def from_float(cls, mod: floats.AddMatmul) -> AddMatmul:
        """The QAT form."""
        self = cls(mod.beta, mod.alpha, mod.qconfig)
        if mod.beta != 0:
            self.add.follow_scores(mod)
        return self

    def forward(self, x: Any, a: Any, b: Any) -> Any:
        product = self.matmul.matmul(self.alpha_times(a, self.alpha), b)
        return product if self.beta == 0 else self.add.add(self.beta_times(x, self.beta), product)


class Einsum(Composite):
    """An einsum as permutations around matrix products and elementwise products, one for each two operands.

    Those before the last are in int16.
    """

    follows = frozenset({"equation"})

    def __init__(self, equation: str, qconfig: Any) -> None:
        super().__init__()
        self.equation, self.qconfig = equation, qconfig
        self.is_real = qconfig.activation is None  # only matrix products have a high-precision output
        count = len(floats.pairwise(equation)) - 1
        if count:
            self.inner = nn.ModuleList(FloatFunctional(_inner(qconfig)) for _ in range(count))
        self.product = FloatFunctional(qconfig)

    @classmethod
    def from_float(cls, mod: floats.Einsum) -> Einsum:
        """The QAT form."""
        return cls(mod.equation, mod.qconfig)

    def forward(self, a: Any, *others: Any) -> Any:
        *steps, last = zip(floats.pairwise(self.equation), others, strict=True)
        for i, (equation, b) in enumerate(steps):
            part = self.inner[i]
            a = floats.multiply(equation, a, b, part.matmul, part.mul)
        equation, b = last
        return floats.multiply(equation, a, b, self.product.matmul, None if self.is_real else self.product.mul)

    def extra_repr(self) -> str:
        return self.equation


def _inner(qconfig: Any) -> Any:
    """The qconfig of a product that is not the last: also where that has a high-precision output."""
    return inner_qconfig(qconfig if qconfig.activation is not None else default_qat_8bit_fake_quant_qconfig)


def _matmul(x: Any, other: Any = None, *, tensor: Any = None, tensor2: Any = None, mat2: Any = None, vec: Any = None,
            out: Any = None) -> Call:  # fmt: skip
    if out is not None:
        raise NotBindable("leave `out` out and use the result")
    return Call(_Float, (x, next(v for v in (other, tensor, tensor2, mat2, vec) if v is not None)), method="matmul")


def _add_matmul(first: str, second: str) -> Callable[..., Call]:
    def bind(x: Any, a: Any = None, b: Any = None, *, beta: Any = 1, alpha: Any = 1, **named: Any) -> Call:
        x = named.pop("input", x)
        a, b = named.pop(first, a), named.pop(second, b)
        if named:
            raise NotBindable(f"leave {', '.join(named)} out")
        if not is_number(beta) or not is_number(alpha) or beta < 0 or alpha <= 0:
            raise NotBindable("beta must be a number from 0 on and alpha a positive one; write it as x + a @ b")
        return Call(floats.AddMatmul, (x, a, b), settings={"beta": float(beta), "alpha": float(alpha)})

    return bind


def _einsum(equation: Any, *operands: Any) -> Call:
    if not isinstance(equation, str):
        raise NotBindable("write the equation as a string, such as 'bij,bjk->bik'")
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    try:
        for step in floats.pairwise(equation):
            floats.split_equation(step)
    except ValueError as error:
        raise NotBindable(str(error)) from error
    return Call(floats.Einsum, operands, settings={"equation": equation})


# Published for [N, C, H, W]; a product of two int16 tensors is beyond the tables, though its integers are defined here.
_MARCHES = on(
    bernoulli2=Support(INT8, ("qint8", "qint32")),
    bayes=Support(INT8, WIDE, limits=(at_most("N", 4096), at_most("C", 8192), at_most("H", 8192), at_most("W", 8192))),
    nash=Support(INTS, WIDE, note="both int16 from OE 3.5 on"),
)
_addmm, _addmv, _baddbmm = (
    _add_matmul("mat1", "mat2"), _add_matmul("mat", "vec"), _add_matmul("batch1", "batch2")
)  # fmt: skip

register(Operator(
    "matmul", ScaleRule.OWN, FloatFunctional, QFunctional,
    functions=dict.fromkeys(
        (torch.matmul, torch.bmm, torch.mm, torch.mv, torch.dot, torch.linalg.matmul, operator.matmul), _matmul
    ),
    methods=dict.fromkeys(("matmul", "bmm", "mm", "mv", "dot", "__matmul__"), _matmul),
    marches=_MARCHES, has_real_output=True, traits=Trait.PRODUCT, counts=Counts(),
))  # fmt: skip
register(Operator(
    "addmm", ScaleRule.OWN, AddMatmul, AddMatmul, (floats.AddMatmul,),
    {torch.addmm: _addmm, torch.addmv: _addmv, torch.baddbmm: _baddbmm},
    {"addmm": _addmm, "addmv": _addmv, "baddbmm": _baddbmm}, _MARCHES, traits=Trait.PRODUCT,
))  # fmt: skip
register(Operator(
    "einsum", ScaleRule.OWN, Einsum, Einsum, (floats.Einsum,), {torch.einsum: _einsum}, {}, _MARCHES,
    has_real_output=True, traits=Trait.PRODUCT,
))  # fmt: skip
