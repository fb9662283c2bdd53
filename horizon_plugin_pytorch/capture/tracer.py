"""Symbolic trace that keeps FloatFunctional calls, scopes and source lines."""

from __future__ import annotations

import contextlib
import inspect
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from horizon_plugin_pytorch.asking.functions import definition_line
from horizon_plugin_pytorch.asking.questions import (
    asserted_answer,
    user_compares_truth,
    user_tests_none,
    user_tests_result,
)
from horizon_plugin_pytorch.asking.stack import user_frames, user_line
from horizon_plugin_pytorch.capture.container_writes import only_writes
from horizon_plugin_pytorch.capture.given import Arguments, Place
from horizon_plugin_pytorch.capture.leaves import is_functional, is_leaf, is_marked
from horizon_plugin_pytorch.capture.made_tensors import MadeTensors, TracedCalls
from horizon_plugin_pytorch.capture.number_types import NumberTypes
from horizon_plugin_pytorch.capture.outside import OutsideState
from horizon_plugin_pytorch.capture.proxies import (
    UNKNOWN_TRUTH,
    KnownItems,
    Parts,
    TracedProxy,
    Unseen,
    Written,
    stand_in,
)
from horizon_plugin_pytorch.capture.sizes import class_of_fact, count_of_sizes, empty_as_zeros, is_shape, is_size
from horizon_plugin_pytorch.capture.type_tests import answered_types
from horizon_plugin_pytorch.errors import TraceError, at, listed, source_line
from horizon_plugin_pytorch.nn.quantized.functional_modules import FUNCTIONAL_METHODS
from horizon_plugin_pytorch.operators.arguments import by_position, operands_by_position
from horizon_plugin_pytorch.operators.table import Trait, row_of_function, row_of_method, row_of_module
from horizon_plugin_pytorch.plain_values import plain_arguments
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.call_site import ModuleCall
from horizon_plugin_pytorch.runtime.hooks import BACKWARD, BY_NAME, keep_names
from horizon_plugin_pytorch.runtime.leaf import LeafCode, first_proxy
from horizon_plugin_pytorch.runtime.node_notes import notes

# Torch's own code does not see a size that is being traced among these arguments: `torch.zeros(x.shape[0], 1)`,
# `self.positions[:, : x.shape[1]]` of a buffer.
_MAKERS = ("zeros", "ones", "empty", "rand", "randn")
_SHAPERS = ("expand", "repeat", "reshape", "view", "tile", "new_zeros", "new_ones", "new_full", "new_empty")


def _refuse_decorated(forward: Any) -> None:
    """Refuse a forward that takes further arguments behind a decorator: torch's tracer has no place for them there."""
    inner = inspect.unwrap(forward)
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = [p for p in inspect.signature(inner).parameters.values() if p.kind in open_ended]
    if found and inner is not forward:
        raise TraceError(
            f"its forward ({definition_line(inner)}) is behind a decorator and takes `{found[0]}`, which symbolic "
            "trace cannot hand through. Name the arguments that it takes, or take the decorator off "
            "(`forward = forward.__wrapped__`) in the model that is deployed."
        )


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
        self.outside: OutsideState | None = None  # what hooks may write to
        self.written_globals: list[str] = []  # which had values of the traced forward
        self.unseen_hooks: dict[str, None] = {}  # hooks that write what the forward reads, and that need numbers
        self.lost_backwards: dict[str, None] = {}  # functions with a backward of their own, which the graph lacks
        self.tested_results: dict[str, None] = {}  # of wrapped code: it may give None, and the forward asks
        self.unknown_classes: dict[str, None] = {}  # lines that ask for the class of a value of which nothing is known
        self.looked_up: dict[str, None] = {}  # lines that look for sizes among keys of dictionaries
        self._proxies: list[weakref.ref] = []
        self.successor: QuantizationTracer | None = None  # what traces the model once more
        self.arguments: Arguments | None = None  # what is known of those of the forward
        self._places: dict[torch.fx.Node, Place] = {}
        self.made = MadeTensors(lambda x: self.create_proxy("call_function", torch.clone, (x,), {}), ())
        self._types: NumberTypes | None = None
        self._constants: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that are no attributes, and their copies

    @property
    def keeps_proxies(self) -> bool:
        """Has the model, or whoever it gave them to, kept tensors of the forward that was traced?"""
        return any(proxy() is not None for proxy in self._proxies)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        _refuse_decorated(root_fn)
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        if self.arguments is None or not is_module or concrete_args is not None:
            return function, args
        self.arguments.rely_on_given()
        return function, [args[0], *map(self._argument, args[1:])]

    def _argument(self, proxy: Any) -> Any:
        """What stands for an argument of the forward."""
        assert self.arguments is not None
        name = str(proxy.node.target)
        self._places[proxy.node] = Place(name)
        if not self.arguments.is_known(name):
            return proxy
        made = stand_in(proxy.node, self, Place(name), self.arguments.known(name))
        return made.plain() if name.startswith("*") else made

    def rely(self, place: Place, question: str, answer: Any, about: Any = None, is_asked: bool = True) -> None:
        """Note what the forward was told of an argument: the graph is for calls where this is so.

        Args:
            is_asked: does a line of the forward ask? Else it was told before it began.
        """
        assert self.arguments is not None
        line = user_line() if is_asked else ""
        self.arguments.guard.rely(place, question, answer, about, line)

    def dtype_of(self, node: torch.fx.Node) -> torch.dtype | None:
        """The type of a tensor in the float model, where it is known."""
        return None if self._types is None else self._types.of(node)

    def class_of(self, proxy: TracedProxy) -> type | None:
        """The class of what a proxy stands for, where it is known."""
        place = self._places.get(proxy.node)
        if place is not None and self.arguments is not None:
            known = place.value(self.arguments.values) if self.arguments.is_known(place.name) else None
            cls = Tensor if known is None or isinstance(known, Tensor) else type(known)
            self.rely(place, "class", True, cls)
            return cls
        if isinstance(proxy, KnownItems):
            return proxy.given_class
        if isinstance(proxy, Parts):
            return tuple
        row = _row_of(proxy.node)
        if row is not None and (len(row.results) > 1 or (Trait.SEVERAL in row.traits and not row.is_cast)):
            return tuple
        return Tensor if self._is_tensor(proxy.node) else class_of_fact(proxy.node)

    def tell_class(self) -> None:
        """Note the line at which the forward asks for a class that nobody knows."""
        self.unknown_classes[user_line()] = None

    def tell_fact(self, proxy: TracedProxy) -> None:
        """Note the line at which the forward looks for a size, or the like, among values that are known."""
        if is_size(proxy.node):
            self.looked_up[user_line()] = None

    def require_attribute(self, proxy: TracedProxy, name: str, is_asked: bool) -> None:
        """Raise what float raises where a value has no such attribute.

        Args:
            proxy: stands for the value.
            name: of the attribute.
            is_asked: does the code ask whether there is one? A line that reads it, ``batch.image``, says what an
                argument is, of which nothing else may be known.

        Raises:
            AttributeError: there is none.
            TypeError: this is asked, and not known.
        """
        is_argument = proxy.node in self._places or proxy.node.op == "placeholder"
        if is_argument and not is_asked:
            return
        place = self._places.get(proxy.node)
        known = None
        if place is not None and self.arguments is not None and self.arguments.is_known(place.name):
            known = place.value(self.arguments.values)
        cls = proxy.asked_class()
        if cls is None:
            if is_asked and not hasattr(Tensor, name):
                raise TypeError(f"whether a value has the attribute `{name}` is not known while tracing")
            return
        of_instance = cls is not Tensor and hasattr(known, name)
        if not (of_instance or hasattr(cls, name) or (cls is Tensor and not is_asked and hasattr(QTensor, name))):
            raise AttributeError(f"'{cls.__name__}' object has no attribute '{name}'")

    def _is_tensor(self, node: torch.fx.Node) -> bool:
        """Is it known that a node gives one tensor?"""
        if node.op in ("placeholder", "get_attr"):
            return not (self.arguments and self.arguments.is_known(str(node.target))) or isinstance(
                self.arguments.known(str(node.target)), Tensor
            )
        if node.op == "call_module":
            row = row_of_module(type(self.root.get_submodule(str(node.target))))
            return row is not None and len(row.results) == 1
        row = _row_of(node)
        is_one = row is not None and len(row.results) == 1 and (row.is_cast or Trait.SEVERAL not in row.traits)
        return is_one and any(map(self._is_tensor, node.all_input_nodes))

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, KnownItems) and a.is_written:
            return super().create_arg(a.plain())
        if isinstance(a, Tensor) and not isinstance(a, torch.nn.Parameter):
            traced = self.made.traced(a)
            return super().create_arg(self._constant(a) if traced is None else traced)
        return super().create_arg(self.stand_in(a) if isinstance(a, torch.fx.Proxy) and a.tracer is not self else a)

    def _constant(self, a: Tensor) -> Tensor:
        """A tensor that is no attribute of the model, with the values of this moment: the forward may go on writing."""
        is_known = a in self.tensor_attrs or any(a is buffer for buffer in self.root.buffers())
        if is_known or a.requires_grad or a.is_meta:
            return a
        _, kept = self._constants.get(id(a), (a, None))
        if kept is None or kept.shape != a.shape or not torch.equal(kept, a):
            kept = a.clone()
            self._constants[id(a)] = (a, kept)
        return kept

    def iter(self, obj: torch.fx.Proxy) -> Iterator[Any]:
        try:
            return super().iter(obj)
        except torch.fx.proxy.TraceError:
            if not is_shape(obj.node):
                raise
        count = count_of_sizes(obj.node)
        if count is not None:
            return iter([obj[i] for i in range(count)])  # type: ignore[index]
        raise TraceError(
            "how many axes a tensor has is not known while tracing, so its shape cannot be looped over or unpacked "
            "with *. Write what leaves the other axes alone: `v.unflatten(0, (B, T, N))` for `v.reshape(B, T, N, "
            "*v.shape[1:])`, `v.flatten(0, 1)` for `v.reshape(-1, *v.shape[2:])`; or the sizes one by one, "
            "`v.shape[1], v.shape[2]`."
        )

    def to_bool(self, obj: torch.fx.Proxy) -> bool:
        """The truth of what is traced is not known; an ``assert`` about sizes is taken to hold, as it did in float."""
        answer = asserted_answer()
        return super().to_bool(obj) if answer is None else answer

    def stand_in(self, earlier: torch.fx.Proxy) -> torch.fx.Proxy:
        """A value of the trace before is read."""
        if getattr(earlier.tracer, "successor", None) is not self:
            raise TypeError("a tensor of a model that was traced before is read")
        known = notes(earlier.node)
        known.read_later = user_frames() if known.read_later is None else known.read_later
        return self.create_proxy("get_attr", "_of_an_earlier_forward", (), {})

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        node.stack_trace = user_frames()
        notes(node).calls = self._calls
        return node

    def create_proxy(
        self, kind: str, target: Any, args: tuple, kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> torch.fx.Proxy:
        if self.successor is not None:  # `y + self.state`, where the state is of the trace before
            return self.successor.create_proxy(kind, target, args, kwargs, *rest, **more)
        if kind in ("call_function", "call_method") and self._types is not None:
            answer = self._types.answer(target, args, kwargs)
            if answer is not None:
                return answer
            if user_compares_truth():
                raise TypeError(f"what `{getattr(target, '__name__', target)}` gives {UNKNOWN_TRUTH}")
        is_index = target in (operator.getitem, operator.setitem)
        is_operator = getattr(target, "__module__", "") == operator.add.__module__  # `x + array`: no sizes there
        arrays = "tensor" if kind == "call_module" or is_operator else "list"
        args, kwargs = plain_arguments(args, kwargs, is_index, arrays)
        if kind == "call_method" and only_writes(target) and isinstance(args[0], torch.fx.Proxy):
            raise TypeError(f"`{target}` writes into a list or dictionary of which nothing is known")
        if kind == "call_function" or (kind == "call_method" and row_of_method(target) is not None):
            args, kwargs = operands_by_position(target, args, kwargs)
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        is_call = kind in ("call_function", "call_method") and target is not getattr and self._types is not None
        if is_call and user_compares_truth(is_later=True) and not self._is_tensor(proxy.node):
            raise TypeError(f"what `{getattr(target, '__name__', target)}` gives {UNKNOWN_TRUTH}")
        if self._is_wrapped(kind, target) and user_tests_result():
            self.tested_results[f"`{getattr(target, '__name__', target)}` ({user_line()})"] = None
        if target is operator.getitem or (kind == "call_method" and target == "get"):
            self._note_item(proxy, args)
        return proxy

    def _is_wrapped(self, kind: str, target: Any) -> bool:
        """Is it a call of code that tracing does not enter?"""
        if kind == "call_module":
            module = self.root.get_submodule(target)
            return isinstance(module, LeafCode) or is_marked(module)
        return kind == "call_function" and getattr(target, "__horizon_leaf__", False)

    def _note_item(self, item: torch.fx.Proxy, args: tuple) -> None:
        """An item of an argument of which nothing is known counts as given, too."""
        place = self._places.get(args[0].node) if isinstance(args[0], torch.fx.Proxy) else None
        if place is not None and type(args[1]) in (str, int):
            self._places[item.node] = place.item(args[1])
            if not self.arguments.is_known(place.name) and user_tests_none():  # type: ignore[union-attr]
                self.rely(place.item(args[1]), "given", True)

    def call_module(self, m: nn.Module, forward: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self._is_registered(m):
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        _settle_attributes((args, kwargs))
        if is_leaf(m) and not isinstance(m, torch.jit.ScriptModule):  # whose class has no forward
            named = kwargs
            args, kwargs = by_position(type(m).forward, args, kwargs)
            if named and (m._forward_pre_hooks_with_kwargs or m._forward_hooks_with_kwargs):
                m.__dict__[BY_NAME] = keep_names(m, at(path, source_line(user_frames())), named, kwargs)
        with self.called(path), contextlib.nullcontext() if is_leaf(m) else self._watched_hooks(m, path):
            if not is_leaf(m):
                return super().call_module(m, forward, args, kwargs)
            self._show(m, "_forward_pre_hooks", args, kwargs)
            out = super().call_module(m, forward, args, kwargs)
            self._show(m, "_forward_hooks", args, kwargs, out)
            return out

    def _show(self, module: nn.Module, kind: str, args: tuple, kwargs: dict[str, Any], *out: Any) -> None:
        """Let hooks of a layer that may write to the model see a call: the forward may read what they write.

        What they give is not taken: the layer's hooks run with the layer.
        """
        for number, hook in list(getattr(module, kind).items()):
            if self.outside is None or not self.outside.is_shared(hook):
                continue
            given = (args, kwargs) if number in getattr(module, f"{kind}_with_kwargs") else (args,)
            try:
                hook(module, *given, *out)
            except Exception as error:  # it computes with numbers, which only a run has
                names = listed(f"`{name}`" for name in self.outside.common_names(hook))
                if names:
                    reason = (str(error) or type(error).__name__).splitlines()[0]
                    what = f"{_spelt_hook(hook)} of `{self.path_of_module(module)}` with {names}: {reason}"
                    self.unseen_hooks[what] = None

    def _is_registered(self, module: nn.Module) -> bool:
        """Is a module one of the model's? The parts of another, such as a slice of a Sequential, must be.

        Raises:
            TraceError: where the module itself computes and the model does not have it.
        """
        try:
            self.path_of_module(module)
        except NameError:
            if is_leaf(module):
                raise TraceError(
                    f"`{type(module).__name__}` is not a part of the model, as a module in a plain list, dictionary or "
                    "object: keep modules in nn.ModuleList or nn.ModuleDict, or as attributes of their module."
                ) from None
            return False
        return True

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
        self.lost_hooks[f"{_spelt_hook(hook)} of `{path}`"] = None

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
        kind = Unseen if self._is_wrapped(node.op, node.target) else Written
        proxy = kind(node, self) if count is None else Parts(node, self, count)
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
    def _own_backwards(self) -> Iterator[None]:
        """While tracing, note the user's functions with a backward of their own: only their forward is traced."""
        saved = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if first_proxy((args, kwargs)) is not None and not cls.__module__.startswith("torch."):
                self.lost_backwards[f"`{cls.__name__}` ({user_line()})"] = None
            return saved.__get__(None, cls)(*args, **kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.autograd.Function.apply = saved  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _sizes_as_arguments(self) -> Iterator[None]:
        """While tracing, functions and methods of ordinary tensors that are given traced sizes record themselves."""
        saved = {name: getattr(torch, name) for name in (*_MAKERS, "is_tensor")}
        try:
            torch.is_tensor = _is_tensor  # type: ignore[assignment]
            for name in _MAKERS:
                function = saved[name]
                made = empty_as_zeros if name == "empty" else function
                setattr(torch, name, self._recording("call_function", made, function))
            for name in _SHAPERS:  # inherited from the class below, and again so when they are deleted
                setattr(torch.Tensor, name, self._recording("call_method", name, getattr(torch.Tensor, name)))
            with TracedCalls(self.made, self._recording("call_function", operator.getitem, operator.getitem)):
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
        of_model = (x for x, _ in stored_tensors(root).values()) if isinstance(root, nn.Module) else ()
        self.made = MadeTensors(lambda x: self.create_proxy("call_function", torch.clone, (x,), {}), of_model)
        self._types = NumberTypes(root) if isinstance(root, nn.Module) else None
        answers = answered_types(root) if isinstance(root, nn.Module) else contextlib.nullcontext()
        with self._functional_calls(root), self._sizes_as_arguments(), self._own_backwards(), answers:
            return super().trace(root, concrete_args)


def _settle_attributes(tree: Any) -> None:
    """Let fields of values, ``out.boxes``, be read before a module is called with them: not in its scope."""
    torch.fx.node.map_aggregate(
        tree, lambda value: value.node if isinstance(value, torch.fx.proxy.Attribute) else value
    )


def _spelt_hook(hook: Any) -> str:
    line = definition_line(hook)
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"`{name}`{f' ({line})' if line else ''}"


def _is_tensor(value: Any) -> bool:
    """``torch.is_tensor`` while something is traced."""
    return isinstance(value, Tensor) or (isinstance(value, TracedProxy) and value.asked_class() is Tensor)


def _row_of(node: torch.fx.Node) -> Any:
    """The operator that a node calls, if it is in the table."""
    if node.op == "call_function":
        found = row_of_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    else:
        found = row_of_method(str(node.target), node.args, node.kwargs) if node.op == "call_method" else None
    return None if found is None else found[0]


def _known_length(node: torch.fx.Node) -> int | None:
    """How many tensors a call gives, where its arguments say so."""
    if node.target in ("chunk", torch.chunk):
        count = node.args[1] if len(node.args) > 1 else node.kwargs.get("chunks")
        return count if isinstance(count, int) else None
    if node.target in ("split", "split_with_sizes", torch.split, torch.split_with_sizes):
        sizes = node.args[1] if len(node.args) > 1 else next(iter(node.kwargs.values()), None)
        return len(sizes) if isinstance(sizes, (list, tuple)) else None
    row = _row_of(node)
    return None if row is None or len(row.results) == 1 else len(row.results)


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


def stored_tensors(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Buffers, and tensors that are plain attributes, each with torch's count of writes to it."""
    # What the trace before left in a buffer is no tensor.
    found = {path: x for path, x in model.named_buffers() if isinstance(x, Tensor)}
    for path, module in model.named_modules():
        found.update({f"{path}.{name}".lstrip("."): x for name, x in vars(module).items() if isinstance(x, Tensor)})
    return {path: (x, x._version) for path, x in found.items()}
