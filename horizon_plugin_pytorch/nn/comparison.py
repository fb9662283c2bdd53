"""Comparisons, booleans, and what is chosen by them: no module, a `QTensor` runs them as they are written.

A comparison gives a `QTensor` of the format `qbool`, whose payload is a bool tensor while training and after
conversion. As a number, a boolean is 0 or 1 of the scale 1.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.fixed_point.comparison import RELATIONS
from horizon_plugin_pytorch.function_handlers import described, handle, unsupported
from horizon_plugin_pytorch.operators.support import INT8, INTS, Limit, Marches, Support, on
from horizon_plugin_pytorch.operators.table import Call, Kind, Operator, ScaleRule, Trait, register
from horizon_plugin_pytorch.qtensor import QTensor, bool_qtensor
from horizon_plugin_pytorch.untraced import as_number, untraced

_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def compare(relation: str, a: Any, b: Any) -> QTensor:
    """Compare two tensors with scales, or one with a number or an ordinary tensor.

    >>> x = QTensor(torch.tensor([1, 2, 3], dtype=torch.int8), 0.1, "qint8")
    >>> compare("gt", x, 0.25).int_repr()
    tensor([False, False,  True])
    """
    if not isinstance(a, QTensor):
        return compare(_MIRRORED[relation], b, a)
    a = a.as_numbers()
    b = b.as_numbers() if isinstance(b, QTensor) else b
    if not a.is_rounded or (isinstance(b, QTensor) and not b.is_rounded):  # while calibrating there is no grid
        return _mask(RELATIONS[relation](a.as_real(), b.as_real() if isinstance(b, QTensor) else b), a)
    if isinstance(b, QTensor):
        is_narrow = max(a.dtype.bits, b.dtype.bits) <= 8
        factors = fp.choose_comparison(as_number(a.scale), as_number(b.scale), is_narrow)
        return _mask(fp.compare(a.as_grid(), b.as_grid(), *factors, is_narrow, relation), a)
    numbers = b if isinstance(b, Tensor) else untraced(torch.tensor)(float(b), device=a.device)
    steps = fp.on_grid_between(numbers, a.scale.reshape(()), a.dtype.min, a.dtype.max)
    return _mask(RELATIONS[relation](a.as_grid(), steps), a)


def _mask(values: Tensor, *operands: Any) -> QTensor:
    """Booleans that were computed of these operands."""
    return bool_qtensor(values, is_integer=any(isinstance(x, QTensor) and x.is_integer for x in operands))


def truth(x: Any) -> Any:
    """The booleans of a tensor, or one boolean, as an ordinary tensor: what is not 0 is true."""
    if isinstance(x, QTensor):
        if x.dtype == qbool:
            return x.plain()
        return (x.as_grid() if x.is_rounded else x.as_real()) != 0
    if isinstance(x, bool):
        return torch.tensor(x)
    return x != 0 if isinstance(x, Tensor) and x.dtype != torch.bool else x


def _is_boolean(x: Any) -> bool:
    return isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype in (torch.bool, qbool))


def _operands(args: tuple, kwargs: dict) -> tuple[Any, Any]:
    call = dict(zip(("input", "other"), args, strict=False)) | kwargs
    return call["input"], call["other"]


def _as_it_is(*args: Any, **kwargs: Any) -> Call | None:
    """Nothing to replace."""
    return None


def _spellings(names: list[str]) -> list[Callable]:
    """torch's functions and methods of these names."""
    return [getattr(owner, n) for n in names for owner in (torch, Tensor) if hasattr(owner, n)]


def _register(
    row: str,
    names: list[str],
    python: tuple[Callable, ...],
    marches: Marches,
    handler: Callable[..., Any],
    traits: Trait = Trait.NONE,
) -> None:
    """A row, and what a QTensor does for its spellings."""
    handle(*_spellings(names))(handler)
    functions = [*(getattr(torch, n) for n in names if not n.startswith("__") and hasattr(torch, n)), *python]
    methods = [n for n in names if hasattr(Tensor, n)]
    register(Operator(
        row, ScaleRule.NONE, functions=dict.fromkeys(functions, _as_it_is), methods=dict.fromkeys(methods, _as_it_is),
        marches=marches, results=(Kind.BOOL,), traits=traits,
    ))  # fmt: skip


_ALIASES = {"ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
for _relation in RELATIONS:

    def _compare(func: Callable, args: tuple, kwargs: dict, relation: str = _relation) -> QTensor:
        return compare(relation, *_operands(args, kwargs))

    _names = [_relation, f"__{_relation}__", *([_ALIASES[_relation]] if _relation in _ALIASES else [])]
    _marches = on(bayes=Support(outputs=("qbool",)))
    _register(_relation, _names, (getattr(operator, _relation),), _marches, _compare, Trait.NUMBERS)


def _logical(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    operands = (*args, *kwargs.values())
    return _mask(getattr(torch, func.__name__.removesuffix("_"))(*map(truth, operands)), *operands)


def _bitwise(function: Callable[..., Tensor]) -> Callable[..., QTensor]:
    """The same on booleans; bits of scaled integers have no meaning."""

    def handler(func: Callable, args: tuple, kwargs: dict) -> QTensor:
        operands = (*args, *kwargs.values())
        if not all(_is_boolean(x) for x in operands):
            formats = ", ".join(str(getattr(x, "dtype", type(x).__name__)) for x in operands)
            raise NotImplementedError(
                f"{described(func)} works on booleans, got {formats}: the bits of integers with a scale mean nothing. "
                "Compare first, as in `(x > 0) & (y > 0)`."
            )
        return _mask(function(*map(truth, operands)), *operands)

    return handler


def _as_numbers_or_masks(function: Callable[..., Tensor]) -> Callable[..., QTensor]:
    """A product or sum of two masks is a mask, as in torch; one of numbers has a scale of its own."""

    def handler(func: Callable, args: tuple, kwargs: dict) -> QTensor:
        operands = (*args, *kwargs.values())
        if not all(_is_boolean(x) for x in operands):
            raise unsupported(func)
        return _mask(function(*map(truth, operands)), *operands)

    return handler


def _count(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """How many are true, as ordinary integers; a sum of numbers has a scale of its own."""
    x = args[0] if args else kwargs["input"]
    if not _is_boolean(x):
        raise unsupported(func)
    return func(truth(x).long(), *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})


def _reduce(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    x = args[0] if args else kwargs.pop("input")
    return _mask(func(truth(x), *args[1:], **kwargs), x)


_BOOLEAN = Support(("qbool", *INTS), ("qbool",))
_ROWS: tuple[tuple[str, list[str], tuple[Callable, ...], Callable], ...] = (
    ("logical_and", ["bitwise_and", "bitwise_and_", "__and__", "__rand__", "__iand__"], (operator.and_,),
     _bitwise(torch.logical_and)),
    ("logical_or", ["bitwise_or", "bitwise_or_", "__or__", "__ror__", "__ior__"], (operator.or_,),
     _bitwise(torch.logical_or)),
    ("logical_xor", ["bitwise_xor", "bitwise_xor_", "__xor__", "__rxor__", "__ixor__"], (operator.xor,),
     _bitwise(torch.logical_xor)),
    ("logical_not", ["bitwise_not", "bitwise_not_", "__invert__"], (operator.invert, operator.inv),
     _bitwise(torch.logical_not)),
)  # fmt: skip
for _name, _names, _python, _handler in _ROWS:
    _register(_name, [*_names, _name, f"{_name}_"], _python, on(bayes=_BOOLEAN), _handler)
    handle(getattr(torch, _name), getattr(Tensor, _name), getattr(Tensor, f"{_name}_"))(_logical)
for _name, _combined in (("mul", torch.logical_and), ("add", torch.logical_or)):
    _names = [_name, f"{_name}_", f"__{_name}__", f"__r{_name}__", f"__i{_name}__"]
    handle(*_spellings(_names))(_as_numbers_or_masks(_combined))
handle(torch.sum, Tensor.sum)(_count)
_REDUCED = Limit(  # published for the NASH chips
    "65535 elements a result",
    lambda use: math.prod(use.inputs[0].shape) <= 65535 * max(math.prod(use.outputs[0].shape), 1),
    advice="reduce one axis after the other",
)
_REDUCTIONS = on(bayes=_BOOLEAN, nash=Support(("qbool",), ("qbool",)), nash_h=replace(_BOOLEAN, limits=(_REDUCED,)))
for _name in ("any", "all"):
    _register(_name, [_name], (), _REDUCTIONS, _reduce)


@handle(torch.where, Tensor.where)
def _where(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A choice between ordinary tensors or numbers, such as positions; one between quantized tensors has a scale."""
    is_method = func is Tensor.where
    call = dict(zip(("input", "condition", "other") if is_method else ("condition", "input", "other"), args,
                    strict=False)) | kwargs  # fmt: skip
    if any(isinstance(call.get(name), QTensor) for name in ("input", "other")) or "other" not in call:
        raise NotImplementedError(
            f"{described(func)} between quantized tensors needs a scale of its own: in eager mode call the module "
            "`horizon_plugin_pytorch.nn.Where()`, or put a DeQuantStub before it; `prepare_qat_fx` replaces it by "
            "itself."
        )
    return torch.where(truth(call["condition"]), call["input"], call["other"])


def _finiteness(answer: bool) -> Callable[..., Tensor]:
    """Integers with a scale are finite, whatever they are: an ordinary tensor, and a constant of the model."""

    def handler(func: Callable, args: tuple, kwargs: dict) -> Tensor:
        x = args[0] if args else kwargs["input"]
        return torch.full(x.shape, int(answer), dtype=torch.bool, device=x.device)  # torch.jit takes no boolean

    return handler


def _to_bool(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    return _mask(truth(args[0]), args[0])


for _row, _names, _is_so in (
    ("is_finite", ["isfinite"], True),
    ("is_not_finite", ["isnan", "isinf", "isposinf", "isneginf"], False),
):
    handle(*_spellings(_names))(_finiteness(_is_so))
    register(Operator(
        _row, ScaleRule.NONE, functions={getattr(torch, n): _as_it_is for n in _names},
        methods=dict.fromkeys(_names, _as_it_is), results=(Kind.INDEX,),
    ))  # fmt: skip
handle(Tensor.bool)(_to_bool)
register(Operator(
    "to_bool", ScaleRule.NONE, methods={"bool": _as_it_is}, results=(Kind.BOOL,), marches=on(bayes=_BOOLEAN),
))  # fmt: skip
register(Operator(
    "to_numbers", ScaleRule.NONE, methods={"float": _as_it_is}, marches=on(bayes=Support(("qbool",), INT8)),
    traits=Trait.CAST | Trait.SEVERAL,
))  # fmt: skip
register(Operator(
    "to_integers", ScaleRule.NONE, methods={"long": _as_it_is, "int": _as_it_is}, results=(Kind.INDEX,),
    marches=on(bayes=Support(("qbool",), ("int32", "int64"))),
))  # fmt: skip
