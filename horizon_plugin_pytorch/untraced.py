"""What torch's tracers must not see, and how to ask whether one is at work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

_P = ParamSpec("_P")
_T = TypeVar("_T")


def is_traced() -> bool:
    """Is `torch.jit.trace` writing down what runs?"""
    return torch._C._get_tracing_state() is not None


def is_recorded() -> bool:
    """Is somebody writing down what runs: `torch.jit.trace`, `torch.export`, or another mode that sees operators?"""
    return torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that `torch.jit.trace` does not see: what it gives is a constant of the traced model.

    For numbers that follow from the model alone (plans, scales, switches), and for statistics, which are no part of
    what a model computes. Without it the traced graph would be another one the first time, before they are cached.

    >>> half = untraced(lambda x: x / 2)
    >>> "aten::div" in str(torch.jit.trace(lambda x: x + half(torch.ones(1)), torch.zeros(1)).graph)
    False
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        state = torch._C._get_tracing_state()
        if state is None:
            return function(*args, **kwargs)
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_tracing_state(state)  # type: ignore[attr-defined]

    return run


@untraced
def as_number(scale: Tensor) -> float:
    """A scale as a number: a constant of the traced model, of which `torch.jit.trace` has nothing to warn.

    >>> as_number(torch.tensor([0.5]))
    0.5
    """
    return float(scale)


def applied(function: type[Function], *args: Any) -> Any:
    """What an autograd function gives; `torch.jit.trace` sees the operators inside, and not a call of Python.

    A traced model has no gradients of ours, and a file could not hold the Python.
    """
    if torch._C._get_tracing_state() is None:
        return function.apply(*args)
    return function.forward(SimpleNamespace(save_for_backward=lambda *tensors: None), *args)
