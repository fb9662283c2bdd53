"""Which part of the graph is quantized: what lies between QuantStub and DeQuantStub."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from horizon_plugin_pytorch.nn.operator_table import row_of_module

_FACTS = {"size", "dim", "numel", "stride", "get_device", "ndimension", "nelement"}


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path."""
    return model.get_submodule(path)


def attribute_at(model: nn.Module, path: str) -> Any:
    """What a ``get_attr`` node reads: a module, parameter or buffer."""
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name)
    return value


def called_path(model: nn.Module, node: fx.Node) -> str | None:
    """The path of the module that a node calls, also for a FloatFunctional's method; None if it calls no module."""
    if node.op == "call_module":
        return str(node.target)
    if node.op == "call_method" and node.args and isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr":
        path = str(node.args[0].target)
        return path if isinstance(attribute_at(model, path), nn.Module) else None
    return None


def is_fact(node: fx.Node) -> bool:
    """Does the node ask about a tensor (its shape, its device) rather than compute with it?"""
    if node.op == "call_method":
        return node.target in _FACTS
    return node.op == "call_function" and node.target is getattr


def _is_size(node: fx.Node) -> bool:
    """Is it a number that depends on shapes only?"""
    sources = node.all_input_nodes
    return is_fact(node) or (node.op == "call_function" and bool(sources) and all(_is_size(s) for s in sources))


def is_constant(model: nn.Module, node: fx.Node) -> bool:
    """Is it a float tensor made of parameters and buffers, such as ``self.position[:, : x.shape[1]]``?"""
    if node.op == "get_attr":
        value = attribute_at(model, str(node.target))
        return isinstance(value, Tensor) and value.is_floating_point()
    if node.op not in ("call_function", "call_method") or is_fact(node):
        return False
    tensors = [source for source in node.all_input_nodes if not _is_size(source)]
    return bool(tensors) and all(is_constant(model, source) for source in tensors)


def quantized_nodes(model: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose results carry a scale: what comes after a QuantStub. Without any stub, all nodes that compute."""
    found: set[fx.Node] = set()
    sources = set() if has_stub(model) else {node for node in model.graph.nodes if node.op == "placeholder"}
    for node in model.graph.nodes:
        name = _row_name(model, node)
        if name == "quant":
            found.add(node)
        if name in ("quant", "dequant") or node.op in ("placeholder", "get_attr", "output") or is_fact(node):
            continue
        if any(source in found or source in sources for source in node.all_input_nodes):
            found.add(node)
    return found


def has_stub(model: fx.GraphModule) -> bool:
    """Does the model say where it is quantized?"""
    return any(_row_name(model, node) == "quant" for node in model.graph.nodes)


def _row_name(model: fx.GraphModule, node: fx.Node) -> str:
    row = row_of_module(type(module_at(model, str(node.target)))) if node.op == "call_module" else None
    return "" if row is None else row.name
