"""A program as text: a line for each operator."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from horizon_plugin_pytorch.program.note import Value, note_of, operator_name, value_of

if TYPE_CHECKING:
    from horizon_plugin_pytorch.program.program import Program


def program_text(program: Program) -> str:
    """What a program takes, computes and gives."""
    constants = program.constants.values()
    size = sum(x.numel() * x.element_size() for x in constants)
    lines = [f"{program.name}: {len(program.operators)} operators, {len(constants)} constants of {size:,} bytes"]
    for node in program.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"  {node.name}: {described(value_of(node))}")
        elif node.op == "call_function" and node.target is not operator.getitem:
            lines.append(f"  {_result(node)} = {_call(node)}{_place(node)}")
        elif node.op == "output":
            lines.append(f"  return {', '.join(map(str, node.args[0]))}")
    return "\n".join(lines)


def described(value: Value) -> str:
    """``qint8[2, 3] * 0.1``, or ``float32[2, 3]``."""
    quantization = value.quantization
    if quantization is None:
        return str(value)
    scale = quantization.scale.flatten()
    step = f"{float(scale[0]):.6g}" if scale.numel() == 1 else f"{scale.numel()} scales of axis {quantization.axis}"
    return f"{value} * {step}"


def _result(node: fx.Node) -> str:
    value = note_of(node).value
    if value is not None:
        return f"{node.name}: {described(value)}"
    parts = [user for user in node.users if user.target is operator.getitem]
    return ", ".join(_result(part) for part in sorted(parts, key=lambda part: part.args[1]))  # type: ignore[arg-type,return-value]


def _call(node: fx.Node) -> str:
    """The operator and its arguments by name; those that are absent or False are left out."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
    said = [f"{name}={_argument(value)}" for name, value in given.items() if value is not None and value is not False]
    return f"{operator_name(node)}({', '.join(said)})"


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).removeprefix("torch.")


def _place(node: fx.Node) -> str:
    note = note_of(node)
    place = f"{note.path} ({note.line})" if note.path and note.line else note.path or note.line
    return f"  # {place}" if place else ""
