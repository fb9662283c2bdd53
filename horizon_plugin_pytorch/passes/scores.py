"""Sums and choices that only a softmax takes: the scores of attention, with what masks them."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.config.graph_view import Consumer, GraphView, OperatorView
from horizon_plugin_pytorch.operators.table import Trait
from horizon_plugin_pytorch.passes.preparation import Preparation

_SUMS = ("add", "sub")
_SAME_LAST_AXIS = ("view", "reshape", "contiguous", "clone")  # as they are used between a sum and a softmax over it


def mark_scores(prep: Preparation) -> None:
    """Tell such operators the axis of the softmax, and the stubs of what is added that they may hold a mask."""
    view = prep.view()
    for operator in view:
        axis = _softmax_axis(view, operator)
        if axis is None:
            continue
        module: Any = operator.module
        module.softmax_axis = axis
        for producer in [] if Trait.CHOICE in operator.row.traits else view.producers(operator):
            stub: Any = producer.module
            if producer.row.is_quant:
                stub.may_be_mask = True


def _softmax_axis(view: GraphView, operator: OperatorView) -> int | None:
    """The axis of all softmaxes that take a result; None if there are others, or something else takes it."""
    is_choice = Trait.CHOICE in operator.row.traits
    if not operator.nodes or not (is_choice or all(_is_sum(node) for node in operator.nodes)):
        return None
    takers = view.consumers(operator)
    axes = {_axis(view, taker) for taker in takers if not taker.keeps_format}
    if len(axes) != 1 or None in axes:
        return None
    moves = [taker for taker in takers if taker.keeps_format and not (taker.row is not None and taker.row.does_nothing)]
    axis = axes.pop()
    is_same = not moves or (axis == -1 and all(_name(taker.node) in _SAME_LAST_AXIS for taker in moves))
    return axis if is_same else None


def _is_sum(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _SUMS


def _axis(view: GraphView, taker: Consumer) -> int | None:
    module: Any = view.model.get_submodule(taker.path) if taker.path and view.has_module(taker.path) else None
    return module.dim if type(module) is nn.Softmax else None


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
