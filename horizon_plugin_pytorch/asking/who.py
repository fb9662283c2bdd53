"""Who asks: the model's own code, a tool, torch or this package."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ContextDecorator
from types import CodeType, FrameType
from typing import Any

from horizon_plugin_pytorch.asking.owners import (
    MODULE_FILE,
    PACKAGE,
    TORCH,
    USER,
    is_package_code,
    is_torch_code,
    owner_of,
)

OWN_HOOKS = "_own_hooks"  # attribute of a module: the numbers of hooks that belong to the model, not to a tool

_CALLING = frozenset({"_call_impl", "inner", "_slow_forward"})  # functions of torch that call forwards and hooks


class _Thread(threading.local):
    def __init__(self) -> None:
        self.tools: list[FrameType | None] = []  # for each tool, the call of a module in which it began to ask


_THREAD = _Thread()


class as_tool(ContextDecorator):  # noqa: N801  # read as a verb, like torch.no_grad
    """In here, the code that asks is a tool, and learns what a prepared model really holds.

    While a prepared model runs, its own code is told what it was told in float: ``x.dtype`` is ``torch.float32``,
    ``isinstance(self.conv, nn.Conv2d)``, ``self.conv.weight`` holds real numbers. A tool that looks at the model
    during the run, from a forward hook that the float model had already or from a `TorchFunctionMode`, wants the truth.
    Hooks that are registered after `prepare` need not say so: they are tools anyway.

    It counts for this thread. If the tool calls a module in here, then the forward of that module is told what it
    was told in float. Use it as a context, or as a decorator of the tool's function.

    >>> with as_tool():
    ...     pass
    >>> @as_tool()
    ... def hook(module, args, out):
    ...     print(out.dtype)
    """

    def __enter__(self) -> as_tool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # `_is_module_call`, written out: each call of a watched run comes here
            code = frame.f_code
            if code.co_name in _CALLING and code.co_filename == MODULE_FILE:
                break
            frame = frame.f_back
        _THREAD.tools.append(frame)
        return self

    def __exit__(self, *error: object) -> None:
        _THREAD.tools.pop()

    def _recreate_cm(self) -> as_tool:
        return as_tool()


as_tool.__module__ = "horizon_plugin_pytorch.asking"  # where users find it


def package_asks(depth: int = 1) -> bool:
    """True if code of this package called the function which calls this one.

    Args:
        depth: how many calls are between this function and the code in question.
    """
    return owner_of(sys._getframe(depth + 1).f_code.co_filename) == PACKAGE


def user_asks(depth: int = 1) -> bool:
    """True if code of the user, a tool or the model, called the function which calls this one.

    Args:
        depth: how many calls are between this function and the code in question.
    """
    return owner_of(sys._getframe(depth + 1).f_code.co_filename) == USER


def model_asks(depth: int = 1, has_call: bool = False) -> bool:
    """True if the code in question is the model's rather than a tool's.

    The model's are the forward of a module, the functions that it calls, and the hooks that the float model had.
    Other hooks are tools, and so is code inside `as_tool`.

    Args:
        depth: how many calls are between this function and the code in question.
        has_call: what is not called by a module at all is no model's code.
    """
    call, outermost = _module_call(sys._getframe(depth + 1))
    if _THREAD.tools and any(call is known for known in _THREAD.tools):
        return False
    if call is None:
        return not has_call
    if outermost is None or owner_of(outermost.f_code.co_filename) != USER:
        return True  # of torch, or of this package: they call the user's code for the model
    module = call.f_locals.get("self")
    own = itertools.chain([getattr(module, "forward", None)], _own_hooks(module))
    return _is_code_of(outermost, own)


def _is_module_call(code: CodeType) -> bool:
    return code.co_name in _CALLING and code.co_filename == MODULE_FILE


def _module_call(frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
    """The innermost call of a module around a frame, and the outermost frame in it that is not torch's."""
    outermost = None
    while frame is not None:
        code = frame.f_code
        if _is_module_call(code):
            return frame, outermost
        if owner_of(code.co_filename) != TORCH:
            outermost = frame
        frame = frame.f_back
    return None, outermost


def hooked_module() -> tuple[Any, bool]:
    """The module whose hook runs the code that asks, and whether the model owns that hook; None if no hook runs it.

    A hook that was registered after `prepare` is a tool's.
    """
    call, outermost = _module_call(sys._getframe(1))
    if call is None or outermost is None:
        return None, False
    module: Any = call.f_locals.get("self")
    hooks = itertools.chain(module._forward_pre_hooks.values(), module._forward_hooks.values())
    if not _is_code_of(outermost, hooks):
        return None, False
    return module, _is_code_of(outermost, _own_hooks(module))


def _is_code_of(frame: FrameType, functions: Iterable[Any]) -> bool:
    return any(frame.f_code is code for function in functions for code in _codes(function))


def _own_hooks(module: Any) -> Iterator[Any]:
    numbers = getattr(module, "__dict__", {}).get(OWN_HOOKS, ())
    for kind in ("_forward_pre_hooks", "_forward_hooks") if numbers else ():
        yield from (hook for number, hook in getattr(module, kind).items() if number in numbers)


def _codes(function: Any) -> list[CodeType]:
    """The code of a function, of a method or of an object that is called; with what its decorators wrap."""
    found = []
    while function is not None:
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        called = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
        found += [called.__code__] if hasattr(called, "__code__") else []
        function = getattr(function, "__wrapped__", None)
    return found


# Methods by which children and parameters of a module are listed; others, such as `train`, mean all of them.
_LISTING = frozenset({
    "children", "named_children", "modules", "named_modules", "forward", "keys", "values", "items",
    "__iter__", "__len__", "__getitem__", "parameters", "named_parameters",
})  # fmt: skip


def model_lists(depth: int = 1) -> bool:
    """True if code of the model lists what a module holds, itself or through a method of torch.

    Args:
        depth: how many calls are between this function and the code in question.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    method = ""
    while frame is not None and is_torch_code(frame.f_code.co_filename) and frame.f_code.co_name not in _CALLING:
        method, frame, depth = frame.f_code.co_name, frame.f_back, depth + 1
    if frame is None or is_package_code(frame.f_code.co_filename) or (method and method not in _LISTING):
        return False
    return model_asks(depth + 1)
