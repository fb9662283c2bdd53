"""Calls of a traced graph whose results nobody reads."""

from __future__ import annotations

from torch import fx

from horizon_plugin_pytorch.capture.container_writes import writes_container
from horizon_plugin_pytorch.capture.wrapped import is_wrapped
from horizon_plugin_pytorch.passes.inplace import call_writes
from horizon_plugin_pytorch.runtime.node_notes import notes


def drop_unread(model: fx.GraphModule) -> None:
    """Erase what nobody reads.

    What writes somewhere, or is read by the next forward, stays, for others to follow or refuse; so does code that
    tracing does not enter, which may do more than compute a result.
    """
    model.graph.eliminate_dead_code(lambda node: node.is_impure() or _is_wanted(node) or is_wrapped(model, node))


def _is_wanted(node: fx.Node) -> bool:
    is_into_container = node.op == "call_method" and writes_container(str(node.target))
    is_into_out = node.op == "call_function" and "out" in node.kwargs
    return notes(node).read_later is not None or is_into_container or is_into_out or call_writes(node)
