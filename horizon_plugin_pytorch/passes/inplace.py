"""Operators that write to their input: in the graph, later readers of that input read the result instead."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from horizon_plugin_pytorch.capture.container_writes import CONTAINER_REMEDY, is_of_container
from horizon_plugin_pytorch.capture.region import is_size, module_at
from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at, source_line
from horizon_plugin_pytorch.operators.table import row_of_module
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.torch_functions import SAME_MEMORY, SAME_MEMORY_MODULES, is_metadata, is_metadata_name
from horizon_plugin_pytorch.writing import IN_PLACE_OPERATORS, module_writes, writes, writes_by_name


def call_name(node: fx.Node) -> str:
    """The name of the function or method that a node calls, or of the attribute that it reads."""
    if node.target is getattr:
        return str(node.args[1])
    name = str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return getattr(getattr(node.target, "__self__", None), "__name__", name) if name == "__get__" else name


def call_writes(node: fx.Node) -> bool:
    """Does a function or method change its first argument?"""
    if node.op == "call_method":
        return writes_by_name(str(node.target))
    return node.op == "call_function" and writes(node.target, node.args, node.kwargs)  # type: ignore[arg-type]


def _writes(model: fx.GraphModule, node: fx.Node) -> bool:
    """Does the node change its first argument?"""
    if node.op == "call_module":
        return module_writes(module_at(model, str(node.target)))
    return call_writes(node)


def _shares_memory(model: fx.GraphModule, node: fx.Node) -> bool:
    """Can the node's result show the memory of its first argument?"""
    if node.op == "call_module":
        module = module_at(model, str(node.target))
        row = row_of_module(type(module))  # float stubs give back what they get
        return isinstance(module, SAME_MEMORY_MODULES) or (row is not None and row.is_stub)
    if node.op not in ("call_function", "call_method") or call_name(node) not in SAME_MEMORY:
        return False
    return not (node.target is operator.getitem and _has_list(node.args[1]))


def _has_list(index: Any) -> bool:
    """Does an index have a list of positions, which are copied?"""
    return isinstance(index, list) or (isinstance(index, tuple) and any(isinstance(part, list) for part in index))


def _part(node: fx.Node) -> tuple[Any, int] | None:
    """The tensor, or tuple of tensors, and the index that a node takes of it."""
    if node.target is operator.getitem and type(node.args[1]) is int:
        return node.args[0], node.args[1]
    return None


def _are_apart(a: tuple[Any, int] | None, b: tuple[Any, int] | None) -> bool:
    """Are these different parts of one tensor, as of ``q, k, v = qkv.chunk(3)``?"""
    if a is None or b is None or a[0] is not b[0]:
        return False
    return a[1] != b[1] and (a[1] < 0) == (b[1] < 0)


def _reads_before_write_back(order: dict[fx.Node, int], whole: fx.Node, part: fx.Node) -> bool:
    """Is `whole` read after `part` was written to? In ``x[0] += y`` it is not: ``x[0] = part`` is the next call."""
    readers = [user for user in whole.users if order[user] > order[part] and not asks_only(user)]
    first = min(readers, key=order.__getitem__, default=None)
    is_written_back = first is not None and first.target is operator.setitem and first.args[::2] == (whole, part)
    return bool(readers) and not (is_written_back and _source(part).args == first.args[:2])  # type: ignore[union-attr]


def asks_only(node: fx.Node) -> bool:
    """Does a node ask for a shape, a device or the like, and for no value?"""
    if node.op not in ("call_function", "call_method"):
        return False
    is_attribute = node.target is getattr or getattr(node.target, "__name__", "") == "__get__"
    if is_attribute or isinstance(node.target, str):
        return is_metadata_name(call_name(node))
    return is_metadata(node.target)


def _source(part: fx.Node) -> fx.Node:
    """What a node was before it was written to."""
    while notes(part).writes and isinstance(part.args[0], fx.Node):
        part = part.args[0]
    return part


def follow_writes(model: fx.GraphModule) -> fx.GraphModule:
    """Make readers after an in-place operator read its result.

    Raises:
        UnsupportedOperatorError: where the written tensor shares memory with a view that is read later, which
            tensors with a scale cannot express.
    """
    order = {node: index for index, node in enumerate(model.graph.nodes)}
    memory: dict[fx.Node, fx.Node] = {}
    sharing: dict[fx.Node, list[fx.Node]] = {}  # nodes that show the memory of each
    parts: dict[fx.Node, tuple[Any, int] | None] = {}
    for node in model.graph.nodes:
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if first is not None and node.target in IN_PLACE_OPERATORS and is_size(first):
            node.target = IN_PLACE_OPERATORS[node.target]  # a number is not written to
        is_write = first is not None and _writes(model, node)
        memory[node] = memory[first] if first is not None and (is_write or _shares_memory(model, node)) else node
        sharing.setdefault(memory[node], []).append(node)
        parts[node] = _part(node) or (parts[first] if first is not None and memory[node] is not node else None)
        if first is None or not is_write:
            continue
        notes(node).writes = True
        others = [n for n in sharing[memory[node]] if n not in (node, first) and not _are_apart(parts[n], parts[node])]
        is_stale = any(_reads_before_write_back(order, other, node) for other in others)
        where = at(notes(node).scope, source_line(node.stack_trace)) if is_stale else ""
        if is_stale and is_of_container(node):
            raise UnsupportedOperatorError(f"`{call_name(node)}` {where} {CONTAINER_REMEDY}")
        if is_stale:
            raise UnsupportedOperatorError(
                f"`{call_name(node)}` {where} changes a tensor in place whose memory another tensor shows, "
                "and that one is read later. Write it without in-place operators, as in `x = x + 1`."
            )
        for user in [user for user in first.users if order[user] > order[node]]:
            user.replace_input_with(first, node)
    model.recompile()
    return model
