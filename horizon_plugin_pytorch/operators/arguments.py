"""Arguments by keyword: each may be called by the name that the float module's forward documents."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch


def arguments_by_name(signature: str) -> Callable[..., dict[str, Any]]:
    """A function that gives its arguments by name, with defaults.

    Args:
        signature: a literal of this package, as in ``input, dim=None``.

    >>> arguments_by_name("input, dim=None, *, keepdim=False")(1, dim=2)
    {'input': 1, 'dim': 2, 'keepdim': False}
    """
    parsed = inspect.signature(eval(f"lambda {signature}: None"))

    def read(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = parsed.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    return read


@functools.lru_cache(maxsize=1024)
def required_names(function: Callable) -> tuple[str, ...]:
    """The arguments of a method that have no default, in order; `self` is not among them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except ValueError:  # a function of C
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty)


def by_position(function: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The same call with what the method requires given by position; optional arguments keep their names.

    >>> import torch
    >>> by_position(torch.nn.Linear.forward, (), {"input": 1})
    ((1,), {})
    >>> by_position(torch.nn.MultiheadAttention.forward, (1,), {"value": 3, "key": 2, "need_weights": False})
    ((1, 2, 3), {'need_weights': False})
    """
    if not kwargs:
        return args, kwargs
    kwargs = dict(kwargs)
    for name in required_names(function)[len(args) :]:
        if name not in kwargs:
            break
        args = (*args, kwargs.pop(name))
    return args, kwargs


def operands_by_position(function: Callable | str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The call of a torch function, or of a tensor method by its name, with its operands given by position.

    >>> import torch
    >>> operands_by_position(torch.add, (), {"other": 2, "input": 1, "alpha": 3})
    ((1, 2), {'alpha': 3})
    >>> operands_by_position("mul", (1,), {"other": 2})
    ((1, 2), {})
    """
    if not kwargs:
        return args, kwargs
    kwargs = dict(kwargs)
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    for operand in _operand_names(name, frozenset(kwargs))[len(args) :]:
        if operand not in kwargs:
            break
        args = (*args, kwargs.pop(operand))
    return args, kwargs


@functools.lru_cache(maxsize=1024)
def _operand_names(name: str, given: frozenset[str]) -> tuple[str, ...]:
    """The tensors and numbers, in order, that an operator of torch with these keyword arguments requires."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    for overload in () if packet is None else packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        names = ["input" if a.name == "self" else a.name for a in arguments]
        if not given <= {*names, "inplace"} or "out" in names:
            continue
        required = itertools.takewhile(
            lambda pair: str(pair[1].type) in _OPERANDS and not (pair[1].kwarg_only or pair[1].has_default_value()),
            zip(names, arguments, strict=True),
        )
        return tuple(operand for operand, _ in required)
    return ()


_OPERANDS = ("Tensor", "number", "List[Tensor]")
