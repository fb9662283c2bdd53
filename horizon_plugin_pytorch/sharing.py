"""Tensors with a scale that show one memory in float, and who of them must not be read after a write.

A tensor with a scale has no memory in common with others: what is written has a scale of its own, which a view of it or
its base cannot have. So a write makes those stale that show what was written, and whoever reads them is told.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PLAIN = torch._C.DisableTorchFunctionSubclass
_MEMBERSHIP = "_membership"
Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # in a memory: offset, shape and strides


@dataclass(frozen=True)
class Write:
    """A write to memory that other tensors show.

    Args:
        by: the call that wrote, with its line.
        writer: the tensor through which it wrote.
        place: where; None if only a larger place around it is known.
    """

    by: str
    writer: weakref.ref
    place: Place | None


class _Group:
    """The tensors that show one memory.

    Args:
        is_dense: is the whole memory laid out without gaps, as float has it?
    """

    def __init__(self, is_dense: bool) -> None:
        self.is_dense = is_dense
        self._members: dict[int, weakref.ref] = {}

    def add(self, x: Any, place: Place, is_exact: bool) -> None:
        key, members = id(x), self._members
        members[key] = weakref.ref(x, lambda gone: members.pop(key, None))
        x.__dict__[_MEMBERSHIP] = _Membership(self, place, is_exact)

    def remove(self, x: Any) -> None:
        self._members.pop(id(x), None)
        x.__dict__.pop(_MEMBERSHIP, None)

    def others(self, place: Place, x: Any) -> list[Any]:
        """The tensors besides `x` that can be read and show something of a place."""
        members = [member for reference in list(self._members.values()) if (member := reference()) is not None]
        shown = ((member, _membership(member)) for member in members if member is not x)
        return [member for member, known in shown if known is not None and overlap(place, known.place)]


@dataclass(frozen=True)
class _Membership:
    """What a tensor shows of a memory.

    Args:
        place: what it shows, or more.
        is_exact: is this what the tensor itself has for memory? Then that of its views follows.
    """

    group: _Group
    place: Place
    is_exact: bool


def _membership(x: Any) -> _Membership | None:
    return x.__dict__.get(_MEMBERSHIP)


def _memory(x: Any) -> Tensor:
    """What holds the numbers of a tensor: its integers where they are known, while its real values may not be there."""
    grid = x.__dict__.get("_grid")
    return x if grid is None else grid


def place_of(x: Tensor) -> Place:
    """What a tensor shows of its memory."""
    if x.layout is not torch.strided:
        return 0, (), ()
    return int(x.storage_offset()), tuple(x.shape), x.stride()


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def follow_view(source: Any, out: Any, may_show: bool = False) -> None:
    """Note that `out` shows the memory of `source`, if it does.

    Args:
        may_show: does the function give a view or a copy, as it finds the memory laid out? Where nobody knows how float
            lays it out, both are taken for one.
    """
    if out is source:
        return
    with _PLAIN():
        memory, shown = _memory(source), _memory(out)
        known = _membership(source)
        is_view = _storage(memory) == _storage(shown)
        is_certain = known.group.is_dense if known is not None else memory.is_contiguous()
        if not is_view and (is_certain or not may_show):
            return
        join(source, out, place_of(shown) if is_view else None)


def join(source: Any, out: Any, place: Place | None, is_exact: bool = True) -> None:
    """Let `out` show the memory of `source`.

    Args:
        place: what it shows; None if nobody knows what part.
        is_exact: is this what the tensor itself has for memory?
    """
    known = _membership(source)
    if known is None:
        with _PLAIN():
            memory = _memory(source)
            _Group(memory.is_contiguous()).add(source, place_of(memory), True)
        known = _membership(source)
    assert known is not None
    is_known = place is not None and known.is_exact
    known.group.add(out, place if place is not None and is_known else known.place, is_exact and is_known)


def part_of(target: Any, index: Any = ...) -> Place | None:
    """What ``target[index]`` shows; None if it is not known exactly, or is a copy."""
    known = _membership(target)
    if known is not None and not known.is_exact:
        return None
    with _PLAIN():
        memory = _memory(target)
        try:
            part = memory[index]
        except (IndexError, TypeError, RuntimeError):
            return None
        return place_of(part) if _storage(part) == _storage(memory) else None


def note_write(target: Any, by: str, index: Any = ...) -> Callable[[], None]:
    """A call is going to give `target` a new value: others that show what it writes are not to be read any more.

    Args:
        by: the call, with its line.
        index: the part of `target` that it writes.

    Returns:
        What to call when `target` has that value.
    """
    known = _membership(target)
    if known is None:
        return _nothing
    group, place = known.group, known.place
    write = Write(by, weakref.ref(target), part_of(target))
    for other in group.others(part_of(target, index) or place, target):
        other.spoil(write)
    is_alone = not group.others(place, target)

    def settle() -> None:
        group.remove(target)
        if not is_alone:  # some show other parts of it; it has memory of its own now
            group.add(target, place, False)

    return settle


def _nothing() -> None:
    pass


class Spoiled:
    """A tensor that was changed through another one: it keeps what it was, and is not to be read.

    Only ``x[0] += y`` makes it valid again: Python changes `x[0]`, and then writes it to `x`.
    """

    _valid: type  # what it was
    _change: Write
    _before: dict[str, Any]

    @classmethod
    def make_of(cls, x: Any, change: Write) -> None:
        """Let a tensor be spoiled by a write."""
        before = x.__dict__
        x.__class__, x.__dict__ = cls, {"_change": change, "_before": before}

    def spoil(self, change: Write) -> None:
        """It was changed once more."""
        self._change = change

    def _revive(self) -> None:
        self.__class__, self.__dict__ = self._valid, self._before  # type: ignore[assignment]

    def is_written_back(self, index: Any, part: Any) -> bool:
        """Is ``x[index] = part`` the end of ``x[index] += y``?"""
        change = self._change
        if change.writer() is not part or change.place is None:
            return False
        self._revive()
        place = part_of(self, index)
        type(self).spoil(self, change)
        return place == change.place

    def assign_back(self, index: Any, part: Any) -> None:
        """Take the part that was changed, and be valid."""
        self._revive()
        self[index] = part  # type: ignore[index]
        join(self, part, part_of(self, index), is_exact=False)


def is_same_memory(a: Any, b: Any) -> bool:
    """Do two tensors show one memory?"""
    first, second = _membership(a), _membership(b)
    return first is not None and second is not None and first.group is second.group


def forget(x: Any) -> None:
    """A tensor is going to be another one."""
    known = _membership(x)
    if known is not None:
        known.group.remove(x)


def take_place(target: Any) -> None:
    """A tensor has become a view of itself: ``x.squeeze_()``."""
    known = _membership(target)
    assert known is not None
    known.group.add(target, known.place, known.is_exact)


def is_shown_elsewhere(x: Tensor) -> bool:
    """Does another tensor that somebody has show the memory of an ordinary tensor?

    >>> x = torch.zeros(4).view(2, 2)
    >>> is_shown_elsewhere(x), is_shown_elsewhere(x[0])
    (False, True)
    """
    if x.layout is not torch.strided or torch._C._len_torch_dispatch_stack():  # who records a model keeps its tensors
        return False
    base = x._base
    is_forgotten = base is not None and sys.getrefcount(base) <= _FORGOTTEN
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2 + is_forgotten  # type: ignore[attr-defined] # `x`, `storage`


def _references_of_base(x: Tensor) -> int:
    base = x._base
    return sys.getrefcount(base)


_FORGOTTEN = _references_of_base(torch.zeros(1).view(1))  # of a base that only its view has


def overlap(place: Place, other: Place) -> bool:
    """Have two places of one memory something in common? Those of ``q, k, v = x.chunk(3, -1)`` have not.

    >>> x = torch.zeros(2, 4)
    >>> overlap(place_of(x[:, :2]), place_of(x[:, 2:])), overlap(place_of(x[:, :2]), place_of(x[0]))
    (False, True)
    """
    if place == other:
        return True
    if 0 in place[1] or 0 in other[1] or _end(*place) < other[0] or _end(*other) < place[0]:
        return False
    if _fills(place, other[0]) or _fills(other, place[0]):  # a base and its view, say: no need to go through the memory
        return True
    size = 1 + max(_end(*place), _end(*other))
    seen = torch.zeros(size, dtype=torch.bool, device="cpu")
    _show(seen, place).fill_(True)
    return bool(_show(seen, other).any())


def _show(memory: Tensor, place: Place) -> Tensor:
    offset, shape, strides = place
    return memory.as_strided(shape, strides, offset)


def _fills(place: Place, position: int) -> bool:
    """Has a place no gaps, and a position in it?"""
    offset, shape, strides = place
    next_stride = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != next_stride:
            return False
        next_stride *= size
    return offset <= position < offset + next_stride


def _end(offset: int, shape: tuple, strides: tuple) -> int:
    return offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
