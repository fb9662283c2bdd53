"""Writes into lists and dictionaries that are inputs of a traced model and of which nothing is known."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

CONTAINER_REMEDY = (
    "writes a quantized tensor into a list or dictionary that is an input, and symbolic trace does not know what is in "
    "it. Prepare with example_inputs, or with `PrepareMethod.JIT_STRIP`, whose model runs its own forward."
)
# They give nothing back, so that nobody reads the call.
_ONLY_WRITE = frozenset({"append", "extend", "insert", "update", "clear", "remove"})
_WRITE_AND_GIVE = frozenset({"pop", "popitem", "setdefault"})


def writes_container(method: str) -> bool:
    """Is it a method that writes into a list or dictionary, and that tensors do not have?

    >>> writes_container("pop"), writes_container("update"), writes_container("clamp_")
    (True, True, False)
    """
    return method in _WRITE_AND_GIVE or only_writes(method)


def only_writes(method: str) -> bool:
    """Does such a method give nothing back?"""
    return method in _ONLY_WRITE


def is_of_container(node: fx.Node) -> bool:
    """Is it a call on a list or dictionary, for all that its name says?"""
    if node.op == "call_method":
        return writes_container(str(node.target)) and not hasattr(Tensor, str(node.target))
    return node.target is operator.setitem and _has_name(node.args[1])


def _has_name(index: Any) -> bool:
    return isinstance(index, str)
