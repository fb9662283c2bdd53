"""Operators that run on the CPU, in float: what reaches them is dequantized, and what leaves them quantized."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fx.tracer import scope_of
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nn.operator_table import Call, NotBindable, row_named
from horizon_plugin_pytorch.nn.quantized.functional_modules import row_name_of
from horizon_plugin_pytorch.quantization.choice import Choice, inherited_choice
from horizon_plugin_pytorch.quantization.fusion import Role, can_fold, role_of
from horizon_plugin_pytorch.quantization.passes.region import (
    Region,
    called_path,
    is_fact,
    module_at,
    quantized_nodes,
    row_of_node,
    with_numbers,
)
from horizon_plugin_pytorch.quantization.passes.replace import binder_of
from horizon_plugin_pytorch.quantization.stubs import DeQuantStub, QuantStub

# The guide's heterogeneous models run these on the CPU although its tables give them to BAYES.
_CPU_OPERATORS = ("prelu", "selu")


class HybridConfig:
    """Which operators run on the CPU.

    Args:
        hybrid_dict: ``{"module_type": [classes], "module_name": [paths]}``; operators inside such modules count too.
    """

    def __init__(self, hybrid_dict: dict[str, list] | None = None) -> None:
        given = hybrid_dict or {}
        unknown = [key for key in given if key not in ("module_type", "module_name")]
        if unknown:
            raise QuantizationConfigError(f"hybrid_dict has unknown keys {unknown}; it takes module_type, module_name.")
        self.types, self.names = tuple(given.get("module_type", ())), tuple(given.get("module_name", ()))

    def check(self, model: nn.Module) -> None:
        """Insist that the model has the modules."""
        paths = {path for path, _ in model.named_modules()}
        missing = [name for name in self.names if name not in paths]
        if missing:
            raise QuantizationConfigError(
                f"hybrid_dict['module_name'] names {', '.join(map(repr, missing))}, which the model does not have."
            )

    def lists(self, model: nn.Module, node: fx.Node) -> bool:
        """Did the user say that a node runs on the CPU?"""
        path = called_path(model, node) or scope_of(node)
        while True:
            if path in self.names or (path and type(module_at(model, path)) in self.types):
                return True
            if not path:
                return False
            path = path.rpartition(".")[0]


def split_devices(model: Any, region: Region, choices: dict[str, Choice], march: March, config: HybridConfig) -> Region:
    """Take the operators that run on the CPU out of the quantized part, with stubs where they meet it.

    A stub before is called ``<node>_input_dequant``, one after it ``<node>_activation_post_process``.

    Returns:
        The quantized part, which may begin at an operator of the CPU.
    """
    config.check(model)
    nodes = [n for n in model.graph.nodes if n.op in ("call_module", "call_function", "call_method")]
    cpu = {n for n in nodes if _runs_on_cpu(model, n, region, march, config)}
    region = quantized_nodes(model, cpu - {n for n in cpu if n in region})
    for node in nodes:
        is_part = node.target is operator.getitem and node.args[0] in cpu
        if node in region and (is_part or _runs_on_cpu(model, node, region, march, config)):
            cpu.add(node)
    cpu = {n for n in cpu if n in region}
    readers = {n: [user for user in n.users if user in region and user not in cpu] for n in cpu}
    for node in cpu:
        region.remove(node)
    for node in nodes:
        if node in cpu and readers[node] and node not in _whole_of_parts(cpu):
            _quantize(model, node, region, choices)
    for node in nodes:
        if node in cpu:
            _dequantize(model, node, region)
    model.recompile()
    return region


def _whole_of_parts(cpu: set[fx.Node]) -> set[fx.Node]:
    """Nodes that give several tensors, of which each is taken by itself."""
    return {n for n in cpu if n.users and all(u in cpu and u.target is operator.getitem for u in n.users)}


def _runs_on_cpu(model: Any, node: fx.Node, region: Region, march: March, config: HybridConfig) -> bool:
    row = row_of_node(model, node)
    if is_fact(node) or (row is not None and row.name in ("quant", "dequant")):
        return False
    if config.lists(model, node):
        return True
    if node not in region or _is_folded(model, node):
        return False
    if row is not None and (row.name in _CPU_OPERATORS or row.support(march) is None):
        return True
    path = called_path(model, node)
    if node.op == "call_module" or path is not None:
        is_ours = row is not None or not type(module_at(model, str(path))).__module__.startswith("torch.")
        method = row_named(row_name_of(str(node.target), node.args[1:])) if node.op == "call_method" else None
        return not is_ours or (method is not None and method.support(march) is None)
    found = binder_of(node)
    if found is None:
        return not (node.target is getattr or getattr(node.target, "__horizon_leaf__", False))
    if found[0].qat is None:
        return False
    try:
        call = found[1](*with_numbers(model, node.args), **with_numbers(model, node.kwargs))
        if isinstance(call, Call):
            call.make()
    except (NotBindable, TypeError):
        return True
    return call is None


def _is_folded(model: Any, node: fx.Node) -> bool:
    """Is it a batch norm that fusion folds into the layer before it?"""
    source = node.args[0] if node.args else None
    if node.op != "call_module" or not isinstance(source, fx.Node) or source.op != "call_module":
        return False
    module, layer = module_at(model, str(node.target)), module_at(model, str(source.target))
    return role_of(module) is Role.BN and can_fold(layer, module)


def _quantize(model: Any, node: fx.Node, region: Region, choices: dict[str, Choice]) -> None:
    """A QuantStub after an operator of the CPU; it has the operator's qconfig."""
    # A call that is written once and runs again has one stub.
    known: dict[Any, str] = {} if isinstance(model, fx.GraphModule) else model.__dict__.setdefault("cpu_stubs", {})
    key = node.meta.get("site") or called_path(model, node)
    path = known.setdefault(key, f"{node.name}_activation_post_process")
    own = inherited_choice(choices, called_path(model, node) or scope_of(node)) or Choice(None)
    model.add_submodule(path, QuantStub().train(model.training))
    choices[path] = own.below()
    with model.graph.inserting_after(node):
        stub = model.graph.create_node("call_module", path, (node,), name=path)
    _mark(stub, node)
    node.replace_all_uses_with(stub, lambda user: user is not stub)
    node.meta["quantized_by"] = path
    region.add(stub)


def _dequantize(model: Any, node: fx.Node, region: Region) -> None:
    """A DeQuantStub before an operator of the CPU."""
    sources = [source for source in node.all_input_nodes if source in region]
    path = f"{node.name}_input_dequant"
    node.meta["runs_on_cpu"] = True
    if sources:
        model.add_submodule(path, DeQuantStub().train(model.training))
    for index, source in enumerate(sources):
        with model.graph.inserting_before(node):
            stub = model.graph.create_node("call_module", path, (source,), name=f"{path}_{index}")
        _mark(stub, node)
        node.replace_input_with(source, stub)


def _mark(stub: fx.Node, node: fx.Node) -> None:
    kept = ("nn_module_stack", "block")
    stub.meta = {**{key: node.meta[key] for key in kept if key in node.meta}, "made_by": "hybrid"}
    stub.stack_trace = node.stack_trace
