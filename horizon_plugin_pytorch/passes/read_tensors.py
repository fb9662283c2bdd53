"""Parameters and buffers of layers that the model's own code reads, beside the layer that has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.capture.region import Region, is_fact, value_inputs, value_of
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.operators.table import Kind
from horizon_plugin_pytorch.torch_functions import FILLING_METHODS, ZERO_FILLING_METHODS

HOME = "_generated_home"
_NEW = (*FILLING_METHODS, *ZERO_FILLING_METHODS)


def is_read(node: fx.Node) -> bool:
    """Does the model compute with the numbers of a tensor, and not only ask for its shape, type or device?"""
    return any(node in value_inputs(user) and user.target not in _NEW and not is_fact(user) for user in node.users)


def answer_facts(model: fx.GraphModule) -> None:
    """Let a traced graph know types and shapes of the model's tensors, and ask for their device elsewhere.

    A layer may be fused into another, and then its tensors are not there any more; a converted one has integers, and
    ``x.to(self.fc.weight.dtype)`` would turn to these. The device can change, so it is that of a tensor of its own.
    """
    for node in [n for n in model.graph.nodes if n.op == "get_attr" and isinstance(value_of(model, n), Tensor)]:
        value = value_of(model, node)
        for user in list(node.users):
            if is_fact(user) and user.args[0] is node:
                name = str(user.args[1]) if user.target is getattr else ""
                if name == "device" or user.target == "get_device":
                    user.replace_input_with(node, _home(model, node))
                else:
                    ask = getattr(value, name or str(user.target))
                    _replace(model, user, ask if name else ask(*user.args[1:], **user.kwargs))
            elif value.dtype == torch.float32 and _takes_after(user, node):
                user.replace_input_with(node, _home(model, node))
        if not node.users:
            model.graph.erase_node(node)
    model.recompile()


def answer_types(model: fx.GraphModule, region: Region) -> None:
    """Let a traced graph know that real numbers are float32 to the user's code: ``torch.zeros(3, dtype=x.dtype)``.

    A quantized tensor says how it is stored instead, which no function of torch takes.
    """
    types = {Kind.QUANTIZED: torch.float32, Kind.BOOL: torch.bool}
    for node in list(model.graph.nodes):
        if node.op == "call_function" and node.target is getattr and node.args[1] == "dtype":
            kinds = region.kinds(node.args[0])
            if len(kinds) == 1 and kinds[0] in types:
                region.remove(node)
                _replace(model, node, types[kinds[0]])
    model.recompile()


def _takes_after(user: fx.Node, node: fx.Node) -> bool:
    """Does a call give something of the type and device of a tensor?"""
    is_like = user.target in ("to", "type_as") and node not in value_inputs(user)
    return user.op == "call_method" and (is_like or user.target in _NEW)


def _home(model: fx.GraphModule, node: fx.Node) -> fx.Node:
    """A float tensor that is always there, on the model's device."""
    if not hasattr(model, HOME):
        model.register_buffer(HOME, torch.zeros((), device=value_of(model, node).device), persistent=False)
    with model.graph.inserting_before(node):
        return model.graph.create_node("get_attr", HOME)


def _replace(model: fx.GraphModule, node: fx.Node, value: Any) -> None:
    """Put a number, a type or a shape in place of a node that asks for it."""
    for user in list(node.users):
        put = lambda n: value if n is node else n  # noqa: E731
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), put)
    model.graph.erase_node(node)


def mark_reads(model: Any) -> None:
    """Tell layers which of their tensors the model reads for itself, as in ``x @ self.embedding.weight.t()``."""
    for node in model.graph.nodes:
        owner, _, name = str(node.target).rpartition(".")
        if node.op == "get_attr" and is_read(node) and isinstance(value_of(model, node), Tensor):
            module = model.get_submodule(owner)
            if isinstance(module, QATModule):
                module.read_tensors = (*module.read_tensors, name)


def keep_reads(quantized: nn.Module, module: QATModule) -> None:
    """Give a converted layer the float tensors that the model reads, beside its integers."""
    stored = quantized._buffers.get("weight")
    for name in dict.fromkeys(module.read_tensors):
        is_stored = name == "weight" and stored is not None and not stored.is_floating_point()
        kept = "float_weight" if is_stored else name
        if kept not in quantized._buffers or quantized._buffers[kept] is None:
            quantized.register_buffer(kept, getattr(module, name).detach().clone(), persistent=False)


def read_float(model: fx.GraphModule) -> None:
    """Let a converted graph read the float weights, and not the integers."""
    is_other = False
    for node in model.graph.nodes:
        owner, _, name = str(node.target).rpartition(".")
        if node.op == "get_attr" and name == "weight" and "float_weight" in model.get_submodule(owner)._buffers:
            node.target, is_other = f"{owner}.float_weight", True
    if is_other:
        model.recompile()
