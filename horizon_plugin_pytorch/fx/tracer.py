"""Symbolic trace that keeps FloatFunctional calls, scopes and source lines."""

from __future__ import annotations

import collections
import contextlib
import operator
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from horizon_plugin_pytorch.errors import QuantizationWarning, TraceError, is_user_code, source_line, warn
from horizon_plugin_pytorch.fx.call_site import ModuleCall
from horizon_plugin_pytorch.hooks import BACKWARD
from horizon_plugin_pytorch.nn.arguments import by_position, operands_by_position
from horizon_plugin_pytorch.nn.leaf import first_proxy
from horizon_plugin_pytorch.nn.operator_table import row_of_function, row_of_method, row_of_module
from horizon_plugin_pytorch.nn.quantized.functional_modules import FUNCTIONAL_METHODS
from horizon_plugin_pytorch.plain_values import array_ufunc, plain_arguments
from horizon_plugin_pytorch.writing import IN_PLACE_OPERATORS

_LEAF_CLASSES: set[type] = set()
# Torch's own code does not see a size that is being traced among these arguments: `torch.zeros(x.shape[0], 1)`,
# `self.positions[:, : x.shape[1]]` of a buffer.
_EMPTY = torch.empty
_MAKERS = ("zeros", "ones", "empty", "rand", "randn")
_SHAPERS = ("expand", "repeat", "reshape", "view", "tile", "new_zeros", "new_ones", "new_full", "new_empty")


def empty_as_zeros(*size: Any, **settings: Any) -> Tensor:
    """``torch.empty`` in a traced graph: what happens to be in memory is in the range of no tensor.

    >>> empty_as_zeros(2)
    tensor([0., 0.])
    """
    return _EMPTY(*size, **settings).zero_()


def add_leaf_class(cls: type) -> None:
    """Treat modules of this class as one node."""
    _LEAF_CLASSES.add(cls)


def is_marked(module: nn.Module) -> bool:
    """Is it of a class that the user marked as a leaf?"""
    return type(module) in _LEAF_CLASSES and row_of_module(type(module)) is None


class _Proxy(torch.fx.Proxy):
    """A proxy that may be kept until the model is traced once more, and says so when it is read."""

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Any:
        now: Any = torch.fx.node.map_aggregate((args or (), kwargs or {}), _current)
        return super().__torch_function__(orig_method, types, *now)


def _current(value: Any) -> Any:
    """What stands in the second trace for a proxy of the first."""
    successor = getattr(value.tracer, "successor", None) if isinstance(value, torch.fx.Proxy) else None
    return value if successor is None else successor.stand_in(value)


class _Written(_Proxy):
    """A proxy that records ``x += y`` as what it is: torch's own takes it for ``x = x + y``, and loses it for views."""

    __array_ufunc__ = array_ufunc

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            raise TypeError("assignment to `x.data`")
        super().__setattr__(name, value)


def _in_place(target: Any) -> Any:
    def record(self: torch.fx.Proxy, other: Any) -> torch.fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return record


for _target in IN_PLACE_OPERATORS:
    setattr(_Written, f"__{_target.__name__}__", _in_place(_target))


def is_leaf(module: nn.Module) -> bool:
    """Is the module one node of a graph? torch's and our own are, and those that the user marked."""
    cls = type(module)
    if cls in _LEAF_CLASSES or row_of_module(cls) is not None or isinstance(module, torch.jit.ScriptModule):
        return True
    if getattr(module, "is_traced_through", False) or isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    return cls.__module__.startswith(("horizon_plugin_pytorch.nn.", "torch.nn", "torch.ao.nn"))


class _Parts(_Proxy):
    """What a call such as ``x.chunk(2, 1)`` gives: the number of parts is in the call, so they can be iterated."""

    def __init__(self, node: torch.fx.Node, tracer: torch.fx.Tracer, count: int) -> None:
        super().__init__(node, tracer)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(self._count)])  # type: ignore[index] # Proxy's operators are made at import


class QuantizationTracer(torch.fx.Tracer):
    """Traces into user modules, not into torch's or ours; a FloatFunctional call is one ``call_method`` node.

    Args:
        skipped_module_names, skipped_module_classes: further modules that it does not trace into, as torch's tracer of
            this name takes them.
        kwargs: of `torch.fx.Tracer`.

    >>> class Block(nn.Module):
    ...     def forward(self, x):
    ...         return x + 1
    >>> [node.op for node in QuantizationTracer([], [Block]).trace(nn.Sequential(Block())).nodes]
    ['placeholder', 'call_module', 'output']
    """

    def __init__(
        self,
        skipped_module_names: Sequence[str] = (),
        skipped_module_classes: Sequence[type[nn.Module]] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.skipped_module_names = tuple(skipped_module_names)
        self.skipped_module_classes = tuple(skipped_module_classes)
        self._calls: tuple[ModuleCall, ...] = ()
        self._called: Counter[str] = Counter()
        self.lost_hooks: dict[str, None] = {}  # hooks that the graph does not call
        self._proxies: list[weakref.ref] = []
        self.successor: QuantizationTracer | None = None  # what traces the model once more

    @property
    def keeps_proxies(self) -> bool:
        """Has the model, or whoever it gave them to, kept tensors of the forward that was traced?"""
        return any(proxy() is not None for proxy in self._proxies)

    def create_arg(self, a: Any) -> Any:
        return super().create_arg(self.stand_in(a) if isinstance(a, torch.fx.Proxy) and a.tracer is not self else a)

    def stand_in(self, earlier: torch.fx.Proxy) -> torch.fx.Proxy:
        """A value of the trace before is read."""
        earlier.node.meta.setdefault("read_later", user_frames())
        return self.create_proxy("get_attr", "_of_an_earlier_forward", (), {})

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        node.stack_trace = user_frames()
        node.meta["calls"] = self._calls
        return node

    def create_proxy(
        self, kind: str, target: Any, args: tuple, kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> torch.fx.Proxy:
        if self.successor is not None:  # `y + self.state`, where the state is of the trace before
            return self.successor.create_proxy(kind, target, args, kwargs, *rest, **more)
        is_index = target in (operator.getitem, operator.setitem)
        is_operator = getattr(target, "__module__", "") == operator.add.__module__  # `x + array`: no sizes there
        arrays = "tensor" if kind == "call_module" or is_operator else "list"
        args, kwargs = plain_arguments(args, kwargs, is_index, arrays)
        if kind == "call_function" or (kind == "call_method" and row_of_method(target) is not None):
            args, kwargs = operands_by_position(target, args, kwargs)
        return super().create_proxy(kind, target, args, kwargs, *rest, **more)

    def call_module(self, m: nn.Module, forward: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        args, kwargs = by_position(type(m).forward, args, kwargs) if is_leaf(m) else (args, kwargs)
        path = self.path_of_module(m)
        with self.called(path), contextlib.nullcontext() if is_leaf(m) else self._watched_hooks(m, path):
            return super().call_module(m, forward, args, kwargs)

    @contextlib.contextmanager
    def _watched_hooks(self, module: nn.Module, path: str) -> Iterator[None]:
        """Note which hooks of a module that is traced through leave nothing in the graph.

        Those that give something back are traced like the code around them.
        """
        saved = {kind: dict(getattr(module, kind)) for kind in ("_forward_pre_hooks", "_forward_hooks", *BACKWARD)}
        for kind, hooks in saved.items():
            for number, hook in hooks.items():
                if kind in BACKWARD:
                    self._lose(hook, path)
                    del getattr(module, kind)[number]
                else:
                    getattr(module, kind)[number] = self._watched(hook, path)
        try:
            yield
        finally:
            for kind, hooks in saved.items():
                getattr(module, kind).update(hooks)

    def _watched(self, hook: Any, path: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            out = hook(*args)
            if out is None:
                self._lose(hook, path)
            return out

        return call

    def _lose(self, hook: Any, path: str) -> None:
        code = getattr(hook, "__code__", None)
        line = f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code is not None else ""
        name = getattr(hook, "__qualname__", type(hook).__name__)
        self.lost_hooks[f"`{name}`{f' ({line})' if line else ''} of `{path}`"] = None

    @contextlib.contextmanager
    def called(self, path: str) -> Iterator[None]:
        """A module is called in here."""
        before = self._calls
        self._calls = (*before, ModuleCall(path, self._called[path]))
        self._called[path] += 1
        try:
            yield
        finally:
            self._calls = before

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_skipped = isinstance(m, self.skipped_module_classes) or module_qualified_name in self.skipped_module_names
        return is_skipped or is_leaf(m)

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        count = _known_length(node)
        proxy = _Written(node, self) if count is None else _Parts(node, self, count)
        self._proxies.append(weakref.ref(proxy))
        return proxy

    @contextlib.contextmanager
    def _functional_calls(self, root: nn.Module) -> Iterator[None]:
        """While tracing, a FloatFunctional method called with proxies records itself."""
        classes = {type(m) for m in root.modules() if is_functional(type(m))}
        saved: list[tuple[type, str, Any]] = []
        for cls in classes:
            for name in FUNCTIONAL_METHODS:
                method = getattr(cls, name, None)
                if method is not None:
                    saved.append((cls, name, cls.__dict__.get(name)))
                    setattr(cls, name, _recorder(self, name, method))
        try:
            yield
        finally:
            for cls, name, method in saved:
                if method is None:
                    delattr(cls, name)
                else:
                    setattr(cls, name, method)

    @contextlib.contextmanager
    def _sizes_as_arguments(self) -> Iterator[None]:
        """While tracing, functions and methods of ordinary tensors that are given traced sizes record themselves."""
        saved = {name: getattr(torch, name) for name in _MAKERS}
        try:
            for name, function in saved.items():
                made = empty_as_zeros if name == "empty" else function
                setattr(torch, name, self._recording("call_function", made, function))
            for name in _SHAPERS:  # inherited from the class below, and again so when they are deleted
                setattr(torch.Tensor, name, self._recording("call_method", name, getattr(torch.Tensor, name)))
            with _Subscripts(self._recording("call_function", operator.getitem, operator.getitem)):
                yield
        finally:
            for name, function in saved.items():
                setattr(torch, name, function)
            for name in _SHAPERS:
                if name in vars(torch.Tensor):
                    delattr(torch.Tensor, name)

    def _recording(self, kind: str, target: Any, function: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            if first_proxy((args, kwargs)) is None:
                return function(*args, **kwargs)
            return self.create_proxy(kind, target, args, kwargs)

        return record

    def trace(self, root: Any, concrete_args: Any = None) -> torch.fx.Graph:
        with self._functional_calls(root), self._sizes_as_arguments():
            return super().trace(root, concrete_args)


class _Subscripts(TorchFunctionMode):
    """Inside, `x[...]` of an ordinary tensor is done by a function.

    A method ``Tensor.__getitem__`` of Python's own could not be taken back: the interpreter would take tensors for
    sequences ever after, and ``torch.tensor([x, y])`` of single numbers would fail.
    """

    def __init__(self, subscript: Callable) -> None:
        super().__init__()
        self.subscript = subscript

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.subscript(*args) if func is torch.Tensor.__getitem__ else func(*args, **(kwargs or {}))


def _known_length(node: torch.fx.Node) -> int | None:
    """How many tensors a call gives, where its arguments say so."""
    if node.target in ("chunk", torch.chunk):
        count = node.args[1] if len(node.args) > 1 else node.kwargs.get("chunks")
        return count if isinstance(count, int) else None
    if node.target in ("split", "split_with_sizes", torch.split, torch.split_with_sizes):
        sizes = node.args[1] if len(node.args) > 1 else next(iter(node.kwargs.values()), None)
        return len(sizes) if isinstance(sizes, (list, tuple)) else None
    if node.op == "call_function":
        found = row_of_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    else:
        found = row_of_method(str(node.target), node.args, node.kwargs) if node.op == "call_method" else None
    return None if found is None or len(found[0].results) == 1 else len(found[0].results)


def user_frames() -> str:
    """The calling lines outside torch and this package, outermost first.

    `record_stack_traces` of torch would do, but it imports the compiler, which takes two seconds.
    """
    lines = []
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file):
            lines.append(f'  File "{file}", line {frame.f_lineno}, in {frame.f_code.co_name}')
        frame = frame.f_back  # type: ignore[assignment]
    return "\n".join(reversed(lines))


def is_functional(cls: type) -> bool:
    """Is it a FloatFunctional, ours or torch's?"""
    row = row_of_module(cls)
    return row is not None and row.name == "functional"


def _recorder(tracer: QuantizationTracer, name: str, method: Any) -> Any:
    def record(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if first_proxy((args, kwargs)) is None:
            return method(self, *args, **kwargs)
        args, kwargs = by_position(method, args, kwargs)
        path = tracer.path_of_module(self)
        with tracer.called(path):
            owner = tracer.create_proxy("get_attr", path, (), {})
            return tracer.create_proxy("call_method", name, (owner, *args), kwargs)

    return record


def trace(model: nn.Module) -> torch.fx.Graph:
    """The model's graph, or an error that names the line which cannot be traced."""
    if isinstance(model, torch.fx.GraphModule):
        return model.graph
    _refuse_names(model)
    before = {path: (buffer, buffer._version) for path, buffer in model.named_buffers()}
    tracer = QuantizationTracer()
    try:
        with _own_attributes(model, tracer):
            graph = tracer.trace(model)
            if tracer.keeps_proxies:  # does the next forward read them?
                tracer.successor = QuantizationTracer()
                with contextlib.suppress(Exception):
                    tracer.successor.trace(model)
    except Exception as error:
        where = _innermost_user_line(error)
        raise TraceError(
            f"symbolic trace cannot follow `{type(model).__name__}`{f' at {where}' if where else ''}: {_remedy(error)} "
            "Or prepare with `prepare(model, example_inputs, ...)`, which runs the forward: sizes and lengths are "
            "numbers there, and what lies outside of the stubs may be any Python."
        ) from error
    _tell_lost(model, tracer.lost_hooks)
    _tell_written(model, before)
    return graph


def _tell_written(model: nn.Module, before: dict[str, tuple[torch.Tensor, int]]) -> None:
    """Name the buffers that the forward wrote to while it was traced: the graph has the reads, and not the writes."""
    after = {path: (buffer, buffer._version) for path, buffer in model.named_buffers()}
    written = [
        path for path, (old, version) in before.items() if path not in after or not _is_same(old, version, after[path])
    ]
    if written:
        shown = ", ".join(f"`{path}`" for path in written)
        warn(
            f"`{type(model).__name__}`: its forward writes to {shown}, which symbolic trace does not see: the prepared "
            "model reads the buffer and never writes it. Prepare with `PrepareMethod.JIT_STRIP`, whose model runs its "
            "own forward; or write it outside of the forward.",
            QuantizationWarning,
        )


def _is_same(old: torch.Tensor, version: int, now: tuple[torch.Tensor, int]) -> bool:
    return now[0] is old and now[1] == version


def _tell_lost(model: nn.Module, hooks: Iterable[str]) -> None:
    """Name the hooks that the prepared model does not call."""
    shown = ", ".join(hooks)
    if shown:
        warn(
            f"`{type(model).__name__}`: the prepared model does not call the hooks {shown}: symbolic trace goes "
            "through these modules, and the graph calls what is inside. Put such a hook on a layer inside or on the "
            "whole model, or prepare with `PrepareMethod.JIT_STRIP`, whose model runs its own forward with all hooks.",
            QuantizationWarning,
        )


@contextlib.contextmanager
def _own_attributes(model: nn.Module, tracer: QuantizationTracer) -> Iterator[None]:
    """Attributes that hold values of the traced forward afterwards get back what they were."""
    before = [(vars(m), {k: (v, _items(v)) for k, v in vars(m).items()}) for m in model.modules()]
    try:
        yield
    finally:
        for attributes, values in before if tracer.successor is not None or tracer.keeps_proxies else ():
            for name in [name for name, value in attributes.items() if first_proxy(_items(value) or value) is not None]:
                if name not in values:
                    del attributes[name]
                    continue
                attributes[name], items = values[name]
                if items is not None:
                    attributes[name].clear()
                    getattr(attributes[name], "extend" if isinstance(items, list) else "update")(items)


def _items(value: Any) -> Any:
    """What a container of its own kind holds, as a plain list or dict."""
    if type(value) in (list, collections.deque):
        return list(value)
    return dict(value) if type(value) in (dict, collections.OrderedDict, collections.defaultdict) else None


_TAKEN = frozenset(dir(torch.fx.GraphModule)) - frozenset(dir(nn.Module)) | {
    "_graph", "_code", "meta", "_tracer_cls", "_tracer_extras",
}  # fmt: skip


def _refuse_names(model: nn.Module) -> None:
    """Insist that the model has nothing of the names that torch.fx gives to the attributes of a traced model."""
    parts = {**model._modules, **model._parameters, **model._buffers}
    methods = [name for name in vars(model) if name in _TAKEN and callable(getattr(torch.fx.GraphModule, name, None))]
    taken = [name for name in (*parts, *methods) if name in _TAKEN]
    if taken:
        raise TraceError(
            f"`{taken[0]}` of `{type(model).__name__}` has the name of something that every model of torch.fx has, so "
            "that the traced model could not have both. Give it another name; or let `prepare` run the model "
            "(`method=PrepareMethod.JIT_STRIP`), which takes any name."
        )


def _remedy(error: Exception) -> str:
    text = re.sub(r"'_(Parts|Written|Proxy)'", "a tensor that is traced", str(error))
    if "cannot be iterated" in text:
        return (
            "a tensor's length is not known while tracing, so it cannot be looped over, passed to zip() or unpacked "
            "with *; nor is the length of what wrapped code gives. Take a known number of parts: `a, b = x.unbind(1)`, "
            "`for part in x.chunk(2, 1)`, or `x[:, i]` for i in range(2); of wrapped code, `parts[i]` for i in "
            "range(2)."
        )
    if "cannot be interpreted as an integer" in text:
        return (
            "a size is not known as a number while tracing, so `range(x.shape[0])` cannot be run. Write the number, or "
            "take it from the model's configuration: `range(self.levels)`."
        )
    if "__array_" in text or "to a NumPy" in text:
        return (
            "numpy cannot take tensors or sizes that are not known as numbers while tracing. Compute with them in "
            "torch and Python, or take the numbers from the model's configuration."
        )
    if "assignment to `x.data`" in text:
        return "a graph has no form for `x.data = y`. Go on with the new tensor, as in `x = y`."
    if "item assignment" in text:
        return (
            "writing into a part of a tensor has no form in a graph. Build the tensor from its parts with `torch.cat` "
            "or `torch.stack`, or choose between two tensors with `torch.where`."
        )
    return (
        f"{text.rstrip('.')}. The graph must not depend on the values of tensors: move that code out of the model's "
        "forward. Before the QuantStub or after the DeQuantStub it can also be hidden in a function or module marked "
        "with `horizon_plugin_pytorch.utils.fx_helper.wrap()`, which is then called as it is."
    )


def _innermost_user_line(error: BaseException) -> str:
    lines = []
    traceback = error.__traceback__
    while traceback is not None:
        lines.append(f'File "{traceback.tb_frame.f_code.co_filename}", line {traceback.tb_lineno}')
        traceback = traceback.tb_next
    return source_line("\n".join(lines))


def scope_of(node: torch.fx.Node) -> str:
    """Path of the module whose forward made the node; empty for the top module."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [value[0] if isinstance(value, tuple) else key for key, value in stack.items()]
    return paths[-1] if paths else ""
