"""Graphs as plain values, which can be pickled however long they are."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch  # noqa: F401 - for the docstring's example
from torch import fx

from horizon_plugin_pytorch.runtime.node_notes import packed_notes, unpack_notes


@dataclass(frozen=True)
class _Reference:
    """Stands for a node in a pickled graph."""

    name: str


@dataclass(frozen=True)
class _Function:
    """Stands for a function that pickle would look for where it was made, and not where it is."""

    module: str
    name: str


def _pack_target(target: Any) -> Any:
    if "<locals>" not in getattr(target, "__qualname__", ""):
        return target
    name = target.__name__
    owners = ("torch.nn.functional", "torch")  # F.max_pool2d, say
    found = (o for o in owners if getattr(importlib.import_module(o), name, None) is target)
    owner = next(found, None)
    return target if owner is None else _Function(owner, name)


def _unpack_target(target: Any) -> Any:
    return getattr(importlib.import_module(target.module), target.name) if isinstance(target, _Function) else target


def pack(graph: fx.Graph) -> list[tuple]:
    """The graph's nodes as plain values."""

    def refer(value: Any) -> Any:
        name: Any = lambda node: _Reference(node.name)  # noqa: E731 - torch's type knows no references
        return fx.node.map_arg(value, name)

    return [
        (
            n.op,
            n.name,
            _pack_target(n.target),
            refer(n.args),
            refer(n.kwargs),
            packed_notes(n),
        )
        for n in graph.nodes
    ]


def unpack(nodes: list[tuple], cls: type[fx.Graph] = fx.Graph) -> fx.Graph:
    """The graph of packed nodes.

    >>> import pickle
    >>> graph = fx.symbolic_trace(lambda x: torch.nn.functional.max_pool2d(x, 2)).graph
    >>> len(unpack(pickle.loads(pickle.dumps(pack(graph)))).nodes) == len(graph.nodes)
    True
    """
    graph = cls()
    found: dict[str, fx.Node] = {}

    def resolve(value: Any) -> Any:
        return fx.node.map_aggregate(value, lambda leaf: found[leaf.name] if isinstance(leaf, _Reference) else leaf)

    for op, name, target, args, kwargs, packed in nodes:
        found[name] = graph.create_node(op, _unpack_target(target), resolve(args), resolve(kwargs), name)
        unpack_notes(found[name], packed)
    return graph


class PackedGraph(fx.Graph):
    """A graph that is pickled as a list: torch's own follows the links from node to node, as deep as it is long."""

    def __reduce__(self) -> tuple:
        return unpack, (pack(self), type(self))

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> PackedGraph:
        copied: Any = super().__deepcopy__(memo)
        copied.__class__ = type(self)
        return copied
