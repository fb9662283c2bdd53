"""float16 beside integers: what is computed in float16 gets a scale before it meets an integer operator."""

from __future__ import annotations

from typing import Any

from torch import fx

from horizon_plugin_pytorch.errors import QuantizationConfigError, at
from horizon_plugin_pytorch.nn.operator_table import ScaleRule
from horizon_plugin_pytorch.nn.qat.gemm import has_integer_weight
from horizon_plugin_pytorch.quantization.choice import Choice, Step
from horizon_plugin_pytorch.quantization.fake_cast import is_cast
from horizon_plugin_pytorch.quantization.passes.region import Region, called_path, operands, row_of_node
from horizon_plugin_pytorch.quantization.passes.replace import insert_stub
from horizon_plugin_pytorch.quantization.qconfig import spell


def quantize_half(model: fx.GraphModule, region: Region, choices: dict[str, Choice]) -> fx.GraphModule:
    """Put a QuantStub between a float16 result and an integer operator that takes it.

    The stub's format is that of the operator's qconfig: of its `input`, or else of its `activation`.

    Raises:
        QuantizationConfigError: for an integer operator whose qconfig has no format for that stub.
    """
    half: set[fx.Node] = set()
    counters: dict[tuple[str, str], int] = {}
    for node in list(model.graph.nodes):
        path = called_path(model, node)
        if node not in region:
            continue
        qconfig = _qconfig(choices, path)
        if qconfig is not None and is_cast(qconfig.activation) and _has_own_scale(model, node):
            half.add(node)
            is_integer = qconfig.weight is not None and not is_cast(qconfig.weight) and _has_weight(model, node)
        elif qconfig is not None and _has_own_scale(model, node):
            is_integer = True
        else:  # it moves values, and keeps their format
            if any(source in half for source in node.all_input_nodes):
                half.add(node)
            continue
        if not is_integer:
            continue
        inputs = operands(model, node)
        for source in [s for s in node.all_input_nodes if s in half]:
            wanted = _input_part(qconfig, inputs.index(source) if source in inputs else 0)
            if wanted is None or is_cast(wanted):
                raise QuantizationConfigError(
                    f"the integer operator {at(path or '')} takes a float16 result, and its qconfig says no integer "
                    "format for it: give the qconfig an `input`."
                )
            stub = Choice(
                qconfig._replace(activation=wanted),
                steps=(Step(f"float16 becomes the input of {path}", spell(wanted)),),
            )
            insert_stub(model, node, source, region, choices, counters, stub, "quantize float16")
    return model


def _input_part(qconfig: Any, position: int) -> Any:
    """What quantizes an operand: the qconfig's `input`, which may be one for each, or else its `activation`."""
    part = qconfig.input
    if isinstance(part, (tuple, list)):
        part = part[min(position, len(part) - 1)]
    return qconfig.activation if part is None or is_cast(part) else part


def _qconfig(choices: dict[str, Choice], path: str | None) -> Any:
    choice = None if path is None else choices.get(path)
    return None if choice is None else choice.qconfig


def _has_own_scale(model: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_method":  # of a FloatFunctional
        return True
    row = row_of_node(model, node)
    return row is not None and row.scale_rule in (ScaleRule.OWN, ScaleRule.FIXED)


def _has_weight(model: fx.GraphModule, node: fx.Node) -> bool:
    row = row_of_node(model, node)
    return row is not None and has_integer_weight(row)
