"""A program under construction: tensors of a run become nodes."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, fx

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.program.constants import Constants
from horizon_plugin_pytorch.program.memory import (
    Key,
    axes_in_memory,
    functional_form,
    is_shared,
    memory_of,
    operands,
    plain,
    shows_all,
    tensor_key,
    without_outputs,
    written_arguments,
)
from horizon_plugin_pytorch.program.note import Note, Quantization, Value, note_of, set_note, set_quantization
from horizon_plugin_pytorch.qtensor import QTensor

_ATEN = torch.ops.aten


class Builder:
    """Nodes and constants of a program, found by the tensors of the run that is recorded.

    A tensor depends on the inputs, and is a node, if its memory holds numbers that were computed of them; else it is a
    constant. All tensors must stay alive while the program is built: memory that is used again would be mistaken.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.constants = Constants()
        self.place = ("", "")  # module and line of what is running
        self._nodes: dict[Key, fx.Node] = {}
        self._keys: defaultdict[Hashable, list[Key]] = defaultdict(list)  # of each memory
        self._origins: dict[Hashable, tuple[fx.Node, Tensor]] = {}  # the first tensor of each memory
        self._contents: dict[Hashable, fx.Node] = {}  # memory after a write: all its numbers along one axis
        self._attributes: dict[str, fx.Node] = {}
        self._constants_seen: dict[Key, fx.Node] = {}
        self._named: dict[Key, tuple[str, Tensor]] = {}  # names that constants have in the model
        self._formats: dict[Key, Quantization] = {}  # of constants
        self._others: dict[Key, list[fx.Node]] = defaultdict(list)  # nodes of one tensor with several scales

    def name_constants(self, tensors: dict[str, Tensor]) -> None:
        """Let parameters and buffers be called as in the model."""
        for name, x in tensors.items():
            self._named[tensor_key(x)] = (name, x)

    def add_input(self, x: Tensor, name: str) -> fx.Node:
        """A tensor that the program is given."""
        node = set_note(self.graph.placeholder(name), Note(value=Value.of(plain(x))))
        self.bind(x, node)
        if isinstance(x, QTensor):
            self.see(x)
        return node

    def release(self) -> None:
        """Forget the tensors of the run; the program is complete."""
        for known in (self._nodes, self._origins, self._named, self._contents, self._constants_seen):
            known.clear()

    def is_data(self, x: Tensor) -> bool:
        """Does a tensor depend on the inputs?"""
        memory = memory_of(x)
        return memory in self._origins or memory in self._contents

    def see(self, x: QTensor, here: Callable[[], tuple[str, str]] | None = None) -> None:
        """Note the scale and format of a tensor that the model computes with; `here` finds the module and the line."""
        key, found = tensor_key(x), Quantization.of(x)
        node = self._nodes.get(key)
        if node is None:
            self._formats[key] = found
            return
        known = note_of(node).value
        if known is not None and known.quantization is None:
            set_quantization(node, found)
        elif known is not None and known.quantization is not None and not known.quantization.is_same(found):
            self._nodes[key] = self._with_format(key, node, found, here)

    def _with_format(
        self, key: Key, node: fx.Node, wanted: Quantization, here: Callable[[], tuple[str, str]] | None
    ) -> fx.Node:
        """The same integers with another scale: a product with a number keeps them."""
        others = self._others[key] or self._others[key] + [node]
        self._others[key] = others
        for other in others:
            value = note_of(other).value
            if value is not None and value.quantization is not None and value.quantization.is_same(wanted):
                return other
        alias = self._call(_ATEN.alias.default, (node,), {}, name=f"{node.name}_scaled")
        path, line, value = note_of(node).path, note_of(node).line, note_of(node).value
        assert value is not None
        set_note(alias, Note(*(here() if here is not None else (path, line)), Value(value.shape, value.dtype, wanted)))
        others.append(alias)
        return alias

    def keep_constants(self, x: Tensor) -> None:
        """Keep constants as they are: this tensor, which shows their memory, is about to be written to."""
        memory = memory_of(x)
        self.constants.keep(x)
        self._constants_seen = {key: node for key, node in self._constants_seen.items() if key[0] != memory}

    # -- reading ---------------------------------------------------------------------------------------------------

    def node_of(self, x: Tensor, hint: str = "constant") -> fx.Node:
        """The node that gives a tensor; a constant becomes one when it is first asked for."""
        key = tensor_key(x)
        if key in self._nodes:
            return self._nodes[key]
        if not self.is_data(x) and is_shared(x):
            return self._constant(plain(x).detach().clone(), key, hint)
        if key in self._constants_seen:
            return self._constants_seen[key]
        if not self.is_data(x):
            node = self._constants_seen[key] = self._constant(x, key, hint)
            return node
        x = plain(x)
        content = self._content(x)
        if x.is_contiguous() and shows_all(x):
            node = self._call(_ATEN.reshape.default, (content, list(x.shape)), {})
        else:
            node = self._call(
                _ATEN.as_strided.default, (content, list(x.shape), list(x.stride()), x.storage_offset()), {}
            )
        self.bind(x, set_note(node, Note(*self.place, Value.of(x))))
        return node

    def _constant(self, x: Tensor, key: Key, hint: str) -> fx.Node:
        x = plain(x).detach()
        if key in self._named:
            hint = self._named[key][0]
        elif self.place[0]:
            hint = f"{self.place[0]}.{hint}"
        name = self.constants.name_of(x, hint.replace(".", "_"))
        node = self._attributes.get(name)
        if node is None:
            node = self._attribute(name, x)
        if key in self._formats and note_of(node).value.quantization is None:  # type: ignore[union-attr]
            set_quantization(node, self._formats[key])
        return node

    def _attribute(self, name: str, x: Tensor) -> fx.Node:
        self._attributes[name] = set_note(self.graph.get_attr(name), Note(*self.place, Value.of(x)))
        return self._attributes[name]

    def _content(self, x: Tensor) -> fx.Node:
        """All numbers of a tensor's memory along one axis, in the order in which they lie there."""
        memory = memory_of(x)
        if memory in self._contents:
            return self._contents[memory]
        if memory not in self._origins:  # a constant that is about to be written to
            size = x.untyped_storage().nbytes() // x.element_size()
            name = self.constants.name_of(x.as_strided((size,), (1,), 0).detach().clone(), "memory")
            return self._attributes.get(name) or self._attribute(name, self.constants.tensors[name])
        node, origin = self._origins[memory]
        if not shows_all(origin) or origin.dtype != x.dtype:
            raise ExportError(
                f"a tensor of shape {tuple(x.shape)} is written to, or read after a write, whose memory is larger than "
                f"what the model computed there ({tuple(origin.shape)}, {origin.dtype}). Write to a copy: `x.clone()`."
            )
        axes = axes_in_memory(origin)
        if axes != list(range(origin.dim())):
            node = self._call(_ATEN.permute.default, (node, axes), {})
            set_note(node, Note(*self.place, Value.of(origin.permute(axes))))
        node = self._call(_ATEN.reshape.default, (node, [-1]), {})
        return set_note(node, Note(*self.place, Value((origin.numel(),), origin.dtype)))

    # -- computing -------------------------------------------------------------------------------------------------

    def add(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """An operator that computes new tensors of others."""
        if isinstance(out, Tensor) and tensor_key(out) in self._nodes and _shows_memory(func):
            return  # the same tensor again
        node = self._call(func, *self._arguments(func, args, kwargs))
        self._bind_results(out, node)

    def write(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator that writes to its arguments, as one that gives new values."""
        if torch.Tag.inplace_view in func.tags and functional_form(func) is not None:
            node = self._call(functional_form(func), *self._arguments(func, args, kwargs))
            out = func(*args, **kwargs)
            self._bind_results(out, node)
            return out
        form, targets = functional_form(func), [plain(x) for x in written_arguments(func, args, kwargs)]
        if form is None:
            raise ExportError(f"`{func._schema.name}` writes to a tensor, and has no form that gives a new one.")
        kept, options = without_outputs(func, args, kwargs)
        results = form(*kept, **options)
        contents = [self._content(x) for x in targets]
        node = self._call(form, *self._arguments(form, kept, options))
        news = self._results(results, node)
        for x in targets:
            self.keep_constants(x)
        out = func(*args, **kwargs)
        for x, content, (new, result) in zip(targets, contents, news, strict=True):
            if result.dtype != x.dtype:
                new = self._call(_ATEN._to_copy.default, (new,), {"dtype": x.dtype})
                set_note(new, Note(*self.place, Value.of(x)))
            self._replace(x, content, new)
        return out

    def _replace(self, x: Tensor, content: fx.Node, new: fx.Node) -> None:
        """Let a tensor be a new value, and all that shows its memory read it."""
        memory = memory_of(x)
        if x.is_contiguous() and shows_all(x):
            content = self._call(_ATEN.reshape.default, (new, [-1]), {})
        else:
            where = (list(x.shape), list(x.stride()), x.storage_offset())
            content = self._call(_ATEN.as_strided_scatter.default, (content, new, *where), {})
        size = x.untyped_storage().nbytes() // x.element_size()
        self._contents[memory] = set_note(content, Note(*self.place, Value((size,), x.dtype)))
        for key in self._keys.pop(memory, ()):
            self._nodes.pop(key, None)
            self._others.pop(key, None)
        self.bind(x, new)

    def _call(self, func: Any, args: tuple, kwargs: dict[str, Any], name: str = "") -> fx.Node:
        name = name or self.name_for(func, self.place[0])
        node = self.graph.create_node("call_function", func, args, kwargs, name)
        return set_note(node, Note(*self.place))

    @staticmethod
    def name_for(func: Any, path: str) -> str:
        """What a node of a module's operator is called."""
        label = func._schema.name.split("::")[1]
        return (f"{path}.{label}" if path else label).replace(".", "_")

    def _arguments(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        names = [argument.name for argument in func._schema.arguments]
        nodes = tuple(self._argument(value, name) for value, name in zip(args, names, strict=False))
        return nodes, {name: self._argument(value, name) for name, value in kwargs.items()}

    def _argument(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value, name)
        if isinstance(value, (list, tuple)):
            parts = [self._argument(part, name) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        return value

    def _bind_results(self, out: Any, node: fx.Node) -> None:
        for result, x in self._results(out, node):
            self.bind(x, result)

    def _results(self, out: Any, node: fx.Node) -> list[tuple[fx.Node, Tensor]]:
        """The tensors that a node gives, each with a node of its own."""
        if isinstance(out, Tensor):
            return [(set_note(node, Note(*self.place, Value.of(plain(out)))), out)]
        found = []
        set_note(node, Note(*self.place, parts=tuple(Value.of(plain(x)) for x in operands((out,), {}))))
        for index, part in enumerate(out if isinstance(out, (tuple, list)) else ()):
            if isinstance(part, (Tensor, tuple, list)):
                item = self.graph.create_node(
                    "call_function", operator.getitem, (node, index), {}, f"{node.name}_{index}"
                )
                found += self._results(part, set_note(item, Note(*self.place)))
        return found

    def bind(self, x: Tensor, node: fx.Node) -> None:
        """Let a node be what gives a tensor."""
        key, memory = tensor_key(x), memory_of(x)
        self._nodes[key] = node
        self._keys[memory].append(key)
        self._origins.setdefault(memory, (node, plain(x)))


def _shows_memory(func: Any) -> bool:
    """Does an operator show its argument's memory rather than compute anything?"""
    return any(result.alias_info is not None for result in func._schema.returns)


def drop_unread(graph: fx.Graph, constants: dict[str, Tensor]) -> dict[str, Tensor]:
    """Erase nodes that nothing reads; the constants that are left."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return {name: x for name, x in constants.items() if name in read}
