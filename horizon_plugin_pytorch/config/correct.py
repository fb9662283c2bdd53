"""Formats that a chip does not have are corrected, each with its reason."""

from __future__ import annotations

from horizon_plugin_pytorch.config.graph_view import GraphView, OperatorView
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationWarning, listed, warn
from horizon_plugin_pytorch.fake_quant.qconfig import format_of, with_format
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.operators.table import Operator


def correct_formats(view: GraphView) -> None:
    """Make int8 what the chip has in int8 only.

    An int16 result becomes int8 where its operator gives none, or where an operator that takes it does not take int16;
    so do int16 weights on chips without them. What the user insists on stays.
    """
    narrowed: list[str] = []
    for operator in view:
        qconfig = view.qconfig(operator)
        if qconfig is None:
            continue
        if qconfig.activation is not None and format_of(qconfig.activation) == qint16:
            why = _why_not_int16(view, operator)
            if why:
                qconfig = qconfig._replace(activation=with_format(qconfig.activation, qint8))
                view.set(operator, qconfig, why)
        support = operator.row.support(view.march)
        has_int16 = operator.has_weight and qconfig.weight is not None and format_of(qconfig.weight) == qint16
        if has_int16 and support is not None and qint16 not in support.weights:
            qconfig = qconfig._replace(weight=with_format(qconfig.weight, qint8))
            if view.set(operator, qconfig, f"{view.march} has no int16 weights"):
                narrowed.append(operator.path)
    warn_weights(narrowed, view.march)


def warn_weights(paths: list[str], march: March) -> None:
    """Say which weights were made int8."""
    if paths:
        warn(
            f"weights are qint8 on {march}; int16 weights exist on nash chips only. Made qint8: {listed(paths)}.",
            QuantizationWarning,
        )


def _why_not_int16(view: GraphView, operator: OperatorView) -> str:
    """Why a result cannot be int16; empty if it can."""
    if not _has_int16(view, operator.row, "outputs"):
        return f"{operator.row.name} gives qint8 on {view.march}"
    for consumer in view.consumers(operator):
        if consumer.row is None or view.is_exit(consumer.node):
            continue
        if not _has_int16(view, consumer.row, "inputs"):
            return f"{consumer.name} ({consumer.row.name}) takes qint8 on {view.march}"
        if consumer.keeps_format and not _has_int16(view, consumer.row, "outputs"):
            return f"{consumer.name} ({consumer.row.name}) keeps the format and gives qint8 on {view.march}"
    return ""


def _has_int16(view: GraphView, row: Operator, what: str) -> bool:
    """Does the chip have it in int16, or no integers at all?"""
    support = row.support(view.march)
    if support is None:
        return True
    formats = getattr(support, what)
    return qint16 in formats or qint8 not in formats
