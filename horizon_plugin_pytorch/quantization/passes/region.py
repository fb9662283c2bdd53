"""Which part of the graph is quantized: what lies between QuantStub and DeQuantStub."""

from __future__ import annotations

from torch import fx, nn

from horizon_plugin_pytorch.nn.operator_table import row_of_module

_FACTS = {"size", "dim", "numel", "stride", "get_device", "ndimension", "nelement"}


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path."""
    return model.get_submodule(path)


def is_fact(node: fx.Node) -> bool:
    """Does the node ask about a tensor (its shape, its device) rather than compute with it?"""
    if node.op == "call_method":
        return node.target in _FACTS
    return node.op == "call_function" and node.target is getattr


def quantized_nodes(model: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose results carry a scale."""
    found: set[fx.Node] = set()
    for node in model.graph.nodes:
        if node.op == "call_module":
            row = row_of_module(type(module_at(model, node.target)))
            if row is not None and row.name == "quant":
                found.add(node)
                continue
            if row is not None and row.name == "dequant":
                continue
        if node.op in ("placeholder", "get_attr", "output") or is_fact(node):
            continue
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
