"""Operators that write to their input: in the graph, later readers of that input read the result instead."""

from __future__ import annotations

import operator

from torch import fx

from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at, source_line
from horizon_plugin_pytorch.fx.tracer import scope_of
from horizon_plugin_pytorch.quantization.passes.region import module_at

_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv}
_VIEWS = {
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze", "chunk", "split",
    "narrow", "select", "expand", "t", "getitem", "unbind", "view_as", "movedim", "swapaxes",
}  # fmt: skip


def _name(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _writes(model: fx.GraphModule, node: fx.Node) -> bool:
    """Does the node change its first argument?"""
    if node.op == "call_module":
        return bool(getattr(module_at(model, str(node.target)), "inplace", False))
    if node.op == "call_function" and node.target in _OPERATORS:
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node)
    return (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace"))


def _is_view(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and _name(node) in _VIEWS


def follow_writes(model: fx.GraphModule) -> fx.GraphModule:
    """Make readers after an in-place operator read its result.

    Raises:
        UnsupportedOperatorError: where the written tensor shares memory with a view that is read later, which
            tensors with a scale cannot express.
    """
    order = {node: index for index, node in enumerate(model.graph.nodes)}
    for node in model.graph.nodes:
        if not node.args or not isinstance(node.args[0], fx.Node) or not _writes(model, node):
            continue
        written = node.args[0]
        later = [user for user in written.users if order[user] > order[node]]
        aliases = [user for user in written.users if _is_view(user) and order[user] < order[node]]
        if _is_view(written) and isinstance(written.args[0], fx.Node):
            aliases.append(written.args[0])
        for alias in aliases:
            if any(order[user] > order[node] for user in alias.users):
                raise UnsupportedOperatorError(
                    f"`{_name(node)}` {at(scope_of(node), source_line(node.stack_trace))} changes a tensor in place "
                    "whose memory another tensor shows, and that one is read later. Write it without in-place "
                    "operators, as in `x = x + 1`."
                )
        for user in later:
            user.replace_input_with(written, node)
    model.recompile()
    return model
