"""Functions of one variable, by table: sigmoid, tanh, exp and their kin."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn import elementwise
from horizon_plugin_pytorch.nn.qat.module import RoundedModule
from horizon_plugin_pytorch.nn.quantized import segment_lut as quantized
from horizon_plugin_pytorch.operators import finite
from horizon_plugin_pytorch.operators.support import INT8, INTS, Limit, Marches, Support, Use, on
from horizon_plugin_pytorch.operators.table import (
    Binder,
    Call,
    NotBindable,
    Operator,
    ScaleRule,
    Trait,
    as_module,
    register,
)
from horizon_plugin_pytorch.qtensor import QTensor


class SegmentLUT(RoundedModule):
    """A function of one variable with its output rounded; deployed as a look-up table.

    Args:
        function: maps a real tensor to a real tensor, element by element.
        name: how it appears in reports.
        qconfig: gives the output's format.
        is_whole: its values are whole numbers, between which it jumps (floor): the scale is at least 1, and an int16
            table is not made of segments.
        form: for functions that a few operators compute: what they are, given the scales of input and output; see
            `fixed_point.evaluate`.
        table_kwargs: parameters of an int16 table: `auto_divide_strategy` (``"curvature"`` makes segments short where
            the function bends, ``"evenly"`` equally wide) and `max_segments`.
    """

    quantized_class = quantized.SegmentLUT
    _source: nn.Module | None = None  # the float module whose function it has

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        name: str = "",
        qconfig: Any = None,
        is_whole: bool = False,
        form: Callable[[float, float], str] | None = None,
        **table_kwargs: Any,
    ) -> None:
        super().__init__()
        self.name, self.qconfig = name, qconfig
        self._tabulate(function, is_whole, form, table_kwargs)
        self.activation_post_process = qconfig.activation(channel_len=1)
        if is_whole:
            self.activation_post_process.finest_scale = 1.0
        self._seen: tuple = ()

    @classmethod
    def from_float(cls, mod: Any) -> SegmentLUT:
        """The QAT form of a module that computes a function of one variable.

        Parameters of the table come from the attribute `table_kwargs` of the module, if it has one.
        """
        made = _declaration_of(mod)
        name = getattr(mod, "name", made.name)
        table_kwargs = getattr(mod, "table_kwargs", {})
        self = cls(made.tabulated(mod), name, mod.qconfig, made.is_whole, made.program(mod), **table_kwargs)
        self.__dict__["_source"] = mod  # not a child
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        source = self._source
        if source is None or name not in vars(source) or name in ("training", "qconfig", "path"):
            return
        setattr(source, name, value)
        made = _declaration_of(source)
        self._tabulate(made.tabulated(source), made.is_whole, made.program(source), getattr(source, "table_kwargs", {}))

    def _tabulate(
        self, function: Callable[[Tensor], Tensor], is_whole: bool, form: Callable | None, table_kwargs: dict
    ) -> None:
        self.function = function
        self.form = None if table_kwargs else form
        self.division = None if is_whole else fp.Division(**table_kwargs)

    def real_value(self, x: Tensor) -> Tensor:
        return self.function(x)

    def inputs_seen(self) -> list[tuple]:
        """Scale and format of the last input, for `convert` to make the table for."""
        return [self._seen] if self._seen else []

    def twin_facts(self) -> tuple:
        facts = super().twin_facts()
        if not self._seen or not isinstance(self._source, elementwise.SegmentLUT):
            return facts
        # A function of the user's may read what is changed: ask it for some of the table's values, all of an int8 one.
        scale, dtype = self._seen
        steps = torch.arange(dtype.min, dtype.max + 1, 1 << max(dtype.bits - 8, 0), dtype=torch.float64)
        with torch.no_grad():
            values = self.function(steps * scale.detach().double().cpu())
        return (*facts, tuple(torch.nan_to_num(values).tolist()))

    def forward(self, x: Any) -> Any:
        if isinstance(x, QTensor):
            self._seen = (x.scale, x.dtype)
        return super().forward(x)

    def extra_repr(self) -> str:
        return self.name


def _declaration_of(mod: nn.Module) -> Function:
    return next(_BY_MODULE[base] for base in type(mod).__mro__ if base in _BY_MODULE)


TABLE = Support(INTS, INTS, note="look-up table")
_NOT_WIDER = Limit(
    "qint16 output from qint16 input only",
    lambda use: "qint16" not in [x.format for x in use.outputs] or "qint8" not in [x.format for x in use.inputs],
    lambda use: "qint8 -> qint16",
    "give the producer of this tensor qint16, or this operator qint8",
)
_NASH = replace(TABLE, limits=(_NOT_WIDER,))
FROM_BAYES = on(bayes=TABLE, nash=_NASH)
EVERYWHERE = on(bernoulli2=Support(INT8, INT8, note="look-up table"), bayes=TABLE, nash=_NASH)


def _is_small(use: Use) -> bool:
    largest = 1e6 if use.inputs[0].format == "qint8" else 1e8
    return all(value <= largest for value in use.numbers("magnitude"))


_MAGNITUDE = Limit(
    "magnitude <= 1e6 (qint8), 1e8 (qint16)",
    _is_small,
    lambda use: f"magnitude {', '.join(map(str, use.numbers('magnitude')))}",
    "Scale its input down.",
)
WHOLE = on(bayes=Support(INTS, INTS, limits=(_MAGNITUDE,)))


@dataclass(frozen=True)
class Function:
    """The declaration of one function; a row of the operator table is made of it.

    Args:
        name: the operator's name.
        modules: the float classes; calls of functions become the first, or a `SegmentLUT` if there is none.
        names: what torch, `torch.nn.functional`, `torch.special` and tensors call it, besides `name`; each also
            with ``_`` at the end where torch has it in place.
        arguments: of functions and class alike, and attributes of the module: ``negative_slope=0.01``.
        function: what is put into the table, given x and these arguments; None for an `Elementwise`, which knows.
        marches: where it runs.
        is_whole: its values are whole numbers.
        form: of functions that a few operators compute quicker than a table is read: what they are, given the scales
            of input and output and the arguments of `function`; empty where they do not apply.
        bind: the binder, where the arguments do not say it all.
        traits: of the row.
    """

    name: str
    modules: tuple[type[nn.Module], ...]
    names: str = ""
    arguments: str = ""
    function: Callable[..., Tensor] | None = None
    marches: Marches = field(default_factory=lambda: FROM_BAYES)
    is_whole: bool = False
    form: Callable[..., str] | None = None
    bind: Binder | None = None
    traits: Trait = Trait.NONE

    def tabulated(self, mod: Any) -> Callable[[Tensor], Tensor]:
        """What is put into the table for a module of this class."""
        if self.is_whole:
            return partial(_as_float32, mod.quantized_function())
        if self.function is None:
            return mod.quantized_function()
        given = self._given(mod)
        return partial(self.function, **given) if given else self.function

    def program(self, mod: Any) -> Callable[[float, float], str] | None:
        """The quick form of a module of this class."""
        return None if self.form is None else partial(self.form, **self._given(mod))

    def _given(self, mod: Any) -> dict[str, Any]:
        names = [argument.partition("=")[0].strip() for argument in self.arguments.split(",") if argument]
        return {name: getattr(mod, name) for name in getattr(mod, "arguments", names)}

    def row(self) -> Operator:
        """The row of the operator table."""
        signature = ", ".join(["input", *filter(None, [self.arguments]), "inplace=False"])
        bind = self.bind or as_module(self._make, signature)
        spelled = [name + end for name in (self.name, *self.names.split()) for end in ("", "_")]
        found = [getattr(owner, name, None) for owner in (torch, F, torch.special, operator) for name in spelled]
        functions = {f: bind for f in found if callable(f)}
        methods = {name: bind for name in spelled if hasattr(Tensor, name)}
        return Operator(
            self.name,
            ScaleRule.OWN,
            SegmentLUT,
            quantized.SegmentLUT,
            self.modules,
            functions,
            methods,
            self.marches,
            traits=self.traits,
        )

    def _make(self, inplace: bool, **arguments: Any) -> nn.Module:
        if self.modules:
            return self.modules[0](**arguments)
        assert self.function is not None
        return elementwise.SegmentLUT(self.function, self.name)


def _as_float32(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function that jumps must see the value that float code sees, not one just below the whole number."""
    return function(x.float()).to(x.dtype)


def _leaky_relu(s: float, o: float, negative_slope: float) -> str:
    return f"leaky_relu {negative_slope}; mul {s / o}"


def _hardsigmoid(s: float, o: float) -> str:
    return f"mul {s / 6 / o}; add {0.5 / o}; clamp 0 {1 / o}"


def _hardswish(s: float, o: float) -> str:
    return f"mul {s}; add 3; clamp 0 6; mul q; mul {s / 6 / o}"


def _pow(s: float, o: float, exponent: float, max_value: float) -> str:
    return f"mul q; mul {s * s / o}" if exponent == 2 else ""


def _reciprocal(s: float, o: float, max_value: float) -> str:  # adding 0 makes -0 a plain 0
    return f"add 0; reciprocal; mul {1 / s / o}; clamp {-max_value / o} {max_value / o}"


def _whole(s: float, o: float, name: str) -> str:
    return f"mul {s}; {name}" + (f"; mul {1 / o}" if o != 1 else "")


def _power(input: Any, exponent: Any) -> Call:
    if isinstance(exponent, (int, float)):
        return Call(elementwise.Pow, (input,), settings={"exponent": exponent})
    if not isinstance(input, (int, float)):
        raise NotBindable("the exponent must be a number; for a tensor write `torch.exp(exponent * torch.log(x))`")
    if input <= 0:
        raise NotBindable("a base that is a number must be positive")
    return Call(_raise, (exponent,), settings={"base": float(input)})  # 2 ** x


def _raise(base: float) -> elementwise.SegmentLUT:
    return elementwise.SegmentLUT(partial(_raised, base=base), "pow")


def _raised(x: Tensor, base: float) -> Tensor:
    return torch.pow(base, x)


DECLARATIONS = (
    # Published tables: these are looked up on BERNOULLI2 too, the others only from BAYES on.
    Function("sigmoid", (nn.Sigmoid,), "expit", function=torch.sigmoid, marches=EVERYWHERE),
    Function("tanh", (nn.Tanh,), function=torch.tanh, marches=EVERYWHERE),
    Function("silu", (nn.SiLU,), function=F.silu, marches=EVERYWHERE),
    Function("gelu", (nn.GELU,), arguments="approximate='none'", function=F.gelu, marches=EVERYWHERE),
    Function("exp", (elementwise.Exp,), marches=EVERYWHERE),
    Function("acos", (elementwise.Acos,), "arccos"),
    Function("acosh", (elementwise.Acosh,), "arccosh"),
    Function("asin", (elementwise.Asin,), "arcsin"),
    Function("asinh", (elementwise.Asinh,), "arcsinh"),
    Function("atan", (elementwise.Atan,), "arctan"),
    Function("atanh", (elementwise.Atanh,), "arctanh"),
    Function("cos", (elementwise.Cos,)),
    Function("cosh", (elementwise.Cosh,)),
    Function("erf", (elementwise.Erf,)),
    Function("log", (elementwise.HardLog,), traits=Trait.LOGARITHM),
    Function("pow", (elementwise.Pow,), form=_pow, bind=_power, traits=Trait.NUMBERS),
    Function("square", (), bind=as_module(lambda: elementwise.Pow(2), "input")),
    Function("reciprocal", (elementwise.Reciprocal,), form=_reciprocal),
    Function("rsqrt", (elementwise.Rsqrt,)),
    Function("sin", (elementwise.Sin,)),
    Function("sinh", (elementwise.Sinh,)),
    Function("sqrt", (elementwise.Sqrt,)),
    Function("tan", (elementwise.Tan,)),
    Function("elu", (nn.ELU,), arguments="alpha=1.0", function=F.elu),
    Function("hardsigmoid", (nn.Hardsigmoid,), function=F.hardsigmoid, form=_hardsigmoid),
    Function("leaky_relu", (nn.LeakyReLU,), "", "negative_slope=0.01", F.leaky_relu, form=_leaky_relu),
    Function("softplus", (nn.Softplus,), arguments="beta=1.0, threshold=20.0", function=F.softplus),
    Function("selu", (nn.SELU, elementwise.Selu), function=F.selu, traits=Trait.CPU),
    # Not in the tables, but of the same make.
    Function("celu", (nn.CELU,), arguments="alpha=1.0", function=F.celu),
    Function("hardshrink", (nn.Hardshrink,), arguments="lambd=0.5", function=F.hardshrink),
    Function("hardswish", (nn.Hardswish,), function=F.hardswish, form=_hardswish),
    Function("logsigmoid", (nn.LogSigmoid,), function=F.logsigmoid),
    Function("mish", (nn.Mish,), function=F.mish),
    Function("softshrink", (nn.Softshrink,), arguments="lambd=0.5", function=F.softshrink),
    Function("softsign", (nn.Softsign,), function=F.softsign),
    Function("tanhshrink", (nn.Tanhshrink,), function=F.tanhshrink),
    Function("threshold", (nn.Threshold,), arguments="threshold, value", function=F.threshold),
    Function("logit", (elementwise.Logit,), arguments="eps=None"),
    Function("exp2", (), function=torch.exp2),
    Function("expm1", (), function=torch.expm1),
    Function("log10", (), function=finite.log10, traits=Trait.LOGARITHM),
    Function("log1p", (), function=finite.log1p),
    Function("log2", (), function=finite.log2, traits=Trait.LOGARITHM),
    Function("segment_lut", (elementwise.SegmentLUT,)),
    Function("ceil", (elementwise.Ceil,), marches=WHOLE, is_whole=True, form=partial(_whole, name="ceil")),
    Function("floor", (elementwise.Floor,), marches=WHOLE, is_whole=True, form=partial(_whole, name="floor")),
    Function("round", (elementwise.Round,), marches=WHOLE, is_whole=True, form=partial(_whole, name="round")),
    Function("sign", (elementwise.Sign,), "sgn", marches=WHOLE, is_whole=True, form=partial(_whole, name="sign")),
    Function("trunc", (elementwise.Trunc,), "fix", marches=WHOLE, is_whole=True, form=partial(_whole, name="trunc")),
)
_BY_MODULE: dict[type, Function] = {}
for _declared in DECLARATIONS:
    register(_declared.row())
    _BY_MODULE.update(dict.fromkeys(_declared.modules, _declared))
