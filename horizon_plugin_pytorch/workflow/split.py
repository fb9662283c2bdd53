"""A prepared or converted model cut into the parts that a chip computes and those that the CPU does."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.capture.graph_module import ObservedGraphModule, QuantizedGraphModule
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.qat.stubs import DeQuantStub
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.nn.quantized.quantize import DeQuantize

_CALLS = ("call_module", "call_function", "call_method")


def split_compilable_model(model: fx.GraphModule) -> fx.GraphModule:
    """The same model in parts: ``compilable_0``, ``non_compilable_1``, ``compilable_2``, ..., called one after another.

    The documents name it, and say that it splits a model into compilable and other sub-graphs; what it takes and gives
    is read out of that. Compilable is what lies between a QuantStub and a DeQuantStub, both included.

    Args:
        model: the result of `prepare_qat_fx`, also with ``hybrid=True``, or of `convert_fx`.

    Returns:
        A graph module whose children are the parts. They are the model's own modules, not copies.

    >>> import torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> net = nn.Sequential(nn.Flatten(), QuantWrapper(nn.Linear(4, 2)), nn.Softmax(1))
    >>> parts = split_compilable_model(prepare_qat_fx(net, {"": get_default_qconfig()}))
    >>> [name for name, _ in parts.named_children()]
    ['non_compilable_0', 'compilable_1', 'non_compilable_2']
    """
    if not isinstance(model, (ObservedGraphModule, QuantizedGraphModule)):
        raise TypeError(
            f"split_compilable_model takes the result of prepare_qat_fx or convert_fx, got {type(model).__name__}: "
            "only a traced model has a graph to cut."
        )
    levels = _levels(model)
    whole, parts = fx.Graph(), {}
    known = {n: whole.node_copy(n) for n in model.graph.nodes if n.op == "placeholder"}
    for index, level in enumerate(sorted(set(levels.values()))):
        nodes = [node for node, of_node in levels.items() if of_node == level]
        name = f"{'non_' if level % 2 else ''}compilable_{index}"
        inputs, outputs = _ends(nodes)
        parts[name] = fx.GraphModule(model, _part(nodes, inputs, outputs), name)
        call = whole.call_module(name, tuple(known[node] for node in inputs))
        if len(outputs) == 1:
            known[outputs[0]] = call
        else:
            known.update({node: whole.call_function(operator.getitem, (call, i)) for i, node in enumerate(outputs)})
    output = next(node for node in model.graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        if node not in known:  # a parameter or buffer that the model gives as it is
            known[node] = whole.node_copy(node)
    whole.node_copy(output, known.__getitem__)
    root = {str(node.target): _value(model, str(node.target)) for node in whole.nodes if node.op == "get_attr"}
    return fx.GraphModule({**root, **parts}, whole, model._get_name())


def _ends(nodes: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What nodes read of others, and which of them others read; parameters, buffers and modules are not handed over."""
    own = set(nodes)
    sources = (source for node in nodes for source in node.all_input_nodes)
    inputs = [source for source in sources if source not in own and source.op != "get_attr"]
    outputs = [node for node in nodes if any(user not in own for user in node.users)]
    return list(dict.fromkeys(inputs)), outputs


def _part(nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in known:
                known[source] = graph.node_copy(source)
        known[node] = graph.node_copy(node, known.__getitem__)
    results = tuple(known[node] for node in outputs)
    graph.output(results[0] if len(results) == 1 else results)
    return graph


def _levels(model: fx.GraphModule) -> dict[fx.Node, int]:
    """A number for each node, no smaller than those of its inputs: even for compilable nodes, odd for others."""
    levels: dict[fx.Node, int] = {}
    quantized: set[fx.Node] = set()  # what gives quantized numbers
    for node in model.graph.nodes:
        if node.op not in _CALLS:
            continue
        module = _module_of(model, node)
        is_ours = isinstance(module, (QATModule, QuantizedModule))
        is_compilable = is_ours or any(source in quantized for source in node.all_input_nodes)
        if is_compilable and not isinstance(module, (DeQuantStub, DeQuantize)):
            quantized.add(node)
        lowest = max((levels[source] for source in node.all_input_nodes if source in levels), default=0)
        levels[node] = lowest if lowest % 2 == int(not is_compilable) else lowest + 1
    return levels


def _module_of(model: nn.Module, node: fx.Node) -> Any:
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    owner = node.args[0] if node.op == "call_method" and node.args else None
    return _value(model, str(owner.target)) if isinstance(owner, fx.Node) and owner.op == "get_attr" else None


def _value(model: nn.Module, path: str) -> Any:
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name)
    return value
