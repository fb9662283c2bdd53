"""Numbers of a traced graph that depend on shapes only."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, fx

from horizon_plugin_pytorch.torch_functions import SIZE_METHODS, TENSOR_ATTRIBUTES

_EMPTY = torch.empty


def empty_as_zeros(*size: Any, **settings: Any) -> Tensor:
    """``torch.empty`` in a traced graph: what happens to be in memory is in the range of no tensor.

    >>> empty_as_zeros(2)
    tensor([0., 0.])
    """
    return _EMPTY(*size, **settings).zero_()


# Functions that make tensors of numbers; with a float type, or turned to float, they are constants of the model.
MAKERS = {torch.arange, torch.linspace, torch.zeros, torch.ones, torch.full, torch.eye, empty_as_zeros}


def is_fact(node: fx.Node) -> bool:
    """Does the node ask about a tensor (its shape, its device) rather than compute with it?"""
    if node.op == "call_method":
        return node.target in SIZE_METHODS
    if node.op != "call_function" or node.target is not getattr or node.args[1] in TENSOR_ATTRIBUTES:
        return False
    known = getattr(torch.Tensor, str(node.args[1]), None)
    return known is not None and not callable(known)  # or it is a field of what wrapped code gives


def is_size(node: fx.Node) -> bool:
    """Is it a number that depends on shapes only?"""
    return settle(_size_rule, node)


_SIZE = torch.Size
_ATTRIBUTES: dict[str, type] = {"shape": _SIZE, "ndim": int, "device": torch.device, "layout": torch.layout}
_METHODS: dict[str, type] = {
    **dict.fromkeys(("dim", "ndimension", "numel", "nelement", "storage_offset", "element_size", "get_device"), int),
    **dict.fromkeys(("is_contiguous", "is_floating_point", "is_complex", "is_same_size"), bool),
}
_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_WHOLE = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.pos)


def class_of_fact(node: fx.Node) -> type | None:
    """The class in float of a number that depends on shapes only, or of what else is asked of a tensor.

    None where that is not known.
    """
    return settle(_class_rule, node) or None


def _class_rule(node: fx.Node) -> Rule:
    if node.op == "call_function" and node.target is getattr:
        return _ATTRIBUTES.get(str(node.args[1]), False)
    if node.op == "call_method":
        if node.target in ("size", "stride"):
            whole = _SIZE if node.target == "size" else tuple
            return int if len(node.args) + len(node.kwargs) > 1 else whole
        return _METHODS.get(str(node.target), False)
    sources = node.all_input_nodes
    if node.op != "call_function" or not sources:
        return False
    classes = set()
    for source in sources:
        classes.add((yield source))
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        whole = yield node.args[0]
        is_part = isinstance(node.args[1], slice)
        return (whole if is_part else int) if whole in (_SIZE, tuple) else False
    classes |= {type(value) for value in node.args if not isinstance(value, fx.Node)}
    if not classes <= {int, float, bool}:
        return False
    if node.target in _COMPARISONS:
        return bool
    if node.target is operator.truediv:
        return float
    return (float if float in classes else int) if node.target in _WHOLE else False


Rule = Generator[fx.Node, Any, Any]


def settle(rule: Callable[[fx.Node], Rule], node: fx.Node, known: dict[fx.Node, Any] | None = None) -> Any:
    """The answer of a rule, which yields the nodes whose answers it needs: graphs are too long for recursion.

    Args:
        known: answers of before, none of them None; new ones are added.
    """
    known = {} if known is None else known
    if node in known:
        return known[node]
    pending = [(node, rule(node))]
    answer: Any = None
    while pending:
        asked, running = pending[-1]
        try:
            needed = running.send(answer)
        except StopIteration as end:
            known[asked] = answer = end.value
            pending.pop()
            continue
        answer = known.get(needed)
        if answer is None:
            pending.append((needed, rule(needed)))
    return known[node]


def _size_rule(node: fx.Node) -> Rule:
    sources = node.all_input_nodes
    if is_fact(node):
        return True
    if node.op != "call_function" or node.target in MAKERS:
        return False
    for source in sources:
        if not (yield source):
            return False
    return bool(sources)


def is_shape(node: torch.fx.Node) -> bool:
    """Is it the shape of a tensor, or several sizes of one?"""
    if node.target is operator.getitem and isinstance(node.args[1], slice):
        return isinstance(node.args[0], torch.fx.Node) and is_shape(node.args[0])
    is_size = node.op == "call_method" and node.target == "size" and len(node.args) == 1
    return is_size or (node.target is getattr and node.args[1] == "shape")


def count_of_sizes(node: torch.fx.Node) -> int | None:
    """How many sizes a part of a shape has, where that does not depend on how many axes there are."""
    source: Any = node.args[0] if node.target is operator.getitem and is_shape(node) else None
    if source is None or source.target is operator.getitem:
        return None
    part: Any = node.args[1]
    start, stop = part.start or 0, part.stop
    if part.step not in (None, 1) or not all(type(end) in (int, type(None)) for end in (start, stop)):
        return None
    if stop is None:
        return -start if start < 0 else None
    return max(stop - start, 0) if (start < 0) == (stop < 0) else None
