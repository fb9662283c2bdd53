"""Calls of a traced graph whose results nobody reads."""

from __future__ import annotations

from torch import fx

from horizon_plugin_pytorch.fx.container_writes import writes_container
from horizon_plugin_pytorch.quantization.passes.wrapped import is_wrapped
from horizon_plugin_pytorch.writing import writes, writes_by_name


def drop_unread(model: fx.GraphModule) -> None:
    """Erase what nobody reads.

    What writes somewhere, or is read by the next forward, stays, for others to follow or refuse; so does code that
    tracing does not enter, which may do more than compute a result.
    """
    model.graph.eliminate_dead_code(lambda node: node.is_impure() or _is_wanted(node) or is_wrapped(model, node))


def _is_wanted(node: fx.Node) -> bool:
    return "read_later" in node.meta or _writes(node)


def _writes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return writes_by_name(str(node.target)) or writes_container(str(node.target))
    is_function = node.op == "call_function" and callable(node.target)
    return is_function and ("out" in node.kwargs or writes(node.target, node.args, node.kwargs))  # type: ignore[arg-type]
