"""The operator table: one row an operator, declared beside the operator's code.

A row knows the operator's float forms, its QAT and quantized classes, its scale rule and where it runs. Replacement
of functions, `prepare`, `convert`, checks, documents and tests are all driven by these rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from inspect import getattr_static
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn

from horizon_plugin_pytorch.asking.functions import names_in
from horizon_plugin_pytorch.function_handlers import take_advice
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.operators.arguments import arguments_by_name
from horizon_plugin_pytorch.operators.support import EVERYWHERE, GROUPS, Marches, Support, group_of
from horizon_plugin_pytorch.writing import IN_PLACE_OPERATORS


class ScaleRule(Enum):
    """Where the scale of an operator's output comes from."""

    OWN = "own observer"
    INHERIT = "same as input"
    FIXED = "fixed"
    NONE = "not quantized"


class Kind(Enum):
    """What a result is: it decides how the operators after it are treated."""

    QUANTIZED = "integers with a scale"
    BOOL = "qbool"
    INDEX = "plain integers, such as positions; operators on them are left alone"
    FLOAT = "real numbers"


class Trait(Flag):
    """What is special about an operator, for those who treat it otherwise than the rest."""

    NONE = 0
    QUANT = auto()  # a QuantStub
    DEQUANT = auto()  # a DeQuantStub
    FUNCTIONAL = auto()  # a FloatFunctional: its methods are operators
    CAST = auto()  # changes the type of numbers: `x.to(y.dtype)`, `x.float()`
    NOTHING = auto()  # a deployed model has nothing for it: whatever comes, accumulators too, passes as it is
    UNREAD = auto()  # no reader of what an operator gives: what it takes decides nothing about formats
    CPU = auto()  # the guide's heterogeneous models run it on the CPU although its tables give it to BAYES
    AVERAGE = auto()  # what it gives lies in the range of what it takes
    PRODUCT = auto()  # a product of matrices that are both data
    SAMPLER = auto()  # reads positions that a grid gives
    CHOICE = auto()  # chooses between tensors by booleans
    KEEPS_BOOLEANS = auto()  # gives booleans where its first operand is boolean
    LOGARITHM = auto()
    QUOTIENT = auto()
    FUSED = auto()  # layers are fused with it
    NUMBERS = auto()  # one of its operands may be a number; others take tensors only, such as `torch.maximum`
    MASKS = auto()  # gives booleans where all operands are
    COUNTS_BOOLEANS = auto()  # gives how many are true, where it takes booleans
    SEVERAL = auto()  # is not certain to give one tensor
    SIZED = auto()  # in torch a call may give the size of the result, and the padding follows


@dataclass(frozen=True)
class Counts:
    """Which operands of an operator may be integers that count as numbers.

    Args:
        first, end: the first of them and the one after the last.
        has_booleans: may they be booleans as well?
    """

    first: int = 0
    end: int = 2
    has_booleans: bool = False


@dataclass(frozen=True)
class Call:
    """How a function call is written as a module.

    Args:
        factory: makes the module.
        args, kwargs: what the module is called with.
        method: the method that is called instead of the module itself.
        settings: the factory's arguments; parameters of the model among them are nodes, or tensors while it runs.
        follows: settings that the module's forward takes too, so that they can change from call to call.
    """

    factory: Callable[..., nn.Module]
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    method: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    follows: tuple[str, ...] = ()

    def make(self) -> nn.Module:
        """The module."""
        return self.factory(**self.settings)


class NotBindable(ValueError):
    """A call of a supported operator that has no module form; the message says what to write instead."""


AS_IT_IS: Any = object()  # given by a binder where the call keeps its input's scale and needs no module
Binder = Callable[..., "Call | None"]


@dataclass(frozen=True)
class Operator:
    """One row.

    Args:
        name: the operator's name; generated modules are called ``_generated_<name>_<n>``.
        modules: float module classes that `qat` replaces.
        functions: torch functions, each with a binder that turns its arguments into a `Call` (`AS_IT_IS`: needs none).
        methods: tensor methods, likewise.
        qat, quantized: the operator's classes while training and after conversion; None where it runs as it is.
        scale_rule: where its output's scale comes from.
        marches: what each group of chips takes; a group that is not there does not have the operator.
        has_real_output: can its accumulator leave as float (high-precision output)?
        results: what it gives; several for an operator that gives a tuple, such as values and positions.
        real_inputs: arguments of the module's forward that may be real numbers; a constant there gets no QuantStub.
        takes: where several rows have one function, such as ``torch.max``, says which calls belong to this one.
        is_source: does it make integers with a scale from plain indices, as an embedding does?
        unless_read: keyword arguments that spare a result which nobody reads, by its position.
        signature: names of a function's arguments, where limits ask for them: ``input dim``, ``input *dims``.
        traits: what is special about it.
        counts: operands that may be plain integers.
    """

    name: str
    scale_rule: ScaleRule
    qat: type | None = None
    quantized: type | None = None
    modules: tuple[type, ...] = ()
    functions: dict[Callable, Binder] = field(default_factory=dict)
    methods: dict[str, Binder] = field(default_factory=dict)
    marches: Marches = field(default_factory=lambda: EVERYWHERE)
    has_real_output: bool = False
    results: tuple[Kind, ...] = (Kind.QUANTIZED,)
    real_inputs: tuple[str, ...] = ()
    takes: Callable[..., bool] | None = None
    is_source: bool = False
    unless_read: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    signature: str = ""
    traits: Trait = Trait.NONE
    counts: Counts | None = None

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, as far as `signature` has names for them.

        >>> Operator("permute", ScaleRule.INHERIT, signature="input *dims").named(("x", 0, 2, 1), {})
        {'input': 'x', 'dims': (0, 2, 1)}
        """
        found: dict[str, Any] = {}
        for index, name in enumerate(self.signature.split()):
            rest = tuple(args[index:])
            if rest:
                is_listed = len(rest) == 1 and isinstance(rest[0], (tuple, list))
                found[name.removeprefix("*")] = rest if name.startswith("*") and not is_listed else rest[0]
        return found | dict(kwargs)

    @property
    def needs_qconfig(self) -> bool:
        """Does it have quantization parameters of its own?"""
        return self.scale_rule in (ScaleRule.OWN, ScaleRule.FIXED)

    @property
    def is_quant(self) -> bool:
        """True for a QuantStub."""
        return Trait.QUANT in self.traits

    @property
    def is_dequant(self) -> bool:
        """True for a DeQuantStub."""
        return Trait.DEQUANT in self.traits

    @property
    def is_stub(self) -> bool:
        """True for a QuantStub or DeQuantStub."""
        return self.is_quant or self.is_dequant

    @property
    def is_functional(self) -> bool:
        """True for a FloatFunctional."""
        return Trait.FUNCTIONAL in self.traits

    @property
    def is_cast(self) -> bool:
        """True for what changes the type of numbers."""
        return Trait.CAST in self.traits

    @property
    def does_nothing(self) -> bool:
        """True if a deployed model has nothing for it: whatever comes, accumulators too, passes as it is."""
        return Trait.NOTHING in self.traits

    @property
    def is_real(self) -> bool:
        """Is it pre- or post-processing, which computes in real numbers and has no quantized form?"""
        return self.qat is None and self.results == (Kind.FLOAT,)

    def support(self, march: March) -> Support | None:
        """What a chip takes; None if it does not have the operator."""
        return self.marches.get(group_of(march))

    @property
    def march_names(self) -> list[str]:
        """All chips that have the operator."""
        return [str(member) for group in self.marches for member in GROUPS[group]]


_ROWS: dict[str, Operator] = {}
_BY_MODULE: dict[type, Operator] = {}
_BY_FUNCTION: dict[Callable, list[tuple[Operator, Binder]]] = {}
_BY_METHOD: dict[str, list[tuple[Operator, Binder]]] = {}
_ADVICE: dict[Any, str] = {}


def register(row: Operator) -> Operator:
    """Add a row to the table."""
    if row.name in _ROWS:
        raise ValueError(f"operator {row.name!r} is registered twice")
    _ROWS[row.name] = row
    for cls in row.modules:
        _BY_MODULE[cls] = row
    for function, binder in row.functions.items():
        _BY_FUNCTION.setdefault(function, []).append((row, binder))
    for method, binder in row.methods.items():
        _BY_METHOD.setdefault(method, []).append((row, binder))
    return row


def rows() -> Iterator[Operator]:
    """All rows, in order of registration."""
    return iter(_ROWS.values())


def row_named(name: str) -> Operator | None:
    """The row of that name."""
    return _ROWS.get(name)


def row_of_module(cls: Any) -> Operator | None:
    """The row whose float form a module class is.

    Subclasses count only if they do not change `forward`, nor a method that it calls, such as `_conv_forward`.
    """
    for base in cls.__mro__:
        row = _BY_MODULE.get(base)
        if row is None and base.__name__ in _TORCH_NAMES:  # few are: it is asked at each call of a watched module
            row = _row_of_torch_class(base)
        if row is not None:
            return row if cls is base or _computes_alike(cls, base) else None
    return None


@functools.lru_cache(maxsize=1024)
def _computes_alike(cls: type, base: type) -> bool:
    """Are the forward of a class, and the methods that it names, those of another class?"""
    if cls.forward is not base.forward:  # type: ignore[attr-defined]
        return False
    names = names_in(base.forward) if isinstance(base.forward, FunctionType) else set()  # type: ignore[attr-defined]
    for name in names:
        mine = getattr_static(cls, name, None)
        is_code = isinstance(mine, (FunctionType, property, staticmethod, classmethod))
        if is_code and not name.startswith("_check") and mine is not getattr_static(base, name, None):
            return False
    return True


_TORCH_NAMES = {"QuantStub": "quant", "DeQuantStub": "dequant", "FloatFunctional": "functional"}


def _row_of_torch_class(cls: type) -> Operator | None:
    """torch's own stubs, by name: `torch.ao` is leaving torch and is never imported here."""
    return _ROWS[_TORCH_NAMES[cls.__name__]] if cls.__module__.startswith("torch.ao.") else None


def row_of_function(
    function: Callable, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> tuple[Operator, Binder] | None:
    """The row and binder of a torch function; of this call of it, if its arguments are given."""
    try:
        found = _BY_FUNCTION.get(function) or _BY_FUNCTION.get(IN_PLACE_OPERATORS.get(function, function), [])
    except TypeError:  # unhashable
        return None
    return _row_of_call(found, args, kwargs)


def row_of_method(
    name: str, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> tuple[Operator, Binder] | None:
    """The row and binder of a tensor method; of this call of it, if its arguments are given."""
    return _row_of_call(_BY_METHOD.get(name, []), args, kwargs)


def _row_of_call(
    found: list[tuple[Operator, Binder]], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[Operator, Binder] | None:
    if args is None:
        return found[0] if found else None
    return next((pair for pair in found if pair[0].takes is None or pair[0].takes(*args, **(kwargs or {}))), None)


def is_pair(*args: Any, **kwargs: Any) -> bool:
    """Is it a call with two tensors, such as ``torch.max(x, y)`` rather than ``torch.max(x, 1)``?"""
    second = args[1] if len(args) > 1 else kwargs.get("other")
    return second is not None and not isinstance(second, int)


def advise(text: str, *targets: Any) -> None:
    """Say what to write instead of functions, and methods given by name, that have no quantized form."""
    _ADVICE.update(dict.fromkeys(targets, text))


def advice_for(target: Any) -> str:
    """What to write instead of a function or method without a row; empty if nothing better is known."""
    try:
        return _ADVICE.get(target) or _ADVICE.get(IN_PLACE_OPERATORS.get(target, target), "")
    except TypeError:  # unhashable
        return ""


NO_FORM = (
    "move it after the DeQuantStub, replace it by a supported operator, or put a DeQuantStub before and a QuantStub "
    "after it"
)


def _advice_for_call(func: Callable) -> str:
    """What to write instead of a function that a QTensor was given to; empty if it has a quantized form."""
    name = getattr(func, "__name__", "")
    spellings: tuple[Any, ...] = (
        (func, name, getattr(operator, name, None)) if getattr(Tensor, name, None) is func else (func,)
    )
    if any(row_of_function(spelling) or row_of_method(spelling) for spelling in spellings):
        return ""
    return next((text for spelling in spellings if (text := advice_for(spelling))), NO_FORM)


take_advice(_advice_for_call)


def as_module(
    factory: Callable[..., nn.Module], signature: str, at_run_time: tuple[str, ...] = (), remedy: str = ""
) -> Binder:
    """A binder for functions whose first argument is the tensor and whose others configure the module.

    Args:
        factory: called with the other arguments as keywords.
        signature: the function's arguments, as in ``input, dim=None``.
        at_run_time: arguments that the module's forward takes as well; one that depends on a tensor's shape, such as
            ``size=skip.shape[2:]``, is given there.
        remedy: what to write instead of others that do.
    """
    by_name = arguments_by_name(signature)

    def bind(*args: Any, **kwargs: Any) -> Call:
        values = by_name(*args, **kwargs)
        tensor = values.pop(next(iter(values)))
        later = {name: value for name, value in values.items() if depends_on_graph(value)}
        fixed = [name for name in later if name not in at_run_time]
        if fixed:
            what = f"{', '.join(fixed)} must be numbers, not computed from a tensor's shape or value"
            raise NotBindable(f"{what}: {remedy}" if remedy else what)
        return Call(factory, (tensor,), later, settings=values | dict.fromkeys(later), follows=at_run_time)

    return bind


def depends_on_graph(value: Any) -> bool:
    """Is an argument, or a part of it, computed in the graph?"""
    found: list[fx.Node] = []
    fx.node.map_arg(value, lambda node: found.append(node) or node)  # type: ignore[func-returns-value]
    return bool(found)
