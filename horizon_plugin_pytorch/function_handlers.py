"""What a QTensor does with each of torch's functions: the list of handlers, and the error for functions without one."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.asking.stack import is_recomputing, user_line
from horizon_plugin_pytorch.asking.who import hooked_module
from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at
from horizon_plugin_pytorch.running import current
from horizon_plugin_pytorch.torch_functions import METADATA

# Handlers are declared beside the operators, and those of casts and questions in `operators/casts.py`.
_HANDLERS: dict[Callable, Callable] = {}
_NOT_KEEPING: set[Callable] = set()


def handle(*functions: Callable, keeps: bool = False) -> Callable[[Callable], Callable]:
    """Register what a QTensor does when a torch function is called on it: ``handler(function, args, kwargs)``.

    Args:
        functions: torch functions and tensor methods, such as ``torch.argmax`` and ``Tensor.argmax``.
        keeps: the result keeps the scale of the input, so `keeps_scale` counts it.
    """

    def register(handler: Callable) -> Callable:
        for function in functions:
            _HANDLERS[function] = handler
            if keeps:
                _NOT_KEEPING.discard(function)
            else:
                _NOT_KEEPING.add(function)
        return handler

    return register


def handler_of(func: Callable) -> Callable | None:
    """What a QTensor does with a function; None if it would need to know how to treat the scale."""
    found = _HANDLERS.get(func)
    if found is None:  # a script may have imported nothing but QTensor so far
        importlib.import_module("horizon_plugin_pytorch.nn")
        found = _HANDLERS.get(func)
    return found


def keeps_scale(target: Any) -> bool:
    """Is this function, or tensor method given by name, one that keeps the scale of its input?

    >>> keeps_scale("reshape"), keeps_scale(torch.flatten), keeps_scale(torch.sigmoid)
    (True, True, False)
    """
    if isinstance(target, str):
        return target in METADATA or keeps_scale(getattr(Tensor, target, None))
    return target is operator.getitem or (target in _HANDLERS and target not in _NOT_KEEPING)


def is_backward() -> bool:
    """Does autograd run in this thread, which calls a backward of the user's or what a checkpoint recomputes?"""
    return torch._C._current_graph_task_id() != -1


_ADVISERS: list[Callable[[Callable], str]] = []


def take_advice(adviser: Callable[[Callable], str]) -> None:
    """Let errors say what `adviser` has to say of a function without a quantized form; "" for one that has a form."""
    _ADVISERS.append(adviser)


def unsupported(func: Callable) -> NotImplementedError:
    """The error for a function that would need to know how to treat the scale."""
    if is_backward() and is_recomputing():
        return NotImplementedError(
            f"{described(func)} runs again in the backward pass (`torch.utils.checkpoint`), outside of the model's "
            "forward, where nothing says which scale it has. Put the code into the forward of a module of the model, "
            "and write `checkpoint(self.block, x, use_reentrant=False)`."
        )
    hooked, is_own = hooked_module()
    if hooked is not None and not is_own:
        return NotImplementedError(
            f"{described(func)} is not implemented for QTensor: it would need to know how to treat the scale. It is "
            f"called by a hook that was registered after prepare on `{type(hooked).__name__}` "
            f"{at(getattr(hooked, 'path', ''))} and is no part of the model: read `x.dequantize()` there."
        )
    if hooked is not None:
        where = at(getattr(hooked, "path", ""))
        return NotImplementedError(
            f"{described(func)} is called by a hook of `{type(hooked).__name__}` {where} on a quantized tensor. A "
            "model that was traced, or prepared in eager mode, calls its hooks and does not look into them, so that "
            "nothing gives the result a scale. Write this into the forward, around the call of the layer, or let "
            "`prepare` run the model (`method=PrepareMethod.JIT_STRIP`), which looks into hooks. A hook that changes "
            "nothing can read `x.dequantize()`."
        )
    advice = next((text for ask in _ADVISERS if (text := ask(func))), "")
    if advice:
        return NotImplementedError(
            f"{described(func)} is not implemented for QTensor: it has no quantized form; {advice}."
        )
    return NotImplementedError(
        f"{described(func)} is not implemented for QTensor: it would need to know how to treat the scale. "
        "If it belongs to post-processing, put a DeQuantStub before it. If it should run quantized, call it as a "
        "module or through FloatFunctional (eager mode), or check that the module which calls it has a qconfig; "
        "`prepare_qat_fx` replaces supported functions by itself."
    )


def taken_for_number(func: Callable) -> UnsupportedOperatorError:
    """The error for a function that would read the memory of a QTensor, which has integers or nothing yet."""
    run = current()
    where = "" if run is None else f" {at(run.scope, user_line())}"
    return UnsupportedOperatorError(
        f"{described(func) if run is None else f'`{name_of(func)}`'}{where} takes a quantized tensor for a number, or "
        "copies it without its scale. Compute with the tensor itself, as in `x * x.mean()`, copy it with `clone()`, or "
        "give the function a number, as in `float(x.max())`, which an exported file cannot have."
    )


def name_of(func: Callable) -> str:
    """A function as messages call it.

    >>> name_of(torch.add), name_of(Tensor.grad.__get__)
    ('torch.add', 'torch.Tensor.grad')
    """
    if isinstance(func, torch._C.ScriptMethod):
        return f"{func.name} of a torch.jit.ScriptModule"
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)  # a property's getter belongs to the property
    if name in ("__get__", "__set__") and owner is not None:
        return f"torch.Tensor.{getattr(owner, '__name__', name)}"
    module = getattr(func, "__module__", None)
    if module and module.startswith("torch"):
        return f"{module}.{name}"
    return f"torch.Tensor.{name}" if hasattr(Tensor, name) else f"torch.{name}"


def calling_line() -> str:
    """The user's line that runs, in brackets, for messages; empty if there is none."""
    line = user_line()
    return f" ({line})" if line else ""


def described(func: Callable) -> str:
    """A function and the user's line that calls it, for messages."""
    return f"`{name_of(func)}`{calling_line()}"
