"""The graph of a prepared model as text, and what differs between two."""

from __future__ import annotations

import difflib
import os
import re
from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.notes import note_of
from horizon_plugin_pytorch.tables import Table

_HEADERS = ["opcode", "name", "target", "args", "kwargs"]
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def graph_text(graph: fx.Graph) -> str:
    """A graph as a table: one line a node; the same in every process."""
    rows = [[n.op, n.name, _target(n.target), *(_ADDRESS.sub("", str(x)) for x in (n.args, n.kwargs))]
            for n in graph.nodes]  # fmt: skip
    return Table(_HEADERS, rows).text() + "\n"


def graph_of(model: Any) -> fx.Graph | None:
    """The graph of a prepared model, whatever else it has under that name; None if it has none."""
    own = note_of(model, "graph") if isinstance(model, nn.Module) else None
    graph = getattr(model, "graph", None) if own is None else own
    return graph if isinstance(graph, fx.Graph) else None


def _target(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _lines(source: Any) -> list[str]:
    """The nodes of a prepared model, a graph or a file, without what depends on the width of columns."""
    if isinstance(source, (str, os.PathLike)):
        try:
            with open(source, encoding="utf-8") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"compare_graphs: {os.fspath(source)!r} is no text, and no fx_graph.txt.") from error
    else:
        graph = source if isinstance(source, fx.Graph) else graph_of(source)
        if graph is None:
            raise TypeError(
                f"compare_graphs takes models prepared by a graph method, or paths of fx_graph.txt; "
                f"`{type(source).__name__}` has no graph."
            )
        text = graph_text(graph)
    return [re.sub(r"\s{2,}", "  ", line.rstrip()) for line in text.splitlines()[2:]]


def compare_graphs(first: Any, second: Any) -> str:
    """What differs between the graphs of two prepares, as a diff of their nodes; empty if they are the same.

    Graphs that differ say that the forward took another way: find out whether that is meant, before a checkpoint goes
    from one to the other.

    Args:
        first, second: a model prepared by a graph method, or the path of an ``fx_graph.txt``.

    >>> from torch import nn
    >>> first = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    >>> compare_graphs(first, first)
    ''
    >>> print(compare_graphs(first, fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))))
    --- first
    +++ second
    @@ -2,2 +2,3 @@
     call_module  _0  0  (input_1,)  {}
    -output  output  output  (_0,)  {}
    +call_module  _1  1  (_0,)  {}
    +output  output  output  (_1,)  {}
    """
    diff = difflib.unified_diff(_lines(first), _lines(second), "first", "second", n=1, lineterm="")
    return "\n".join(diff)
