"""What a model writes to memory while it is recorded, and who reads it through another tensor."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.sharing import overlap, place_of


@dataclass(frozen=True)
class _Write:
    """A write.

    Args:
        time: when.
        writer: the tensor that has the new value since; none if only the memory has it.
        place: where in its memory: offset, shape and strides.
        by: the call that wrote.
    """

    time: int
    writer: weakref.ref | None
    place: Any
    by: Any


class Memory:
    """Knows when tensors became known and when their memory was written to.

    A tensor with a scale has no memory in common with others: a write is seen by all names of the tensor that is
    written, and not by its views.

    >>> memory, x = Memory(), torch.zeros(2, 2)
    >>> first, last = x[0], x[1]
    >>> for tensor in (x, first, last):
    ...     memory.know(tensor)
    >>> memory.know(first.add_(1))  # it has its new value
    >>> memory.write([first], first, "add_")
    >>> memory.stale([x]), memory.stale([first]), memory.stale([last])
    ('add_', None, None)
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._time = 0
        self._known: dict[int, int] = {}
        self._writes: dict[int, list[_Write]] = {}

    def know(self, x: Tensor) -> None:
        """A tensor got its value."""
        self._time += 1
        self._known[id(x)] = self._time

    def forget(self, key: int) -> None:
        """The tensor of that id is gone."""
        self._known.pop(key, None)

    def write(self, changed: Iterable[Tensor], writer: Tensor | None, by: Any) -> None:
        """A call changed tensors.

        Args:
            changed: tensors whose memory is not what it was.
            writer: the one that is known by its new value.
            by: the call.
        """
        for x in changed if writer is None else (writer,):
            reference = None if writer is None else weakref.ref(writer)
            write = _Write(self._time if writer is not None else self._time + 1, reference, place_of(x), by)
            self._writes.setdefault(_memory(x), []).append(write)
        self._time += writer is None

    def stale(self, leaves: list[Tensor], index: Any = None) -> Any:
        """The call that wrote to the memory of one of these tensors, through another one, since it became known.

        Args:
            index: that of ``x[index] = part``, in brackets, where `part` may have been written to: the last step of
                ``x[index] += y``.
        """
        for leaf in leaves if self._writes else ():
            known = self._known.get(id(leaf))
            for write in self._writes.get(_memory(leaf), ()) if known is not None else ():
                if write.time <= known or not overlap(write.place, place_of(leaf)):  # type: ignore[operator]
                    continue
                is_last = index is not None and leaf is leaves[0] and _is(write.writer, leaves[-1])
                if not (is_last and place_of(leaf[index[0]]) == write.place):
                    return write.by
        return None


def _is(reference: weakref.ref | None, x: Tensor) -> bool:
    return reference is not None and reference() is x


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else 0


def versions(leaves: list[Tensor]) -> list[int]:
    """A number for each tensor, which every write to its memory raises."""
    return [-1 if x.is_inference() else x._version for x in leaves]


def changed(leaves: list[Tensor], before: list[int]) -> list[Tensor]:
    """The tensors that were written to."""
    return [x for x, old, new in zip(leaves, before, versions(leaves), strict=True) if old != new]


def distinct(out: Any, leaves: list[Tensor]) -> Any:
    """A result that is one of the arguments, as a tensor of its own: ``x.contiguous()`` gives `x` itself or a copy.

    Which of them, a quantized tensor may decide otherwise; so a later write to one is not to be seen by the other.
    """
    return out.view_as(out) if isinstance(out, Tensor) and any(out is x for x in leaves) else out
