"""Which part of the graph is quantized: what lies between QuantStub and DeQuantStub."""

from __future__ import annotations

import operator
from collections.abc import Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.capture.numbers import with_numbers
from horizon_plugin_pytorch.capture.proxies import write_into
from horizon_plugin_pytorch.capture.sizes import MAKERS, Rule, is_fact, is_size, settle
from horizon_plugin_pytorch.nn.quantized.functional_modules import FUNCTIONAL_METHODS, row_name_of
from horizon_plugin_pytorch.operators.table import (
    Kind,
    Operator,
    ScaleRule,
    Trait,
    row_named,
    row_of_function,
    row_of_method,
    row_of_module,
)
from horizon_plugin_pytorch.runtime.leaf import LeafCode
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.torch_functions import (
    FILLERS,
    FILLING_METHODS,
    REAL,
    RESULT_FIELDS,
    SHAPED_LIKE,
    ZERO_FILLERS,
    ZERO_FILLING_METHODS,
)

_FILLERS, _ZEROS = {*FILLERS, *FILLING_METHODS}, {*ZERO_FILLERS, *ZERO_FILLING_METHODS}
_CALLS = ("call_function", "call_method", "call_module")


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path; passes ask this often, and torch's `get_submodule` asks much itself."""
    module: Any = model.get_submodule("")
    try:
        for name in path.split(".") if path else ():
            module = module._modules[name]
    except KeyError:
        module = None
    return model.get_submodule(path) if module is None else module


def value_of(model: nn.Module, node: fx.Node) -> Any:
    """What a ``get_attr`` node gives: a module, parameter or buffer.

    A recorded one may be a tensor that only the user's code knows how to find.
    """
    noted = notes(node).value
    if noted is not None:
        return noted
    value: Any = model.get_submodule("")  # not the `graph` of a captured model: the user's module of that name
    for name in str(node.target).split("."):
        child = value._modules.get(name) if isinstance(value, nn.Module) else None
        value = getattr(value, name) if child is None else child
    return value


def computed_value(model: nn.Module, node: fx.Node) -> Any:
    """What a node gives that is computed of parameters and buffers alone."""
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return getattr(model.get_submodule(owner), name, notes(node).value)  # no attribute: a list has it
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: computed_value(model, source))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def called_path(model: nn.Module, node: fx.Node) -> str | None:
    """The path of the module that a node calls, also for a FloatFunctional's method; None if it calls no module."""
    if node.op == "call_module":
        return str(node.target)
    if node.op == "call_method" and node.args and isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr":
        return str(node.args[0].target) if isinstance(value_of(model, node.args[0]), nn.Module) else None
    return None


def is_code(model: nn.Module, node: fx.Node) -> bool:
    """Does a node call code that tracing did not enter?"""
    return node.op == "call_module" and isinstance(module_at(model, str(node.target)), LeafCode)


def operands(model: nn.Module, node: fx.Node) -> list[fx.Node]:
    """What a node computes with, in the order of its arguments; not the FloatFunctional whose method it calls."""
    is_functional = node.op == "call_method" and called_path(model, node) is not None
    found: list[fx.Node] = []
    args = node.args[1:] if is_functional else node.args
    fx.node.map_arg((args, node.kwargs), lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def value_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose numbers a node computes with, not only their shape or type."""
    inputs = node.all_input_nodes
    is_shaped = node.op == "call_method" and node.target in SHAPED_LIKE
    return inputs[:1] if is_shaped and node.args[:1] == tuple(inputs[:1]) else inputs


def is_filled(node: fx.Node) -> bool:
    """Does the node make numbers in the shape of a tensor, such as ``torch.ones_like(x)``?"""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in _ZEROS:  # float zeros are on every grid, and keep the scale
        return node.kwargs.get("dtype") not in (None, *REAL)
    return node.target in _FILLERS


def is_constant(model: nn.Module, node: fx.Node, types: tuple[torch.dtype, ...] = REAL) -> bool:
    """Is it a float tensor made of parameters, buffers and sizes, such as ``self.position[:, : x.shape[1]]``?

    In a recorded graph it is also what is made of integers of any origin, as rotations are of positions; and there it
    may be asked for other types.
    """
    is_known = notes(node).is_constant
    if is_known is not None:
        return is_known and notes(node).dtype in types
    is_integer = torch.int64 in types and settle(partial(_integer_rule, model, torch.bool in types), node)
    return is_integer or settle(partial(_constant_rule, model), node)


def _constant_rule(model: nn.Module, node: fx.Node) -> Rule:
    is_known = notes(node).is_constant
    if is_known is not None:
        return is_known and notes(node).dtype in REAL
    if node.op == "get_attr":
        value = value_of(model, node)
        return isinstance(value, Tensor) and value.is_floating_point()
    if node.op not in _CALLS or is_fact(node) or is_code(model, node):
        return False
    if is_filled(node):
        return node.kwargs.get("dtype") in (None, *REAL)
    is_module = called_path(model, node) is not None
    if is_module and _is_stub(model, node):
        return False
    tensors = [source for source in (operands(model, node) if is_module else value_inputs(node)) if not is_size(source)]
    if node.target in MAKERS:
        return not tensors
    if node.target in (torch.tensor, torch.as_tensor) and node.kwargs.get("dtype") in REAL:
        return not tensors
    has_float = False
    for source in tensors:
        is_float = yield source
        if not is_float and not settle(partial(_stored_rule, model), source):
            return False
        has_float = has_float or is_float
    return has_float


def _stored_rule(model: nn.Module, node: fx.Node) -> Rule:
    """Is it made of buffers of any type, such as the positions in ``self.table[self.index.view(-1)]``?"""
    if node.op == "get_attr":
        return isinstance(value_of(model, node), Tensor)
    if node.op not in ("call_function", "call_method"):
        return False
    tensors = [source for source in value_inputs(node) if not is_size(source)]
    for source in tensors:
        if not (yield source):
            return False
    return bool(tensors)


def _integer_rule(model: nn.Module, has_booleans: bool, node: fx.Node) -> Rule:
    """Is it a tensor of integers made of buffers and sizes, such as ``torch.arange(x.shape[1])[:, None]``?"""
    if node.op == "get_attr":
        value = value_of(model, node)
        is_integer = isinstance(value, Tensor) and value.dtype not in REAL and not value.is_complex()
        return is_integer and (has_booleans or value.dtype != torch.bool)
    if node.op not in ("call_function", "call_method") or is_fact(node):
        return False
    gives_booleans = node.kwargs.get("dtype") == torch.bool or getattr(node.target, "__name__", node.target) in _ANSWERS
    if gives_booleans and not has_booleans:
        return False
    tensors = [source for source in value_inputs(node) if not is_size(source)]
    for source in tensors:
        if not (yield source):
            return False
    return bool(tensors) or node.target in MAKERS


# Functions and methods that give booleans.
_ANSWERS = frozenset(
    "lt le gt ge eq ne less less_equal greater greater_equal not_equal logical_and logical_or logical_not logical_xor "
    "isin isnan isinf isfinite bool any all to type".split()
)


class Region:
    """The quantized part of a graph: its nodes, and what each gives.

    ``node in region`` asks whether a node gives or takes integers with a scale; what computes with positions alone (the
    results of argmax) is not in it, and is left alone.
    """

    def __init__(self) -> None:
        self._kinds: dict[fx.Node, tuple[Kind, ...]] = {}
        self._takers: set[fx.Node] = set()

    def __contains__(self, node: fx.Node) -> bool:
        kinds = self._kinds.get(node)
        return kinds is not None and (node in self._takers or any(kind is not Kind.INDEX for kind in kinds))

    def add(self, node: fx.Node, *kinds: Kind) -> None:
        """Put a node into the quantized part."""
        self._kinds[node] = kinds or (Kind.QUANTIZED,)
        if any(self.has_scale(source) for source in node.all_input_nodes):
            self._takers.add(node)

    def remove(self, node: fx.Node) -> None:
        """Take a node out of the quantized part."""
        self._kinds.pop(node, None)
        self._takers.discard(node)

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """`new` gives what `node` gave."""
        self._kinds[new] = self._kinds.pop(node, (Kind.QUANTIZED,))
        if node in self._takers:
            self._takers.add(new)

    def kinds(self, node: fx.Node) -> tuple[Kind, ...]:
        """What a node gives; empty for nodes outside of the quantized part."""
        return self._kinds.get(node, ())

    def has_scale(self, node: fx.Node) -> bool:
        """Can this node's result be a QTensor?"""
        return any(kind in (Kind.QUANTIZED, Kind.BOOL) for kind in self.kinds(node))


def given_kinds(model: fx.GraphModule, node: fx.Node, region: Region) -> tuple[Kind, ...]:
    """What a node gives whose inputs are in the quantized part."""
    if _is_table(model, node):
        return (Kind.QUANTIZED,)
    sources = [source for source in node.all_input_nodes if region.kinds(source)]
    if node.op == "call_function" and node.target in (operator.getitem, getattr):
        kinds = region.kinds(node.args[0])  # type: ignore[arg-type]
        index = RESULT_FIELDS.get(node.args[1], 0) if node.target is getattr else node.args[1]  # type: ignore[arg-type]
        if isinstance(index, int) and len(kinds) > 1:
            return (kinds[index],)
    row = row_of_node(model, node)
    chooses = row is not None and Trait.CHOICE in row.traits  # between positions, by booleans
    moved = [source for source in sources if not (chooses and region.kinds(source) == (Kind.BOOL,))]
    if moved and all(region.kinds(source) == (Kind.INDEX,) for source in moved):
        return (Kind.INDEX,)
    if row is None:
        return (Kind.QUANTIZED,)
    if Trait.MASKS in row.traits and _is_boolean(node, region):
        return (Kind.BOOL,)
    if Trait.COUNTS_BOOLEANS in row.traits and [region.kinds(source) for source in sources] == [(Kind.BOOL,)]:
        return (Kind.INDEX,)  # how many are true
    moves = row.scale_rule is ScaleRule.INHERIT and row.results == (Kind.QUANTIZED,)
    moves = moves or Trait.KEEPS_BOOLEANS in row.traits
    source = node.args[0] if node.args else None
    if moves and isinstance(source, fx.Node) and region.kinds(source) == (Kind.BOOL,):
        return (Kind.BOOL,)  # it moves booleans as well
    return row.results


def _is_boolean(node: fx.Node, region: Region) -> bool:
    """Does a product or sum of masks give a mask? In torch it does if both are booleans."""
    if notes(node).dtype is not None:
        return notes(node).dtype == torch.bool
    masks = [isinstance(a, fx.Node) and region.kinds(a) == (Kind.BOOL,) for a in node.args[:2]]
    return len(masks) == 2 and all(masks)


def row_of_node(model: fx.GraphModule, node: fx.Node) -> Operator | None:
    """The row of the operator that a node calls, however it is written."""
    if node.op == "call_module":
        return row_of_module(type(module_at(model, str(node.target))))
    if called_path(model, node) is not None:  # of a FloatFunctional
        return row_named(row_name_of(str(node.target), node.args[1:]))
    found = None
    if node.op == "call_function":
        found = row_of_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    elif node.op == "call_method":
        found = row_of_method(str(node.target), node.args, node.kwargs)
    if found is None or found[0].name not in FUNCTIONAL_METHODS:
        return None if found is None else found[0]
    return row_named(row_name_of(found[0].name, with_numbers(model, (*node.args[:2], node.kwargs.get("other")))))


def quantized_nodes(
    model: fx.GraphModule, cpu: Set[fx.Node] = frozenset(), stubbed: Set[fx.Node] = frozenset()
) -> Region:
    """What comes after a QuantStub, and after embeddings that meet it. Without either, all nodes that compute.

    Args:
        cpu: operators of the CPU; the quantized part also begins at those whose results meet it.
        stubbed: calls of code that tracing does not enter and that has QuantStubs inside.
    """
    tables = [node for node in model.graph.nodes if _is_table(model, node) or node in cpu]
    if not _has_quant(model) and not stubbed:
        return _downstream(model, set(tables) or {node for node in model.graph.nodes if node.op == "placeholder"})
    chosen: set[fx.Node] = set(stubbed)
    while True:
        region = _downstream(model, chosen)
        met = {node for node in tables if node not in chosen and _meets(model, node, region)}
        met |= _shared_calls(model, region)
        if not met:
            return region
        chosen |= met


def _shared_calls(model: fx.GraphModule, region: Region) -> set[fx.Node]:
    """Calls on constants of modules that the quantized part calls too: a quantized module takes quantized tensors."""
    calls: dict[int, list[fx.Node]] = {}
    for node in model.graph.nodes:
        path = called_path(model, node)
        row = None if path is None else row_of_node(model, node)
        if path is not None and row is not None and row.needs_qconfig and not row.is_quant:
            calls.setdefault(id(module_at(model, path)), []).append(node)
    shared = [nodes for nodes in calls.values() if any(node in region for node in nodes)]
    return {
        node
        for nodes in shared
        for node in nodes
        if node not in region and any(is_constant(model, source) for source in operands(model, node))
    }


def _downstream(model: fx.GraphModule, sources: set[fx.Node]) -> Region:
    """What comes after QuantStubs and after these nodes; embeddings among them belong to it themselves."""
    region = Region()
    for node in model.graph.nodes:
        row = _row_of_called(model, node)
        if row is not None and row.is_quant:
            region.add(node)
        if (row is not None and row.is_stub) or node.op in ("placeholder", "get_attr", "output"):
            continue
        if is_fact(node) or is_filled(node) or node.target is write_into:
            continue
        inputs = value_inputs(node)
        if node in sources or any(_is_inside(region, source) or source in sources for source in inputs):
            region.add(node, *given_kinds(model, node, region))
    return region


def mark_constants(model: fx.GraphModule) -> None:
    """Note in a recorded graph which nodes are constants: they depend on no float input of the model.

    A float input that meets the quantized part lacks a QuantStub; what the model computes for itself gets one.
    """
    for node in model.graph.nodes:
        is_input = node.op == "placeholder" and notes(node).dtype in REAL
        is_free = node.op in ("placeholder", "get_attr") or is_fact(node) or is_filled(node)
        is_stub = _is_stub(model, node)
        notes(node).is_constant = not (is_input or is_stub) and (
            is_free or all(notes(source).is_constant for source in value_inputs(node))
        )


def _is_inside(region: Region, node: fx.Node) -> bool:
    return region.kinds(node) not in ((), (Kind.FLOAT,))


def _is_table(model: fx.GraphModule, node: fx.Node) -> bool:
    """Does the node select rows of a table by plain indices?

    A function that a recorded forward calls on plain tensors runs as it is: what it gives is a constant.
    """
    if notes(node).site is not None:
        return False
    row = row_of_node(model, node)
    return row is not None and row.is_source


def _meets(model: fx.GraphModule, node: fx.Node, region: Region) -> bool:
    """Does what a node gives reach the quantized part, or a DeQuantStub, other than through a QuantStub?"""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            row = _row_of_called(model, user)
            if (row is not None and row.is_quant) or is_fact(user) or is_filled(user):
                continue
            if (row is not None and row.is_dequant) or _is_inside(region, user):
                return True
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def has_stub(model: fx.GraphModule) -> bool:
    """Does the model say where it is quantized?"""
    return _has_quant(model) or any(_is_table(model, node) for node in model.graph.nodes)


def _has_quant(model: fx.GraphModule) -> bool:
    rows = (_row_of_called(model, node) for node in model.graph.nodes)
    return any(row is not None and row.is_quant for row in rows)


def _is_stub(model: nn.Module, node: fx.Node) -> bool:
    row = _row_of_called(model, node)
    return row is not None and row.is_stub


def _row_of_called(model: nn.Module, node: fx.Node) -> Operator | None:
    """The row of the module that a node calls."""
    return row_of_module(type(module_at(model, str(node.target)))) if node.op == "call_module" else None
