"""Code that asks ``type(x) is Tensor``, or ``callable(x)``: answered while tracing, told where it runs again.

A class cannot say what ``type(x)`` gives, so nobody can answer for a quantized tensor as in float. For traced values
the names `type` and `callable` stand for something else meanwhile, in the modules whose code the forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getattr_static, unwrap
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.asking.functions import attribute_writes, compared_classes, is_user_function, names_in
from horizon_plugin_pytorch.asking.owners import is_user_code
from horizon_plugin_pytorch.capture.leaves import is_marked
from horizon_plugin_pytorch.capture.proxies import TracedProxy
from horizon_plugin_pytorch.errors import QuantizationWarning, listed, warn

_CODE = (FunctionType, MethodType, staticmethod, classmethod)


class _Asking(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and issubclass(type(args[0]), TracedProxy):
            return args[0].told_class()
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is type

    def __hash__(cls) -> int:
        return hash(type)


class _Type(type, metaclass=_Asking):
    """In the place of `type`: of a traced value it gives the class that this stands for."""


def _callable(value: Any) -> bool:
    return value.is_callable if issubclass(type(value), TracedProxy) else callable(value)


@contextmanager
def answered_types(model: nn.Module) -> Iterator[None]:
    """In here ``type(x)`` and ``callable(x)`` answer for traced values as for what these stand for."""
    replaced: list[tuple[dict[str, Any], str]] = []
    for function, _ in _functions(model, has_own_forward=False):
        used, names = names_in(function), function.__globals__
        for name, answer in (("type", _Type), ("callable", _callable)):
            if name in used and name not in names:
                names[name] = answer
                replaced.append((names, name))
    try:
        yield
    finally:
        for names, name in replaced:
            names.pop(name, None)


def tell_type_tests(model: nn.Module, has_own_forward: bool) -> None:
    """Name the lines of code which runs again that compare the very class of a tensor or a layer.

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
            is_layer = issubclass(cls, nn.Module) and is_type  # `layer.__class__` is answered
            if runs_again and (is_layer or issubclass(cls, Tensor)):
                lines[line] = None
    if lines:
        warn(
            f"`{type(model).__name__}`: its forward compares the very class of a tensor or layer ({listed(lines)}). "
            "Quantized tensors and quantized layers have others: where it meets these, the comparison fails and the "
            "other branch runs. Write `isinstance(x, torch.Tensor)`, which answers as in "
            "float.",
            QuantizationWarning,
        )


def tell_given_memory(model: nn.Module) -> None:
    """Name the lines of a forward that give a tensor other memory, where nobody sees whether that is quantized."""
    functions = (function for function, _ in _functions(model, has_own_forward=True))
    lines = dict.fromkeys(line for function in functions for line in attribute_writes(function, "data"))
    if lines:
        warn(
            f"`{type(model).__name__}`: its forward writes `x.data = y` ({listed(lines)}), and torch does not report "
            "it. Where `y` is quantized, `x` gets its memory, integers in a converted model, and not its scale. Go on "
            "with the new tensor, as in `x = y`, or write `x.data = y.dequantize()`.",
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
            names = names_in(here)
            modules = [vars(value) for name in names if _is_module_of_users(value := here.__globals__.get(name))]
            for name in names:
                of_class, of_owner = getattr_static(type(owner), name, None), vars(owner).get(name)
                for value in (of_class, of_owner, here.__globals__.get(name), *(m.get(name) for m in modules)):
                    pending += [(value, runs_again)] if isinstance(value, _CODE) else []


def _is_module_of_users(value: Any) -> bool:
    return isinstance(value, ModuleType) and is_user_code(getattr(value, "__file__", None) or "<builtin>")
