"""Numbers of a traced graph that depend on shapes only."""

from __future__ import annotations

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
    return node.op == "call_function" and node.target is getattr and node.args[1] not in TENSOR_ATTRIBUTES


def is_size(node: fx.Node) -> bool:
    """Is it a number that depends on shapes only?"""
    return settle(_size_rule, node)


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
