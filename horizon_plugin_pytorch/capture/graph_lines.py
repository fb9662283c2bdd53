"""What the lines of a graph's generated code stand for."""

from __future__ import annotations

import re

from torch import fx

from horizon_plugin_pytorch.errors import source_line
from horizon_plugin_pytorch.runtime.node_notes import notes

_ASSIGNED = re.compile(r"\s*(\w+)(?:\s*:[^=]*)?\s*=\s")


def places_of_lines(model: fx.GraphModule) -> dict[int, tuple[str, str]]:
    """For each line of the code that fx wrote, one for each node, the module and line that it was traced from.

    >>> from torch import nn
    >>> list(places_of_lines(fx.symbolic_trace(nn.Sequential(nn.ReLU()))).values())[-1]
    ('0', '')
    """
    nodes = {node.name: node for node in model.graph.nodes}
    found: dict[int, tuple[str, str]] = {}
    for number, text in enumerate(model.code.split("\n"), start=1):
        assigned = _ASSIGNED.match(text)
        node = nodes.get(assigned[1]) if assigned else None
        if node is not None:
            found[number] = notes(node).scope, source_line(node.stack_trace)
    return found
