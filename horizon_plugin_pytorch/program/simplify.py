"""Fused operators of a program written with simpler ones."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions

from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.program.builder import Builder, drop_unread
from horizon_plugin_pytorch.program.note import note_of, set_note, value_of
from horizon_plugin_pytorch.program.place import Places
from horizon_plugin_pytorch.program.program import Program
from horizon_plugin_pytorch.program.recorder import ProgramRecorder


def simplified(program: Program, operators: Collection[Any]) -> Program:
    """The same program with some operators written as torch defines them, by simpler operators.

    A fused kernel and its definition differ in the last bit.

    Args:
        operators: such as ``torch.ops.aten._safe_softmax``.
    """
    table = _definitions(tuple(operators))
    if not any(node.target in table for node in program.graph.nodes):
        return program
    graph, constants = fx.Graph(), dict(program.constants)
    found: dict[fx.Node, Any] = {}  # the new node of each old one, or several
    for node in program.graph.nodes:
        if node.target in table:
            inner, inner_constants = _definition(node, program, table)
            found[node] = _inlined(inner, inner_constants, node, graph, constants, found)
        elif node.target is operator.getitem and isinstance(found[node.args[0]], list):
            found[node] = found[node.args[0]][node.args[1]]
        else:
            found[node] = set_note(graph.node_copy(node, found.__getitem__), note_of(node))
    constants = drop_unread(graph, constants)
    return Program(
        program.name, graph, constants, program.input_paths, program.outputs, program.results, program.classes
    )


@functools.cache
def _definitions(operators: tuple[Any, ...]) -> Mapping[Any, Callable]:
    """As torch defines them; it goes through all operators that it knows."""
    return get_decompositions(operators)


class _Definitions(ProgramRecorder):
    """Records the definitions of operators instead of the operators."""

    def __init__(self, builder: Builder, place: tuple[str, str], table: Mapping[Any, Callable]) -> None:
        super().__init__(builder, _OnePlace(place))
        self._table = table

    def _computed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        definition = self._table.get(func)
        if definition is None and func._can_decompose():
            definition = func.decompose  # definitions also call operators that are made of others
        if definition is None:
            return super()._computed(func, args, kwargs)
        with self:
            return definition(*args, **kwargs)


class _OnePlace(Places):
    def __init__(self, place: tuple[str, str]) -> None:
        self._place = place

    def here(self) -> tuple[str, str]:
        return self._place


def _definition(node: fx.Node, program: Program, table: Mapping[Any, Callable]) -> tuple[fx.Graph, dict[str, Tensor]]:
    """A graph of the node's tensors that gives what it gives, recorded on zeros."""
    builder, note = Builder(), note_of(node)
    tensors: dict[fx.Node, Tensor] = {}
    for source in node.all_input_nodes:
        value = value_of(source)
        tensors[source] = torch.zeros(value.shape, dtype=value.dtype)
        builder.add_input(tensors[source], source.name)
    args, kwargs = fx.map_arg((node.args, node.kwargs), tensors.__getitem__)
    with torch.no_grad(), _Definitions(builder, (note.path, note.line), table):
        out = table[node.target](*args, **kwargs)  # type: ignore[index]
    builder.graph.output(tuple(builder.node_of(x) for x in tensors_of(out)))
    return builder.graph, builder.constants.tensors


def _inlined(
    inner: fx.Graph,
    inner_constants: dict[str, Tensor],
    node: fx.Node,
    graph: fx.Graph,
    constants: dict[str, Tensor],
    found: dict[fx.Node, Any],
) -> Any:
    """Copy a definition into a graph; the node of its result, or a list of them."""
    here: dict[fx.Node, fx.Node] = {}
    sources = iter(node.all_input_nodes)
    for step in inner.nodes:
        if step.op == "placeholder":
            here[step] = found[next(sources)]
        elif step.op == "output":
            results = [here[result] for result in step.args[0]]  # type: ignore[union-attr,index]
        elif step.op == "get_attr":
            name = f"{node.name}_{step.target}"
            constants[name] = inner_constants[str(step.target)]
            here[step] = set_note(graph.get_attr(name), note_of(step))
        else:
            here[step] = set_note(graph.node_copy(step, here.__getitem__), note_of(step))
    return results if note_of(node).value is None else results[0]
