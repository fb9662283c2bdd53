"""Which rows of the operator table a case calls, and how."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import fx

from horizon_plugin_pytorch.capture.given import Arguments
from horizon_plugin_pytorch.capture.region import quantized_nodes, row_of_node
from horizon_plugin_pytorch.capture.tracer import QuantizationTracer
from horizon_plugin_pytorch.operators.table import Operator
from tests.operators.cases.base import Case


class Call(NamedTuple):
    """A call of an operator.

    Args:
        how: fx's word, call_module, call_function or call_method.
        is_quantized: it is in the quantized part of the model.
    """

    row: Operator
    how: str
    is_quantized: bool


@functools.cache  # several tests ask it of all cases
def calls_of(case: Case) -> tuple[Call, ...]:
    """The calls of a case's model, in order."""
    model = case.model()
    tracer = QuantizationTracer()  # `trace` also tells the user of what it finds, which takes as long again
    tracer.arguments = Arguments(model)
    traced = fx.GraphModule(model, tracer.trace(model))
    region = quantized_nodes(traced)
    found = [(row_of_node(traced, node), node) for node in traced.graph.nodes]
    return tuple(Call(row, node.op, node in region) for row, node in found if row is not None)


def rows_of(case: Case) -> list[Operator]:
    """The rows of the operators in the quantized part of a case's model, in order."""
    return [call.row for call in calls_of(case) if call.is_quantized]
