"""Two ONNX files of a model compared, which is how a count of the example inputs is found in them."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch.export.onnx_dynamic import place_of


def first_difference(file: Any, other: Any) -> str | None:
    """The place of the first node that is another one, or reads another constant; None if there is none."""
    graph, theirs = file.graph, other.graph
    constants, others = ({x.name: x.SerializeToString() for x in g.initializer} for g in (graph, theirs))
    changed = {name for name, stored in constants.items() if others.get(name) != stored}
    for position, node in enumerate(graph.node):
        known = theirs.node[position : position + 1]
        if not known or known[0].SerializeToString() != node.SerializeToString() or not changed.isdisjoint(node.input):
            return place_of(node)
    return place_of(theirs.node[len(graph.node)]) if len(theirs.node) > len(graph.node) else None
