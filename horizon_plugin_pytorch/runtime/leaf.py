"""Code that symbolic trace records as one call and does not look into."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.running import Run, current
from horizon_plugin_pytorch.runtime.passed_by import CodeCalls
from horizon_plugin_pytorch.runtime.real_tensor import unmarked


class LeafCode(nn.Module):
    """Code of the user's that a graph calls as one module, and that runs as it is written.

    In a prepared model it has a `handler`, which sends functions on quantized tensors to modules made for them. These
    are the children of this module: each call in the graph has one, and so scales of its own.

    Args:
        function: the code.
    """

    is_traced_through = True  # its children are operators, it is none itself

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.path = ""
        self.handler: Any = None
        self._owner: Callable[[], nn.Module | None] = _nobody
        self._root: Callable[[], nn.Module | None] = _nobody

    def bind(self, owner: nn.Module, root: nn.Module) -> None:
        """Set the module whose code it is, and the model that this is in.

        Both are replaced when a model is prepared, converted or copied.
        """
        self._owner, self._root = weakref.ref(owner), weakref.ref(root)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the code; an assignment gives what it wrote to, which later nodes of the graph read."""
        out = self.function(*args, **kwargs)
        return args[0] if self.function is operator.setitem else out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.handler is None:
            return self.call(*args, **kwargs)
        run = current()
        if run is not None and run.handler is self.handler:
            return self._in_scope(run, args, kwargs)
        run = Run(self.handler, self._root())
        self.handler.start(run)
        try:
            return unmarked(self._in_scope(run, args, kwargs))
        finally:
            run.end()

    def _in_scope(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        run.scopes.append(self.path)
        try:
            with CodeCalls():
                return self.call(*args, **kwargs)
        finally:
            del run.scopes[len(run.scopes) - 1 - run.scopes[::-1].index(self.path) :]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": _nobody, "_root": _nobody}  # weak references are neither copied nor pickled


class LeafMethod(LeafCode):
    """A method of a module as a child of that module, so that a graph can call it."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self._owner(), *args, **kwargs)


class TensorMethod:
    """A method of a tensor as a function.

    >>> import torch
    >>> TensorMethod("add")(torch.ones(1), 2)
    tensor([3.])
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, self.__name__)(*args, **kwargs)


def _nobody() -> None:
    return None


def bind_methods(model: nn.Module) -> None:
    """Tell all `LeafCode` of a model which module it belongs to."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, LeafCode):
                child.bind(module, model)


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
        if args and isinstance(args[0], nn.Module) and _is_method(call, args[0]):
            args, kwargs, owner = args[1:], kwargs, args[0]
            return _call_method(proxy.tracer, call, owner, *_with_modules(proxy.tracer, args, kwargs))
        args, kwargs = _with_modules(proxy.tracer, args, kwargs)
        return proxy.tracer.create_proxy("call_function", call, args, kwargs)

    call.__horizon_leaf__ = True  # type: ignore[attr-defined]
    return call


def own_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """`leaf` for functions of this package: whoever sees torch's functions sees such a one as one call, too.

    A model that is recorded has it as one node, and a QTensor sends it to the module that was made for it.
    """

    @functools.wraps(function)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(call, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    call = leaf(dispatched)
    return call


def leaf_name(function: Any) -> str:
    """The name of a function as part of a module's name: a lambda has one with signs that names cannot have."""
    name = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"\W+", "_", name).strip("_") or "code"


def _is_method(function: Callable[..., Any], owner: nn.Module) -> bool:
    """Is a function with a module as its first argument a method of it, or just a function that takes one?"""
    members = (inspect.getattr_static(cls, function.__name__, None) for cls in type(owner).__mro__)
    return any(member is function or getattr(member, "__wrapped__", None) is function for member in members)


def _with_modules(tracer: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments in which modules are what a graph reads from the model."""

    def one(value: Any) -> Any:
        return tracer.create_proxy("get_attr", tracer.path_of_module(value), (), {}) if _is_part(value) else value

    def _is_part(value: Any) -> bool:
        return isinstance(value, nn.Module) and value is not tracer.root

    return fx.node.map_aggregate((args, kwargs), one)


def _call_method(tracer: Any, function: Callable[..., Any], owner: nn.Module, args: tuple, kwargs: dict) -> fx.Proxy:
    name = f"_leaf_{leaf_name(function)}"
    if not hasattr(owner, name):
        owner.add_module(name, LeafMethod(function))
    path = "" if owner is tracer.root else tracer.path_of_module(owner)
    return tracer.create_proxy("call_module", f"{path}.{name}".lstrip("."), args, kwargs)
