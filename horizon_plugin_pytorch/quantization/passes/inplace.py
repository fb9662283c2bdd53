"""Operators that write to their input: in the graph, later readers of that input read the result instead."""

from __future__ import annotations

import operator

from torch import fx, nn

from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at, source_line
from horizon_plugin_pytorch.fx.tracer import scope_of
from horizon_plugin_pytorch.quantization.passes.region import module_at

_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv}
_SAME_MEMORY = {
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze", "chunk", "split",
    "narrow", "select", "expand", "t", "getitem", "unbind", "view_as", "movedim", "swapaxes", "contiguous", "detach",
    "to", "dropout", "expand_as", "reshape_as", "split_with_sizes", "tensor_split", "moveaxis", "swapdims",
    "hsplit", "vsplit", "dsplit", "diagonal", "unfold", "ravel", "adjoint", "broadcast_to", "T", "mT", "data",
}  # fmt: skip
_SAME_MEMORY_MODULES = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.Flatten,
    nn.Unflatten,
)


def _name(node: fx.Node) -> str:
    if node.target is getattr:
        return str(node.args[1])
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


def _shares_memory(model: fx.GraphModule, node: fx.Node) -> bool:
    """Can the node's result show the memory of its first argument?"""
    if node.op == "call_module":
        return isinstance(module_at(model, str(node.target)), _SAME_MEMORY_MODULES)
    return node.op in ("call_function", "call_method") and _name(node) in _SAME_MEMORY


def follow_writes(model: fx.GraphModule) -> fx.GraphModule:
    """Make readers after an in-place operator read its result.

    Raises:
        UnsupportedOperatorError: where the written tensor shares memory with a view that is read later, which
            tensors with a scale cannot express.
    """
    order = {node: index for index, node in enumerate(model.graph.nodes)}
    memory: dict[fx.Node, fx.Node] = {}
    for node in model.graph.nodes:
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        writes = first is not None and _writes(model, node)
        memory[node] = memory[first] if first is not None and (writes or _shares_memory(model, node)) else node
        if first is None or not writes:
            continue
        others = [n for n, m in memory.items() if m is memory[node] and n not in (node, first)]
        if any(order[user] > order[node] for other in others for user in other.users):
            raise UnsupportedOperatorError(
                f"`{_name(node)}` {at(scope_of(node), source_line(node.stack_trace))} changes a tensor in place whose "
                "memory another tensor shows, and that one is read later. Write it without in-place operators, as in "
                "`x = x + 1`."
            )
        for user in [user for user in first.users if order[user] > order[node]]:
            user.replace_input_with(first, node)
    model.recompile()
    return model
