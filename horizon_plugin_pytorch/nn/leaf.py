"""Code that symbolic trace records as one call and does not look into."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import fx, nn


class LeafMethod(nn.Module):
    """A method of a module as a child of that module, so that a graph can call it.

    The graph module that it ends up in tells it whose method it is (`bind_methods`): the owner is replaced when a
    model is prepared, converted or copied.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self._owner: Callable[[], nn.Module | None] = _nobody

    def bind(self, owner: nn.Module) -> None:
        """Set the module whose method it is."""
        self._owner = weakref.ref(owner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self._owner(), *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": _nobody}  # a weak reference is neither copied nor pickled


def _nobody() -> None:
    return None


def bind_methods(model: nn.Module) -> None:
    """Tell every `LeafMethod` of a model which module it belongs to."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, LeafMethod):
                child.bind(module)


def first_proxy(values: Any) -> fx.Proxy | None:
    """A proxy among arguments, also inside lists, tuples and dictionaries; None when nothing is being traced."""
    found: list[fx.Proxy] = []

    def look(value: Any) -> Any:
        if isinstance(value, fx.Proxy):
            found.append(value)
        return value

    fx.node.map_aggregate(values, look)
    return found[0] if found else None


def leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, or a method of a module, that a symbolic trace records as one call.

    >>> @leaf
    ... def largest(x):
    ...     return max(x.flatten().tolist())
    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return largest(x)
    >>> [node.op for node in fx.symbolic_trace(Net()).graph.nodes]
    ['placeholder', 'call_function', 'output']
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        proxy = first_proxy((args, kwargs))
        if proxy is None:
            return function(*args, **kwargs)
        if args and isinstance(args[0], nn.Module):
            return _call_method(proxy.tracer, call, args[0], args[1:], kwargs)
        return proxy.tracer.create_proxy("call_function", call, args, kwargs)

    call.__horizon_leaf__ = True  # type: ignore[attr-defined]
    return call


def _call_method(tracer: Any, function: Callable[..., Any], owner: nn.Module, args: tuple, kwargs: dict) -> fx.Proxy:
    name = f"_leaf_{function.__name__}"
    if not hasattr(owner, name):
        owner.add_module(name, LeafMethod(function))
    path = "" if owner is tracer.root else tracer.path_of_module(owner)
    return tracer.create_proxy("call_module", f"{path}.{name}".lstrip("."), args, kwargs)
