"""The types of numbers that tracing knows without any numbers: what a QuantStub gives is float32."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.capture.sizes import Rule, settle
from horizon_plugin_pytorch.operators.table import (
    Kind,
    Operator,
    Trait,
    row_of_function,
    row_of_method,
    row_of_module,
)
from horizon_plugin_pytorch.torch_functions import VIEW_ATTRIBUTES

_QUESTIONS = ("is_floating_point", "is_complex", "is_signed", "element_size")


class NumberTypes:
    """The types of the tensors in a graph that is being traced.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._known: dict[fx.Node, torch.dtype | bool] = {}
        others = (x.dtype for x in root.parameters() if x.is_floating_point())
        self._is_float = all(dtype == torch.float32 for dtype in others)  # else a stub gives what the user made of it

    def of(self, node: fx.Node) -> torch.dtype | None:
        """The type in the float model; None where it depends on what is not known."""
        return (self._is_float and settle(self._rule, node, self._known)) or None

    def answer(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What a question such as ``x.is_floating_point()`` gives; None where that is not known, or is no question.

        ``x.float()`` of a float32 tensor is that tensor, as in torch.
        """
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        is_cast = target == "float"
        if (name not in _QUESTIONS and not is_cast) or kwargs or len(args) != 1 or not isinstance(args[0], fx.Proxy):
            return None
        dtype = self.of(args[0].node)
        if is_cast:
            return args[0] if dtype == torch.float32 else None
        return None if dtype is None else getattr(torch.empty(0, dtype=dtype), name)()

    def _rule(self, node: fx.Node) -> Rule:
        if node.target is getattr and node.args[1] in VIEW_ATTRIBUTES:
            viewed = node.args[0]
            return (yield viewed) if isinstance(viewed, fx.Node) else False
        if node.op == "get_attr":
            found = self._attribute(node)
            return found.dtype if isinstance(found, Tensor) else False
        if self._is_functional(node):
            return (yield from _promoted(node))
        row = self._row(node)
        if row is None or row.is_cast or node.kwargs.get("dtype") is not None:
            return False
        if row.is_quant:
            return torch.float32
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source, index = self._row(node.args[0]), node.args[1]
            if source is not None and len(source.results) > 1:
                kind = source.results[index] if isinstance(index, int) else None
                return (yield from _promoted(node.args[0])) if kind is Kind.QUANTIZED else False
        if len(row.results) > 1:
            return False
        if row.results[0] is Kind.BOOL:
            return torch.bool
        if row.results[0] is not Kind.QUANTIZED and not row.is_dequant:
            return False
        if row.needs_qconfig or Trait.CHOICE in row.traits:
            return (yield from _promoted(node))
        first = node.args[0] if node.args else None
        return (yield first) if isinstance(first, fx.Node) else False

    def _is_functional(self, node: fx.Node) -> bool:
        """Is it a method of a FloatFunctional?"""
        owner = node.args[0] if node.op == "call_method" and node.args else None
        if not isinstance(owner, fx.Node) or owner.op != "get_attr":
            return False
        found = self._attribute(owner)
        row = row_of_module(type(found)) if isinstance(found, nn.Module) else None
        return row is not None and row.is_functional

    def _attribute(self, node: fx.Node) -> Any:
        """What a node reads of the model; while tracing, the model itself gives proxies."""
        path, _, name = str(node.target).rpartition(".")
        owner = self._root.get_submodule(path)
        return next((x for x in (owner._parameters, owner._buffers, owner._modules) if name in x), {}).get(name)

    def _row(self, node: fx.Node) -> Operator | None:
        if node.op == "call_module":
            return row_of_module(type(self._root.get_submodule(str(node.target))))
        if node.op == "call_function":
            found = row_of_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        else:
            found = row_of_method(str(node.target), node.args, node.kwargs) if node.op == "call_method" else None
        return None if found is None else found[0]


def _promoted(node: fx.Node) -> Rule:
    """The type of what is computed of several tensors: float32 if one of them is."""
    for source in node.all_input_nodes:
        if (yield source) == torch.float32:
            return torch.float32
    return False
