"""Graph modules that keep the attributes of the model they were made from."""

from __future__ import annotations

import copy
import inspect
import keyword
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from horizon_plugin_pytorch.capture.given import GUARD
from horizon_plugin_pytorch.capture.packing import pack, unpack
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.nn.quantized.module import require_float32
from horizon_plugin_pytorch.running import asked_by_forward
from horizon_plugin_pytorch.runtime.compiled import run_uncompiled
from horizon_plugin_pytorch.runtime.hooks import copy_hooks
from horizon_plugin_pytorch.runtime.leaf import bind_methods

_INTERNAL = {"_graph", "_code", "meta", "_tracer_cls", "_tracer_extras", *nn.Module().__dict__}
_MISSING = object()
_CONSTANT = "_tensor_constant"  # what torch calls tensors that the forward makes, as ``torch.tensor(0.5)``
_HOOKS = "_load_state_dict_pre_hooks"


def _rebuild(cls: type, class_name: str, state: dict, nodes: list[tuple]) -> Any:
    return _assemble(cls, class_name, state, unpack(nodes))


def _assemble(cls: type, class_name: str, state: dict, graph: fx.Graph) -> Any:
    hooks = state.pop(_HOOKS)  # one that torch binds to a module gets the new one
    root = nn.Module()
    root.__dict__.update(state)
    modes = {module: module.training for module in root.modules()}
    out = cls(root, graph, class_name)
    out.__dict__.update(state)  # also what the graph does not mention
    for module, mode in modes.items():  # a frozen batch norm stays frozen in a copy
        module.training = mode
    bind_methods(out)
    for hook, with_module in hooks:
        out._register_load_state_dict_pre_hook(hook, with_module=with_module)
    return out


def _state_of(model: nn.Module) -> dict[str, Any]:
    """What a copy takes; hooks without the module that torch binds them to, which is another one in the copy."""
    state = {name: value for name, value in model.__dict__.items() if name not in ("_graph", "_code")}
    return {**state, _HOOKS: [(wrapped.hook, wrapped.with_module) for wrapped in state[_HOOKS].values()]}


def _spell_keywords(graph: fx.Graph) -> None:
    """Let the code of a graph reach modules that are named like a word of Python, as ``branches.class``."""
    if not _keyword_targets(graph) or getattr(graph, "_spells_keywords", False):
        return
    graph._spells_keywords = True  # type: ignore[attr-defined]
    own = weakref.ref(graph)  # a copy of the graph takes the function with it, and must not keep this model alive
    graph.on_generate_code(
        lambda before: lambda lines: _spelt(before(lines) if before else lines, _keyword_targets(own()))
    )


def _keyword_targets(graph: fx.Graph | None) -> list[str]:
    if graph is None:
        return []
    targets = {node.target for node in graph.nodes if isinstance(node.target, str)}
    return [target for target in targets if not set(keyword.kwlist).isdisjoint(target.split("."))]


def _spelt(lines: list[str], targets: list[str]) -> list[str]:
    """Generated code in which paths with words of Python are read by `getattr`.

    >>> _spelt(["a = self.branches.class(x);  x = None"], ["branches.class"])
    ['a = getattr(self.branches, "class")(x);  x = None']
    """
    wrong = {_path(target, str.isidentifier): target for target in targets}
    if not wrong:
        return lines
    longest_first = sorted(wrong, key=len, reverse=True)
    found = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)")
    return [found.sub(lambda m: _path(wrong[m[1]], lambda n: n.isidentifier() and not keyword.iskeyword(n)), x)
            for x in lines]  # fmt: skip


def _path(target: str, is_name: Callable[[str], bool]) -> str:
    """How generated code reads an attribute: torch writes what is an identifier with a dot."""
    path = "self"
    for name in target.split("."):
        path = f"{path}.{name}" if is_name(name) else f'getattr({path}, "{name}")'
    return path


class GraphModuleWithAttr(torch.fx.GraphModule):
    """A `torch.fx.GraphModule` with the module tree, the attributes and the methods of the original model."""

    _source_class: type | None = None
    _is_written_later = False  # are more changes of the graph to come, before anybody runs it?

    def __init__(self, root: Any, graph: torch.fx.Graph, class_name: str = "GraphModule") -> None:
        super().__init__(root, graph, class_name)
        if isinstance(root, nn.Module):
            self._take_attributes(root)
            copy_hooks(self, root, of_users=True)
            bind_methods(self)
            self.train(root.training)

    def recompile(self) -> Any:
        """Write the code of the graph anew."""
        if self._is_written_later:
            return None
        _spell_keywords(self.graph)  # a pass may have put the first module below such a name
        return super().recompile()

    def _take_attributes(self, source: nn.Module) -> None:
        # torch rebuilds the tree from bare modules and only where the graph goes; users' containers stay as they are.
        for own, theirs in (
            (self._modules, source._modules),
            (self._parameters, source._parameters),
            (self._buffers, source._buffers),
        ):
            traced: dict[str, Any] = dict(own)  # also constants, which torch stores as buffers
            own.clear()
            own.update(theirs)  # type: ignore[arg-type]
            for name, value in traced.items():
                own.setdefault(name, value)
        # Tensors that the forward makes, or that are attributes only, are the code's and no part of a checkpoint, as in
        # a model that runs its own forward.
        self._non_persistent_buffers_set.update(source._non_persistent_buffers_set)
        self._non_persistent_buffers_set.update(name for name in self._buffers if name not in source._buffers)
        for name, value in source.__dict__.items():
            if name not in self.__dict__ and name not in _INTERNAL and name not in self._buffers:
                self.__dict__[name] = value
        source_class = type(source)
        if isinstance(source, GraphModuleWithAttr):
            self.__dict__["_source_class"] = source._source_class
        elif source_class is not nn.Module and not isinstance(source, torch.fx.GraphModule):
            self.__dict__["_source_class"] = source_class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        guard = self.__dict__.get(GUARD)
        if guard is not None:
            guard.check(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        for name in self._non_persistent_buffers_set:  # earlier versions saved them
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the user's model to wrapped code, which may ask ``isinstance(self, Net)`` or call `super`."""
        is_asked = asked_by_forward()
        return self.__dict__.get("_source_class") or type(self) if is_asked else type(self)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        vars(object)["__class__"].__set__(self, cls)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            source_class = self.__dict__.get("_source_class")
            if source_class is None or name.startswith("__"):
                raise
            member = inspect.getattr_static(source_class, name, _MISSING)
            if member is _MISSING:
                raise
            if not hasattr(member, "__get__"):
                return member
            return member.__get__(self, source_class)  # functions, static and class methods, properties

    def __deepcopy__(self, memo: dict) -> Any:
        cls = next(c for c in type(self).__mro__ if c in _STAGES)
        state = {name: copy.deepcopy(value, memo) for name, value in _state_of(self).items()}
        out = _assemble(cls, self._get_name(), state, copy.deepcopy(self.graph, {}))
        memo[id(self)] = out
        return out

    def __reduce__(self) -> tuple:
        # torch would trace the generated code again, through the FloatFunctionals and to a plain GraphModule.
        cls = next(c for c in type(self).__mro__ if c in _STAGES)
        return _rebuild, (cls, self._get_name(), _state_of(self), pack(self.graph))


# Functions: a method would share its name with what users call their own attributes.
def write_later(model: GraphModuleWithAttr) -> None:
    """Let passes change the graph without writing its code each time, until `write_now`; it is not run meanwhile."""
    model.__dict__["_is_written_later"] = True


def write_now(model: GraphModuleWithAttr) -> None:
    """Write the code of the graph after `write_later`."""
    model.__dict__.pop("_is_written_later", None)
    model.recompile()


class ObservedGraphModule(GraphModuleWithAttr):
    """A prepared model: observers and fake quantizers are in place."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_uncompiled(super().__call__, args, kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        require_float32(fn, "a prepared model")
        return super()._apply(fn, recurse)


class QuantizedGraphModule(GraphModuleWithAttr):
    """A converted model: integers only between Quantize and DeQuantize."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_uncompiled(super().__call__, args, kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        require_float32(fn, "a converted model")
        return super()._apply(fn, recurse)


_STAGES = (GraphModuleWithAttr, ObservedGraphModule, QuantizedGraphModule)  # torch makes a class for each graph
show_at(
    "quantization.fx.graph_module",
    GraphModuleWithAttr,
    write_later,
    write_now,
    ObservedGraphModule,
    QuantizedGraphModule,
)
