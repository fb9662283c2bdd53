"""Sums and choices that only a softmax takes: the scores of attention, with what masks them."""

from __future__ import annotations

import itertools
from collections.abc import Container
from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.config.graph_view import Consumer, GraphView, OperatorView
from horizon_plugin_pytorch.operators.table import Trait
from horizon_plugin_pytorch.passes.preparation import Preparation

_SUMS = ("add", "sub")
SAME_LAST_AXIS = ("view", "reshape", "contiguous", "clone")  # as they are used between a sum and a softmax over it


def mark_scores(prep: Preparation) -> None:
    """Tell such operators the axis of the softmax, and the stubs of what is added that they may hold a mask."""
    view = prep.view()
    axes: dict[OperatorView, int] = {}
    for operator in reversed(list(view)):  # a sum after the sums that take it
        axis = _softmax_axis(view, operator, axes)
        if axis is None:
            continue
        axes[operator] = axis
        module: Any = operator.module
        module.softmax_axis = axis
        module.is_added_to = any(_is_sum(taker.node) for taker in _takers(view, operator))
    for operator in axes:
        if Trait.CHOICE not in operator.row.traits:
            _mark_masks(view, operator, axes)


def _mark_masks(view: GraphView, operator: OperatorView, sums: Container[OperatorView]) -> None:
    """Mark what is added, if nothing but these sums takes it; and what that is the sum of."""
    operands = view.operand_producers(operator)
    for producer in itertools.chain(*(operands[:1] if _adds_product(operator) else operands)):
        takers = [view.named(taker.path) if taker.path else None for taker in _takers(view, producer)]
        is_functional = bool(producer.nodes) and all(node.op == "call_method" for node in producer.nodes)
        if producer in sums or not (producer.row.is_quant or is_functional) or not all(t in sums for t in takers):
            continue
        module: Any = producer.module
        module.may_be_mask = True
        if is_functional and all(map(_is_sum, producer.nodes)):
            _mark_masks(view, producer, (producer,))


def _takers(view: GraphView, operator: OperatorView) -> list[Consumer]:
    return [taker for taker in view.consumers(operator) if not taker.keeps_format]


def _softmax_axis(view: GraphView, operator: OperatorView, axes: dict[OperatorView, int]) -> int | None:
    """The axis of all softmaxes that take a result, perhaps after sums of `axes`; None if something else takes it."""
    is_fit = Trait.CHOICE in operator.row.traits or _adds_product(operator)
    if not operator.nodes or not (is_fit or all(_is_sum(node) for node in operator.nodes)):
        return None
    found = {_axis(view, operator, taker, axes) for taker in _takers(view, operator)}
    if len(found) != 1 or None in found:
        return None
    moves = [c for c in view.consumers(operator) if c.keeps_format and not (c.row is not None and c.row.does_nothing)]
    axis = found.pop()
    is_same = not moves or (axis == -1 and all(_name(move.node) in SAME_LAST_AXIS for move in moves))
    return axis if is_same else None


def _axis(view: GraphView, operator: OperatorView, taker: Consumer, axes: dict[OperatorView, int]) -> int | None:
    module: Any = view.model.get_submodule(taker.path) if taker.path and view.has_module(taker.path) else None
    if type(module) is nn.Softmax:
        return module.dim
    further = next((other for other in axes if other.path == taker.path), None)
    if further is None or Trait.CHOICE in further.row.traits:
        return None
    # What is added to the scores comes from stubs: a mask, or a bias. Of a sum of two masks nobody knows the scores.
    others = [group for group in view.operand_producers(further) if operator not in group]
    is_scores = len(others) == 1 and all(producer.row.is_quant for producer in others[0])
    return axes[further] if is_scores and others[0] else None


def _adds_product(operator: OperatorView) -> bool:
    """Does it add a product to its first operand?"""
    return getattr(operator.row.qat, "adds_product", False)


def _is_sum(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _SUMS


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
