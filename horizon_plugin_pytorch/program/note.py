"""What a node of the program knows of itself: where it comes from, and what kind of tensor it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from horizon_plugin_pytorch.dtype import QuantDType, qbool
from horizon_plugin_pytorch.errors import at
from horizon_plugin_pytorch.qtensor import QTensor, bool_qtensor, integer_qtensor

_KEY = "note"  # the one entry of `node.meta` that the program uses


@dataclass(frozen=True, eq=False)
class Quantization:
    """The number format of a tensor of integers: what a `QTensor` knows besides its numbers."""

    scale: Tensor
    dtype: QuantDType
    axis: int = -1
    range: tuple[int, int] | None = None

    @classmethod
    def of(cls, x: QTensor) -> Quantization:
        """That of a tensor of a converted model."""
        return cls(x.q_scale().detach(), x.dtype, x.per_channel_axis, x.range)

    def is_same(self, other: Quantization) -> bool:
        """Do the same integers mean the same real values?"""
        if (self.dtype, self.axis) != (other.dtype, other.axis):
            return False
        return self.scale is other.scale or torch.equal(self.scale, other.scale)

    def wrap(self, integers: Tensor) -> QTensor:
        """Integers as a tensor with this scale and format."""
        if self.dtype == qbool:
            return bool_qtensor(integers)
        out = integer_qtensor(integers, self.scale, self.dtype, self.axis)
        if self.range is not None:
            out.set_range(*self.range)
        return out


@dataclass(frozen=True)
class Value:
    """A tensor of the program without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantization: Quantization | None = None

    @classmethod
    def of(cls, x: Tensor, quantization: Quantization | None = None) -> Value:
        """What is known of a tensor."""
        return cls(tuple(x.shape), x.dtype, quantization)

    def meta(self) -> Tensor:
        """A tensor of this shape and type without numbers."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def wrap(self, x: Tensor) -> Tensor:
        """Numbers of the program as the model gives them: with their scale, if they have one."""
        return x if self.quantization is None else self.quantization.wrap(x)

    def __str__(self) -> str:
        quantization = self.quantization
        name = str(quantization.dtype if quantization is not None else self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}"


@dataclass(frozen=True)
class Note:
    """Where a node comes from, and what it gives.

    Args:
        path: the module of the model that computes it; empty for the model itself.
        line: of the user's code, as ``model.py:41``; empty if unknown.
        value: the tensor that it gives; None for a node that gives several.
        parts: those several; each that is read has a ``getitem`` node after it, which knows its scale.
    """

    path: str = ""
    line: str = ""
    value: Value | None = None
    parts: tuple[Value, ...] = ()

    @property
    def values(self) -> tuple[Value, ...]:
        """All tensors that it gives."""
        return self.parts if self.value is None else (self.value,)

    @property
    def place(self) -> str:
        """For messages: ``at `backbone.conv` (model.py:41)``."""
        return at(self.path, self.line)


def note_of(node: fx.Node) -> Note:
    """The note of a node."""
    return node.meta[_KEY]


def value_of(node: fx.Node) -> Value:
    """The tensor that a node gives."""
    value = note_of(node).value
    assert value is not None, f"`{node.name}` gives several tensors"
    return value


def set_note(node: fx.Node, note: Note) -> fx.Node:
    """Give a node its note."""
    node.meta[_KEY] = note
    return node


def set_quantization(node: fx.Node, quantization: Quantization) -> None:
    """Say which scale and format a node has."""
    note, value = note_of(node), value_of(node)
    set_note(node, Note(note.path, note.line, Value(value.shape, value.dtype, quantization)))


def operator_name(node: fx.Node) -> str:
    """``horizon::conv`` or ``aten::view``; empty for what is no operator.

    >>> operator_name(fx.Graph().call_function(torch.ops.aten.relu.default, ()))
    'aten::relu'
    """
    target: Any = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
