"""Names of modules that passes make, and QuantStubs that the user's model does not have."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.capture.region import is_constant, module_at, row_of_node
from horizon_plugin_pytorch.config.choice import Choice, inherited_choice
from horizon_plugin_pytorch.nn.stubs import QuantStub
from horizon_plugin_pytorch.operators.table import Kind, Operator
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.runtime.node_notes import inherit, notes

GENERATED = "_generated_"


def free_name(prep: Preparation, scope: str, operator: str) -> str:
    """A name for a generated module that nothing in the scope has: neither of an earlier pass, nor of the user's."""
    while True:
        index = prep.counters.get((scope, operator), 0)
        prep.counters[scope, operator] = index + 1
        name = f"{GENERATED}{operator}_{index}"
        if not has_attribute(prep.model, scope, name):
            return f"{scope}.{name}" if scope else name


def has_attribute(model: fx.GraphModule, scope: str, name: str) -> bool:
    """Does the module at a path have anything of that name? A dynamic block is not there before something is in it."""
    try:
        return hasattr(model.get_submodule(scope), name)
    except AttributeError:
        return False


def quantize_constants(prep: Preparation, node: fx.Node) -> None:
    """Parameters and buffers that meet quantized tensors get a QuantStub, except before a QuantStub and as indices."""
    model = prep.model
    row = row_of_node(model, node)
    if row is not None and row.is_quant:
        return
    indices = _indices(node) if row is not None and row.is_source else None
    counts = _counts(node, row)
    meets_scale = any(prep.region.has_scale(source) for source in node.all_input_nodes)
    for source in list(node.all_input_nodes):
        if meets_scale and source in counts and prep.region.kinds(source) == (Kind.INDEX,):
            insert_stub(prep, node, source, _outer(prep, node), "quantize positions")
            continue
        if source in prep.region or source is indices:
            continue
        is_number = is_constant(model, source) or (source in counts and is_constant(model, source, counts[source]))
        if not is_number or stays_real(model, node, source):
            continue
        insert_stub(prep, node, source, _outer(prep, node), "quantize constant")


def _outer(prep: Preparation, node: fx.Node) -> Choice:
    """The choice of the module that a node is in."""
    return (inherited_choice(prep.choices, notes(node).scope) or Choice(None)).below()


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _counts(node: fx.Node, row: Operator | None) -> dict[fx.Node, tuple[torch.dtype, ...]]:
    """Operands that may be integers or booleans and count as numbers, with those types."""
    counts = None if row is None else row.counts
    if counts is None:
        return {}
    args = node.args[1:] if node.op == "call_method" else node.args
    types = (*_INTEGERS, torch.bool) if counts.has_booleans else _INTEGERS
    found: list[fx.Node] = []
    fx.node.map_arg(args[counts.first : counts.end], lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return dict.fromkeys(found, types)


def _indices(node: fx.Node) -> Any:
    """The argument of an embedding that selects rows."""
    position, name = (1, "indices") if node.target is torch.embedding else (0, "input")
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


ASIDE = "_generated_stubs"


def insert_stub(
    prep: Preparation,
    node: fx.Node,
    source: fx.Node,
    choice: Choice,
    made_by: str,
    places: list[int] | None = None,
    requantizes: bool = False,
) -> None:
    """Put a QuantStub of that qconfig between a node and one of its inputs.

    Args:
        places: which leaves of the node's arguments; None means all that are `source`.
        requantizes: give integers the stub's format too, rather than let them pass.
    """
    model = prep.model
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    if places is None:
        places = [i for i, leaf in enumerate(leaves) if leaf is source]
    path = prep.known_stub(node, places[0])
    if not path:
        is_beside = node.op == "call_module" and not notes(node).is_wrapped
        scope = str(node.target).rpartition(".")[0] if is_beside else notes(node).scope
        scope = _home(model, scope)
        path = _stub_path(node, scope, places[0])
        if not path or has_attribute(model, *path.rpartition(".")[::2]):
            path = free_name(prep, scope, "quant")
        prep.keep_stub(node, places[0], path)
        made = QuantStub().train(model.training)
        made.requantizes, made.may_be_constant = requantizes, not requantizes
        model.add_submodule(path, made)
        prep.choices.setdefault(path, choice)
    with model.graph.inserting_before(node):
        stub = model.graph.call_module(path, (source,))
    made_notes = inherit(stub, node, made_by)
    made_notes.members, made_notes.is_made = (), True
    prep.region.add(stub)
    node.args, node.kwargs = pytree.tree_unflatten([stub if i in places else x for i, x in enumerate(leaves)], spec)


def _stub_path(node: fx.Node, scope: str, place: int) -> str:
    """The stub of a call in code that tracing does not enter; "" for other calls."""
    name = notes(node).generated_name
    return "" if name is None else f"{scope}.{GENERATED}quant_{name}_{place}".lstrip(".")


class Aside(nn.Module):
    """Has the generated stubs of an `nn.Sequential`, which runs all its children: as one of them it does nothing."""

    def forward(self, x: Any) -> Any:
        """The same."""
        return x


def _home(model: fx.GraphModule, scope: str) -> str:
    """Where a generated stub can be: not in a list, whose elements somebody runs one after the other."""
    lists = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    while scope and isinstance(model.get_submodule(scope), lists):
        scope = scope.rpartition(".")[0]
    if scope or not isinstance(model.get_submodule(""), lists):
        return scope
    if not has_attribute(model, "", ASIDE):
        model.add_submodule(ASIDE, Aside())
    return ASIDE


def stays_real(model: fx.GraphModule, node: fx.Node, source: fx.Node) -> bool:
    """Does the module that a node calls take this input as real numbers?"""
    row = row_of_node(model, node) if node.op == "call_module" else None
    if row is None or not row.real_inputs:
        return False
    names = inspect.signature(module_at(model, str(node.target)).forward).parameters
    others = [
        v for name, v in [*zip(names, node.args, strict=False), *node.kwargs.items()] if name not in row.real_inputs
    ]
    met: list[fx.Node] = []
    fx.node.map_arg(others, lambda other: met.append(other) or other)  # type: ignore[func-returns-value]
    return source not in met
