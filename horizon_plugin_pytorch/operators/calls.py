"""A call of a torch function as a graph writes it, and its row in the operator table."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.operators.arguments import operands_by_position
from horizon_plugin_pytorch.operators.table import Binder, Operator, row_named, row_of_function, row_of_method
from horizon_plugin_pytorch.plain_values import plain_arguments

# Python's operators with the tensor on the right.
_REVERSED: dict[str, Callable] = {
    "__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rtruediv__": operator.truediv, "__rpow__": operator.pow,
    "__radd__": operator.add, "__rmul__": operator.mul, "__rmatmul__": operator.matmul,
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _form(function: Callable) -> tuple[str, Any, str]:
    """``call_function`` or ``call_method``, the target, and a note on the arguments."""
    name = getattr(function, "__name__", "")
    owner = getattr(function, "__self__", None)
    if name == "__get__" and owner is not None:  # x.T
        return "call_function", getattr, owner.__name__
    if name in _REVERSED:
        return "call_function", _REVERSED[name], "reversed"
    if name.startswith("__") and hasattr(operator, name):  # x[...], x == y, ~x
        return "call_function", getattr(operator, name), ""
    is_function = any(getattr(owner, name, None) is function for owner in (torch, F))
    if hasattr(Tensor, name) and not is_function:
        return "call_method", name, ""
    return "call_function", function, ""


def as_call(function: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[str, Any, tuple, dict[str, Any]]:
    """How a graph writes a call that torch reports: ``call_function`` or ``call_method``, target and arguments."""
    op, target, note = _form(function)
    args, kwargs = plain_arguments(args, kwargs, is_index=target in (operator.getitem, operator.setitem))
    args, kwargs = operands_by_position(target, args, kwargs)
    if target is getattr:
        return op, target, (args[0], note), {}
    if note:
        return op, target, (args[1], args[0]), kwargs
    if op == "call_method" and row_of_function(function) is not None:
        return "call_function", function, args, kwargs
    return op, target, args, kwargs


def row_of_call(op: str, target: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Operator, Binder] | None:
    """The row and binder of a call in a graph."""
    find = row_of_function if op == "call_function" else row_of_method
    return find(target, args, kwargs)


def row_of_reported(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Operator | None:
    """The row of a call that torch reports; arguments are looked at only where they decide."""
    op, target, _ = _form(function)
    found = row_of_function(function) if op == "call_method" else row_of_function(target)
    if found is None and op == "call_method":
        found = row_of_method(target)
    if found is not None and found[0].takes is not None:
        found = row_of_call(*as_call(function, args, kwargs))
    return None if found is None else found[0]


def is_cast(name: str) -> bool:
    """True if an operator of that name changes the type of numbers."""
    row = row_named(name)
    return row is not None and row.is_cast


def operator_name(op: str, target: Any, args: tuple, kwargs: dict[str, Any]) -> str:
    """The row's name, or the function's where it has none."""
    found = row_of_call(op, target, args, kwargs)
    return found[0].name if found is not None else getattr(target, "__name__", str(target))
