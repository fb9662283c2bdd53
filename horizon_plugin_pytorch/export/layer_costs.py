"""What can be known of a deployed model's cost without the chip: operations, parameters, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.program import Program
from horizon_plugin_pytorch.program.note import Value, note_of, operator_name, value_of
from horizon_plugin_pytorch.torch_functions import VIEW_OPERATORS

_LAYERS = frozenset({"horizon::conv", "horizon::linear"})
_INTEGERS = {"qbool": 1, "qint8": 1, "qint16": 2, "qint32": 4}  # bytes


@dataclass(frozen=True)
class Cost:
    """The cost of one operator.

    Args:
        operations: two for each product that is summed, one for each other number that is given.
        parameters, weight_bytes: of its weight.
        read, written: bytes of the tensors that it takes and gives, in the formats of the chip.
    """

    name: str
    operator: str
    format: str
    operations: int
    parameters: int
    weight_bytes: int
    read: int
    written: int


def layer_costs(program: Program, owner: Any) -> list[Cost]:
    """The cost of each operator of a program that computes something.

    Args:
        owner: the model or script that it was recorded of, which has the weights.
    """
    formats = {node: _format(node) for node in program.graph.nodes if node.op == "placeholder"}
    for node in program.graph.nodes:
        if node.op == "call_function":
            read = [formats[source] for source in node.all_input_nodes if source in formats]
            formats[node] = _format(node) or max((x for x in read if x in _INTEGERS), key=_bytes, default="float32")
    return [_cost(node, owner, formats) for node in program.operators if operator_name(node) not in VIEW_OPERATORS]


def _cost(node: fx.Node, owner: Any, formats: dict[fx.Node, str]) -> Cost:
    kind, note = operator_name(node), note_of(node)
    outputs = note.values
    sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
    count = sum(_numel(value) for value in outputs)
    operations, weight = count, None
    if kind in _LAYERS:
        weight = _weight(owner, note.path)
        if weight is None:
            raise ExportError(
                f"the weight of `{node.name}` {note.place} is not found in the model. Give the converted model, or a "
                "script as `torch.jit.trace` gives it: `torch.jit.freeze` makes constants of weights."
            )
        is_transposed = "Transpose" in _class(_module(owner, note.path))
        walked = _numel(value_of(sources[0])) if is_transposed else count
        operations = 2 * walked * weight[0].numel()
    elif kind == "horizon::matmul":
        operations = 2 * count * value_of(sources[0]).shape[-1]
    name = formats[node]
    return Cost(
        node.name, kind, name, operations,
        0 if weight is None else weight.numel(), 0 if weight is None else weight.numel() * weight.element_size(),
        sum(_numel(value_of(source)) * _bytes(formats[source]) for source in sources if note_of(source).value),
        count * _bytes(name),
    )  # fmt: skip


def _format(node: fx.Node) -> str:
    """The number format of what a node gives; empty if the program does not say, and it is that of what the node reads.

    Operators see integers in float32, and a script has no scales.
    """
    values = note_of(node).values
    given: dict[str, Any] = {}
    known = next((value.quantization for value in values if value.quantization is not None), None)
    if known is not None:
        return str(known.dtype)
    kind = operator_name(node)
    if kind.startswith("horizon::"):
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        given = dict(zip(names, node.args, strict=False))
        if "high" in given and not given.get("is_real") and isinstance(given["high"], int):
            return "qint8" if given["high"] < 1 << 7 else "qint16" if given["high"] < 1 << 15 else "qint32"
    name = str(values[0].dtype).removeprefix("torch.") if values else "float32"
    is_carrier = node.op == "call_function" and name in ("float32", "float64") and kind != "horizon::dequantize"
    return "" if is_carrier and not given.get("is_real") else name


def _bytes(name: str) -> int:
    return _INTEGERS[name] if name in _INTEGERS else torch.empty((), dtype=getattr(torch, name)).element_size()


def _numel(value: Value) -> int:
    count = 1
    for size in value.shape:
        count *= size
    return count


def _module(owner: Any, path: str) -> Any:
    for name in path.split(".") if path else []:
        owner = getattr(owner, name, None)
    return owner


def _class(module: Any) -> str:
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def _weight(owner: Any, path: str) -> Tensor | None:
    weight = getattr(_module(owner, path), "weight", None)
    return weight if isinstance(weight, Tensor) else None
