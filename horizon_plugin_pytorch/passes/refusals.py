"""Errors for operators that have no quantized form where they are."""

from __future__ import annotations

from torch import fx

from horizon_plugin_pytorch.capture.container_writes import CONTAINER_REMEDY, is_of_container
from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at, source_line
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.operators.table import NO_FORM, Operator, advice_for
from horizon_plugin_pytorch.runtime.node_notes import notes


def spelled(node: fx.Node) -> str:
    """The function or method that a node calls, as a user writes it."""
    if node.op == "call_method":
        return f"torch.Tensor.{node.target}"
    module = getattr(node.target, "__module__", "") or ""
    name = getattr(node.target, "__name__", str(node.target))
    return f"{module.removeprefix('_')}.{name}" if module else f"torch.{name}"


def unsupported(
    what: str, node: fx.Node, march: March, row: Operator | None, advice: str = ""
) -> UnsupportedOperatorError:
    """The error for an operator of the quantized part that the chip, or nobody, has.

    Args:
        what: as the user knows it.
        row: of the operator table, if it has one.
        advice: for arguments that have no form.
    """
    where = at(str(node.target) if node.op == "call_module" else notes(node).scope, source_line(node.stack_trace))
    if is_of_container(node):
        return UnsupportedOperatorError(f"`{node.target}` {where} {CONTAINER_REMEDY}")
    if row is not None and row.support(march) is None:
        advice = (
            f"it is supported on {', '.join(row.march_names)}. Choose one of these with set_march, replace it by a "
            "supported operator, or move it after the DeQuantStub"
        )
    elif row is not None:
        advice = advice or "these arguments have no quantized form; write it with simpler operators"
    else:
        advice = advice_for(node.target) or NO_FORM
    return UnsupportedOperatorError(f"`{what}` {where} has no quantized form on {march}: {advice}.")


def called_name(node: fx.Node) -> str:
    """What a node calls: the path of a module, or a function."""
    return str(node.target) if node.op == "call_module" else spelled(node)
