"""Tensors with a scale that show one memory in float, and who of them must not be read after a write.

A tensor with a scale has no memory in common with others: what is written has a scale of its own, which a view of it or
its base cannot have. So a write makes those stale that show what was written, and whoever reads them is told. Real
values that leave the quantized part, or enter it, are a second tensor as well, where float has one: these are loans,
and torch's count of writes tells what became of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.torch_functions import plain_tensors

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


class _Loan:
    """An ordinary tensor that is one with a quantized tensor in float: what a stub gave of it, or took for it.

    Args:
        values: the ordinary tensor.
        place: what it shows of the memory in float.
        by: who made the loan, with its line.
        spoil: lets readers of the ordinary tensor be refused when the quantized one is written to; None if it was there
            before, and takes what is written.
        is_counted: does torch count the writes to it?
    """

    def __init__(
        self,
        values: Tensor,
        place: Place,
        by: str,
        spoil: Callable[[Tensor, Write], None] | None,
        is_counted: bool = True,
    ) -> None:
        self.place, self.by, self._spoil = place, by, spoil
        self.values = weakref.ref(values)
        self._storage = StorageWeakRef(values.untyped_storage())
        self._layout = values.storage_offset(), values.shape, values.stride()
        self._shape, self._dtype = values.shape, values.dtype
        self._is_broadcast = any(
            step == 0 and size > 1 for size, step in zip(values.shape, values.stride(), strict=True)
        )
        self._counter: Tensor | None = None
        if is_counted and not torch._is_functional_tensor(values):  # of which torch would end the process
            self._counter = values.detach()  # it shares the count of writes
            self._counter.data = _NOTHING  # and not the memory
        self._count = self._writes()

    def _writes(self) -> int:
        return 0 if self._counter is None else self._counter._version

    @property
    def is_taken(self) -> bool:
        """Was it there before the quantized tensor?"""
        return self._spoil is None

    @property
    def is_written(self) -> bool:
        """Has anybody written to it, or to a view of it?"""
        return self._writes() != self._count

    @property
    def is_over(self) -> bool:
        """Is its memory gone, as it was lent?"""
        return self._storage.expired() and not self.is_written

    def write_back(self, new: Tensor, place: Place, by: str) -> None:
        """The quantized tensor is written to that a stub made of this one: in float this one is changed as well.

        Args:
            new: the real values that the quantized tensor has now.
            place: what that tensor shows of the memory.
            by: the call that writes, with its line.

        Raises:
            UnsupportedOperatorError: this one cannot have these values.
        """
        if self._storage.expired():
            return
        values = self.values()
        if place != self.place or self._shape != new.shape or self._dtype != torch.float32 or self._is_broadcast:
            raise UnsupportedOperatorError(
                f"{by} changes a tensor in place that {self.by} made of an ordinary one, which is still there: in "
                "float both are one tensor, and here the ordinary one cannot see this change. Change a copy, as in "
                "`q = self.quant(x.clone())`, or make a new tensor, as in `q = q + 1`."
            )
        if values is None:  # the tensor is gone, and another shows its memory
            storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
            if storage is None:
                return
            values, new = torch.empty(0, device=storage.device), new.detach()
            values.set_(storage, *self._layout)  # type: ignore[call-overload]
        values.copy_(new)
        self._count = self._writes()

    def spoil(self, write: Write) -> None:
        """The quantized tensor is written to: in float this one is changed as well, and here it is not.

        Raises:
            UnsupportedOperatorError: somebody has a view of it, whose readers nobody sees.
        """
        values = self.values()
        if self._spoil is None or self._storage.expired():
            return
        if values is None or is_shown_elsewhere(values):
            raise UnsupportedOperatorError(
                f"{write.by} changes a tensor in place of which {self.by} gave the real values, and a view of these is "
                "still there: in float it would see the change, and real values share no memory with quantized "
                "tensors. Make a new tensor, as in `x = x + 1`, or take the view of a copy (`.clone()`)."
            )
        self._spoil(values, write)


_NOTHING = torch.empty(0)
_MANY_LOANS = 8  # of one memory; then those are dropped that are over


class _Group:
    """The tensors that show one memory.

    Args:
        is_dense: is the whole memory laid out without gaps, as float has it?
    """

    def __init__(self, is_dense: bool) -> None:
        self.is_dense = is_dense
        self.loans: list[_Loan] = []
        self._members: dict[int, weakref.ref] = {}

    def lend(self, loan: _Loan) -> None:
        if len(self.loans) >= _MANY_LOANS:
            self.loans = [known for known in self.loans if not known.is_over]
        self.loans.append(loan)

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


def _member(x: Any) -> _Membership:
    """The same, where a tensor that shares its memory with nobody begins a group."""
    known = _membership(x)
    if known is None:
        with plain_tensors():
            memory = _laid_or_memory(x)
            _Group(memory.is_contiguous()).add(x, place_of(memory), True)
        known = _membership(x)
    assert known is not None
    return known


def _memory(x: Any) -> Tensor:
    """What holds the numbers of a tensor: its integers where they are known, while its real values may not be there."""
    grid = x.__dict__.get("_grid")
    return x if grid is None else grid


def laid(x: Any) -> Tensor | None:
    """What lies in its memory as a tensor does in float, maybe without numbers; None if it does so itself."""
    integers = x.__dict__.get("_bytes")
    return x.__dict__.get("_laid") if integers is None else integers.laid


def _laid_or_memory(x: Any) -> Tensor:
    known = laid(x)
    return _memory(x) if known is None else known


def _have_own_bytes(x: Any, other: Any) -> bool:
    """Are the integers of both here as bytes, each in memory of its own?"""
    mine, theirs = x.__dict__.get("_bytes"), other.__dict__.get("_bytes")
    return mine is not None and theirs is not None and _storage(mine.laid) != _storage(theirs.laid)


def place_of(x: Tensor) -> Place:
    """What a tensor shows of its memory."""
    if x.layout is not torch.strided:
        return 0, (), ()
    return int(x.storage_offset()), tuple(x.shape), x.stride()


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def shows(x: Tensor, other: Tensor) -> bool:
    """Have two tensors one memory?"""
    with plain_tensors():
        return _storage(x) == _storage(other)


def shows_the_same(x: Any, other: Any) -> bool:
    """Are two tensors one, or two of the same numbers in the same memory?"""
    if x is other:
        return True
    if not (isinstance(x, Tensor) and isinstance(other, Tensor) and x.layout is other.layout is torch.strided):
        return False
    with plain_tensors():
        return _storage(x) == _storage(other) and x.dtype == other.dtype and place_of(x) == place_of(other)


def follow_view(source: Any, out: Any, may_show: bool = False) -> None:
    """Note that `out` shows the memory of `source`, if it does.

    Args:
        may_show: does the function give a view or a copy, as it finds the memory laid out? Where nobody knows how float
            lays it out, both are taken for one.
    """
    if out is source or (not may_show and _have_own_bytes(source, out)):
        return
    with plain_tensors():
        memory, shown = _laid_or_memory(source), _laid_or_memory(out)
        known = _membership(source)
        is_view = _storage(memory) == _storage(shown)
        if laid(source) is not None and laid(out) is None and _storage(_memory(source)) == _storage(shown):
            join(source, out, None)
            return
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
    known = _member(source)
    is_known = place is not None and known.is_exact
    known.group.add(out, place if place is not None and is_known else known.place, is_exact and is_known)


def part_of(target: Any, index: Any = ...) -> Place | None:
    """What ``target[index]`` shows; None if it is not known exactly, or is a copy."""
    known = _membership(target)
    if known is not None and not known.is_exact:
        return None
    with plain_tensors():
        memory = _laid_or_memory(target)
        try:
            part = memory[index]
        except (IndexError, TypeError, RuntimeError):
            return None
        return place_of(part) if _storage(part) == _storage(memory) else None


def note_write(target: Any, by: str, index: Any = ..., writes_back: bool = False) -> Callable[[], None]:
    """A call is going to give `target` a new value: others that show what it writes are not to be read any more.

    Args:
        by: the call, with its line.
        index: the part of `target` that it writes.
        writes_back: shall tensors that stubs took get the new value too? Whoever reads them later is not seen.

    Returns:
        What to call when `target` has that value.
    """
    known = _membership(target)
    if known is None:
        return _nothing
    group, place = known.group, known.place
    write, part = Write(by, weakref.ref(target), part_of(target)), part_of(target, index) or place
    for other in group.others(part, target):
        other.spoil(write)
    lent = [loan for loan in group.loans if overlap(loan.place, part)]
    for loan in lent:
        loan.spoil(write)
    is_alone = not group.others(place, target) and all(loan.is_over for loan in group.loans)

    def settle() -> None:
        for loan in lent:
            if loan.is_taken and writes_back:
                loan.write_back(target.as_real(), place, by)
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


def lend(source: Any, values: Tensor, by: str, spoil: Callable[[Tensor, Write], None] | None = None) -> None:
    """Note that an ordinary tensor is one with a tensor with a scale in float: what a stub gave of it, or took for it.

    Args:
        by: who made the loan, with its line.
        spoil: lets readers of the ordinary tensor be refused, if it has memory of its own.
    """
    is_counted = not (values.is_inference() or torch._C._len_torch_dispatch_stack())
    if torch.jit.is_tracing() or (not is_counted and spoil is not None):
        return
    known = _member(source)
    with plain_tensors():
        known.group.lend(_Loan(values, known.place, by, spoil, is_counted))


def taken_of(x: Any) -> list[Tensor]:
    """The ordinary tensors that stubs took for a tensor, or for one that it is a view of."""
    known = _membership(x)
    taken = [loan.values() for loan in known.group.loans if loan.is_taken] if known is not None else []
    return [values for values in taken if values is not None]


def is_known(x: Any) -> bool:
    """Does a tensor share its memory in float?"""
    return _MEMBERSHIP in x.__dict__


def written_loan(x: Any) -> str | None:
    """Who lent real values that are one with a tensor in float, and were written to since; None if nobody did."""
    known = _membership(x)
    if known is None:
        return None
    return next((n.by for n in known.group.loans if n.is_written and overlap(n.place, known.place)), None)


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
