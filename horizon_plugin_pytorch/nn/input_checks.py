"""Inputs of the package's own functions: what they take, said before torch says something else or nothing."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from torch import Tensor

from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.function_handlers import calling_line


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(map(int, value.shape))} ({value.dtype})"
    return str(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def refused_input(what: str, expected: str, remedy: str = "", **given: Any) -> OperatorInputError:
    """The error of a function that cannot compute with what it got; a module that runs it adds its place.

    Args:
        what: the function.
        expected: what it takes.
        remedy: what to do, as a sentence.
        given: what it got, by the names of its arguments.

    >>> import torch
    >>> print(refused_input("rle", "maps [N, ...]", "Stack them.", input=torch.zeros(3), size=2).complaint)
    takes maps [N, ...], got input [3] (torch.float32), size 2. Stack them.
    """
    got = ", ".join(f"{name} {_shown(value)}" for name, value in given.items())
    complaint = f"takes {expected}, got {got}.{remedy and ' '}{remedy}"
    error = OperatorInputError(f"`{what}`{calling_line()} {complaint}")
    error.complaint = complaint
    return error


def differ(one: Any, other: Any) -> bool:
    """Are two sizes known not to be equal? While torch traces, sizes are no plain numbers, and nothing is known.

    >>> differ(2, 3), differ(3, 3)
    (True, False)
    """
    return type(one) is int and type(other) is int and one != other


def is_count(value: Any, least: int = 0) -> bool:
    """Is it a whole number, and not below a limit?

    >>> is_count(3), is_count(-1), is_count(True), is_count(2.0)
    (True, False, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
