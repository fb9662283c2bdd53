"""Tensors of one number that the model does not train: where an operator takes a number they are read once."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.notes import hidden, keep_hidden
from horizon_plugin_pytorch.runtime.node_notes import notes


def with_numbers(model: Any, arguments: Any, is_eager: bool = False) -> Any:
    """Arguments in which a constant without axes, such as a buffer ``torch.tensor(0.5)``, is its number.

    Args:
        is_eager: also constants with axes of one, and parameters that do not train; for operators that take no tensor.
    """
    return fx.node.map_arg(arguments, lambda node: _number(model, node, is_eager))


def places_of_numbers(before: Any, after: Any) -> tuple[int, ...]:
    """Which leaves of a call's arguments were nodes, and became numbers."""
    pairs = zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True)
    return tuple(i for i, (old, new) in enumerate(pairs) if isinstance(old, fx.Node) and not isinstance(new, fx.Node))


def note_numbers(model: Any, before: Any, after: Any) -> None:
    """Remember what a traced graph has read: the number stands in its code, whatever a checkpoint says later."""
    known = hidden(model, "numbers_read", dict)
    if known is None:
        known = {}
        keep_hidden(model, "numbers_read", known)
    for old, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True):
        if isinstance(old, fx.Node) and not isinstance(new, fx.Node):
            known[str(old.target)] = new


def _number(model: Any, node: fx.Node, is_eager: bool) -> Any:
    """The number that a node gives, if it is one and stays the same; the node if not."""
    if node.op == "get_attr":
        value = _value(model, node)
        is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not is_number or not (is_eager or value.dim() == 0) or not _stays(model, node, is_eager):
            return node
        return value.item()
    number = notes(node).number
    if number is not None and _is_constant(model, node, is_eager):
        return number
    return node


def _value(model: Any, node: fx.Node) -> Any:
    value: Any = notes(node).value
    if value is None:
        value = model.get_submodule("")
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
    return value


def _stays(model: Any, node: fx.Node, is_eager: bool) -> bool:
    """Is a tensor of the model neither trained nor written to?"""
    value = _value(model, node)
    if isinstance(value, nn.Parameter) and (value.requires_grad or not is_eager):
        return False
    return isinstance(value, Tensor) and not any(_writes(user, node) for user in node.users)


_SETTERS = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv)


def _writes(user: fx.Node, node: fx.Node) -> bool:
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    is_write = user.target in _SETTERS or (name.endswith("_") and not name.endswith("__"))
    return user.op in ("call_function", "call_method") and is_write and user.args[:1] == (node,)


def _is_constant(model: Any, node: fx.Node, is_eager: bool) -> bool:
    """Is what a recorded node gives made of constants alone, such as ``torch.tensor(2.0)`` or ``self.two.sqrt()``?"""
    pending, seen = [node], {node}
    while pending:
        one = pending.pop()
        is_call = one.op in ("call_function", "call_method") and not notes(one).is_stochastic
        if not (is_call or (one.op == "get_attr" and _stays(model, one, is_eager))):
            return False
        new = [source for source in one.all_input_nodes if source not in seen]
        seen.update(new)
        pending += new
    return True
