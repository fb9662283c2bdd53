"""Lines that ask ``type(x) is Tensor``: the one question that nobody can answer for a quantized tensor as in float."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getattr_static, unwrap
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.asking.functions import compared_classes, is_user_function, names_in
from horizon_plugin_pytorch.capture.leaves import is_marked
from horizon_plugin_pytorch.errors import QuantizationWarning, listed, warn

_CODE = (FunctionType, MethodType, staticmethod, classmethod)


def tell_type_tests(model: nn.Module, has_own_forward: bool) -> None:
    """Name the lines of the forward that compare the very class of a tensor or, where it runs again, of a layer.

    Args:
        model: in float.
        has_own_forward: does the prepared model run the forward of the float model? Else only wrapped code runs again.
    """
    lines: dict[str, None] = {}
    for function, runs_again in _functions(model, has_own_forward):
        for line, cls, is_type in compared_classes(function):
            if isinstance(cls, str):  # `type(x).__name__ == "Tensor"`
                cls = getattr(torch, cls, None) or getattr(nn, cls, None)
            if not isinstance(cls, type):
                continue
            is_layer = issubclass(cls, nn.Module) and is_type and runs_again  # `layer.__class__` is answered
            if is_layer or (issubclass(cls, Tensor) and (is_type or runs_again)):
                lines[line] = None
    if lines:
        warn(
            f"`{type(model).__name__}`: its forward compares the very class of a tensor or layer ({listed(lines)}). "
            "Quantized tensors, values while tracing and quantized layers have others: where it meets these, the "
            "comparison fails and the other branch runs. Write `isinstance(x, torch.Tensor)`, which answers as in "
            "float.",
            QuantizationWarning,
        )


def _functions(model: nn.Module, has_own_forward: bool) -> Iterator[tuple[FunctionType, bool]]:
    """The forwards of the user's modules and the functions that they name; and whether each runs again."""
    seen: set[tuple[Any, bool]] = set()
    for owner in {type(module): module for module in model.modules()}.values():
        pending: list[tuple[Any, bool]] = [
            (getattr_static(type(owner), "forward", None), has_own_forward or is_marked(owner))
        ]
        while pending:
            found, runs_again = pending.pop()
            if not isinstance(found, _CODE):  # a global may be a traced value, and answers to every name
                continue
            runs_again = runs_again or getattr(found, "__horizon_leaf__", False)
            here = unwrap(found if isinstance(found, FunctionType) else found.__func__)
            if not isinstance(here, FunctionType) or (here, runs_again) in seen or not is_user_function(here):
                continue
            seen.add((here, runs_again))
            yield here, runs_again
            for name in names_in(here):
                of_class, of_owner = getattr_static(type(owner), name, None), vars(owner).get(name)
                for value in (of_class, of_owner, here.__globals__.get(name)):
                    pending += [(value, runs_again)] if isinstance(value, _CODE) else []
