"""Steps of a program that repeat: what a recurrent network does at each time.

A program has no control flow: a loop of the model is as many copies of its operators. `find_loops` finds them again.
Operators that follow each other are a step if they come again and again with the same settings and constants, and read

* the same value in each step,
* a value of the step itself, or of the one before,
* or one slice after the other of a value from before the loop, or of what an earlier loop gives.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from horizon_plugin_pytorch.program.note import Value, note_of, value_of
from horizon_plugin_pytorch.program.program import Program

_TRIED = 8  # candidates for the length of a step
_HOLE = "tensor"
_SELECT, _SLICE = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor
_UNBIND, _SPLIT = torch.ops.aten.unbind.int, torch.ops.aten.split.Tensor

Part = tuple[int, int | None]  # which operator of a step, and which of its results if there are several


@dataclass(frozen=True)
class Series:
    """Slices of a tensor, one for each step of a loop.

    Args:
        source: the tensor; or a loop and a part of its steps, whose results are the slices.
        axis: along which it is sliced; 0 for results of a loop.
        start, stride: the first slice, and how far it is to the next one.
        keeps_axis: does a slice have the axis, of size 1?
    """

    source: fx.Node | tuple[Loop, Part]
    axis: int
    start: int
    stride: int
    keeps_axis: bool = False


@dataclass(eq=False)
class Loop:
    """Steps that repeat. The second one stands for all: it reads the first, as each reads the one before.

    Args:
        steps: the operators of each step, in the order of the run.
        carried: what the second step reads of the first, and what the first reads in its place.
        series: what the second step reads of a series.
        slices: operators that are no part of any step, as they only show a slice of a tensor that many slices are read
            of: each may be taken where it is read.
    """

    steps: list[list[fx.Node]]
    carried: dict[fx.Node, fx.Node] = field(default_factory=dict)
    series: dict[fx.Node, Series] = field(default_factory=dict)
    slices: Collection[fx.Node] = ()

    @property
    def body(self) -> list[fx.Node]:
        """The operators of the step that stands for all."""
        return self.steps[1]

    @property
    def count(self) -> int:
        """How many steps there are."""
        return len(self.steps)

    def read_later(self) -> dict[Part, set[int]]:
        """What operators outside read: which steps of each part."""
        own = {node for step in self.steps for node in step}
        found: dict[Part, set[int]] = defaultdict(set)
        for time, step in enumerate(self.steps):
            for index, node in enumerate(step):
                for part, readers in _readers(node, self.slices):
                    if any(reader not in own for reader in readers):
                        found[index, part].add(time)
        return found


def _readers(node: fx.Node, slices: Collection[fx.Node]) -> Iterator[tuple[int | None, Iterable[fx.Node]]]:
    """Who reads which result of an operator; slices that are read when they are needed read nothing themselves."""
    for user in node.users:
        if user.target is operator.getitem:
            for _, readers in _readers(user, slices):
                yield user.args[1], readers  # type: ignore[misc]
        else:
            yield None, user.users if user in slices else (user,)


def find_loops(program: Program, fewest: int = 4) -> list[Loop]:
    """The loops of a program, in the order of the run; none overlaps another.

    Args:
        fewest: steps of a loop; at least 3.
    """
    return _Search(program, fewest).loops


def part_of(node: fx.Node) -> tuple[fx.Node, int | None]:
    """The operator that gives a tensor, and which of its results it is if there are several."""
    if node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, None


def slices_of(node: fx.Node) -> tuple[fx.Node, int, bool] | None:
    """What an operator cuts into slices of size 1: the tensor, the axis, and whether slices keep it."""
    if node.target is _UNBIND:
        return _cut(node, False)
    if node.target is _SPLIT and node.args[1] == 1:
        return _cut(node, True)
    return None


def _cut(node: fx.Node, keeps_axis: bool) -> tuple[fx.Node, int, bool]:
    source: Any = node.args[0]
    axis: Any = node.kwargs.get("dim", node.args[1 + keeps_axis] if len(node.args) > 1 + keeps_axis else 0)
    return source, axis % len(value_of(source).shape), keeps_axis


def one_slice(node: fx.Node) -> tuple[fx.Node, int, bool, int] | None:
    """Of an operator that shows one slice of size 1: the tensor, the axis, whether it is kept, and which slice."""
    args: Any = node.args
    if node.target is _SELECT:
        shape = value_of(args[0]).shape
        return args[0], args[1] % len(shape), False, args[2] % shape[args[1]]
    is_one = node.target is _SLICE and len(args) == 4 and isinstance(args[2], int) and args[3] == args[2] + 1
    if is_one and args[2] >= 0:
        return args[0], args[1] % len(value_of(args[0]).shape), True, args[2]
    return None


def _slices(program: Program, fewest: int) -> dict[fx.Node, tuple[fx.Node, int, bool, int]]:
    """Operators that show one slice each of tensors of which several are shown."""
    found = {node: cut for node in program.operators if (cut := one_slice(node)) is not None}
    positions: dict[Hashable, set[int]] = defaultdict(set)
    for *which, position in found.values():
        positions[tuple(which)].add(position)
    return {node: cut for node, cut in found.items() if len(positions[cut[:3]]) >= fewest}


def _form(value: Any, sources: list[fx.Node]) -> Hashable:
    """An argument without its tensors, which are added to a list."""
    if isinstance(value, fx.Node):
        sources.append(value)
        return _HOLE
    if isinstance(value, (list, tuple)):
        return tuple(_form(part, sources) for part in value)
    return (type(value), repr(value) if isinstance(value, float) else value)


class _Search:
    """Looks for loops from the first operator to the last."""

    def __init__(self, program: Program, fewest: int) -> None:
        self._fewest, self._constants = fewest, program.constants
        self._slices = _slices(program, fewest)
        self._nodes = [node for node in program.operators if node not in self._slices]
        self._order = {node: i for i, node in enumerate(self._nodes)}
        self._sources: list[list[fx.Node]] = []
        self._looks = self._all_looks()
        self._next = self._next_alike()
        self._steps: dict[fx.Node, tuple[Loop, int, int]] = {}  # the loop, time and index of operators in loops
        self.loops: list[Loop] = []
        at = 0
        while at < len(self._nodes):
            found = self._loop_at(at)
            if found is None:
                at += 1
                continue
            self.loops.append(found)
            for time, step in enumerate(found.steps):
                for index, node in enumerate(step):
                    self._steps[node] = (found, time, index)
            at = self._order[found.steps[-1][-1]] + 1

    def _all_looks(self) -> list[int]:
        """A number for each operator; those that could be the same operator of two steps have the same."""
        known: dict[Hashable, int] = {}
        looks = []
        for node in self._nodes:
            sources: list[fx.Node] = []
            note = note_of(node)
            values = tuple(map(_kind, note.values))
            look = (
                node.target, note.path, values, _form(node.args, sources), tuple(node.kwargs),
                _form(tuple(node.kwargs.values()), sources),
            )  # fmt: skip
            self._sources.append(sources)
            looks.append(known.setdefault(look, len(known)))
        return looks

    def _next_alike(self) -> list[int]:
        """For each operator, where the next one is that looks the same; 0 if there is none."""
        last: dict[int, int] = {}
        found = [0] * len(self._nodes)
        for i in reversed(range(len(self._nodes))):
            found[i] = last.get(self._looks[i], 0)
            last[self._looks[i]] = i
        return found

    def _loop_at(self, start: int) -> Loop | None:
        """The largest loop that starts at an operator, or within the first step after it."""
        best, most = 0, 0
        for length in self._lengths(start):
            alike = self._alike_from(start, length)
            if alike >= (self._fewest - 1) * length and alike + length > most + best:
                best, most = length, alike
        if not best:
            return None
        first = start + self._narrowest(start, best) if most >= 3 * best else start
        return self._checked(first, best) or (None if first == start else self._checked(start, best))

    def _lengths(self, start: int) -> Iterator[int]:
        at = start
        for _ in range(_TRIED):
            at = self._next[at]
            if not at:
                return
            yield at - start

    def _alike_from(self, start: int, length: int) -> int:
        """How many operators from here on look like those a step later."""
        looks, at = self._looks, start
        while at + length < len(looks) and looks[at] == looks[at + length]:
            at += 1
        return at - start

    def _narrowest(self, start: int, length: int) -> int:
        """Where between two steps the fewest values are passed on: which operator is the first of a step."""
        last_read: dict[int, int] = {}
        for at in range(start + length, min(start + 3 * length, len(self._nodes))):
            for source in self._sources[at]:
                made = self._made(source)
                if made >= start:
                    last_read[made] = at
        passing = [0] * (length + 1)
        for made, read in last_read.items():
            low, high = max(made + 1, start + length), min(read, start + 2 * length - 1)
            if low <= high:
                passing[low - start - length] += 1
                passing[high + 1 - start - length] -= 1
        best, fewest, count = 0, len(self._nodes), 0
        for offset in range(length):
            count += passing[offset]
            if count < fewest:
                best, fewest = offset, count
        return best

    def _checked(self, start: int, length: int) -> Loop | None:
        """The loop of steps of this length, if they read what steps may read."""
        carried: dict[fx.Node, fx.Node] = {}
        series: dict[fx.Node, Series] = {}
        fixed: set[fx.Node] = set()
        strides: dict[tuple[int, int], int] = {}
        for index in range(length):
            if not self._begins(start, length, start + index, carried, series, fixed, strides):
                return None
        if not fixed.isdisjoint(series) or not set(carried).isdisjoint(series):
            return None
        at = start + length
        while at + length < len(self._nodes) and self._goes_on(start, length, at, strides):
            at += 1
        count = (at - start) // length + 1
        if count < self._fewest:
            return None
        steps = [self._nodes[start + i * length : start + (i + 1) * length] for i in range(count)]
        return Loop(steps, carried, series, self._slices)

    def _begins(
        self,
        start: int,
        length: int,
        at: int,
        carried: dict[fx.Node, fx.Node],
        series: dict[fx.Node, Series],
        fixed: set[fx.Node],
        strides: dict[tuple[int, int], int],
    ) -> bool:
        """Does an operator of the second step read what that of the first does, or what stands for it?"""
        if self._looks[at] != self._looks[at + length]:
            return False
        for index, (a, b) in enumerate(zip(self._sources[at], self._sources[at + length], strict=True)):
            if a is b and self._made(a) < start:
                fixed.add(a)
                continue
            if not self._is_like(a, b):
                return False
            if self._is_later(a, b, length, start):
                continue
            found = self._series(a, b)
            if found is not None:
                strides[at - start, index] = found.stride
                if series.setdefault(b, found) != found:
                    return False
                continue
            is_of_first = start <= self._made(b) < start + length and b not in self._slices
            if not is_of_first or self._made(a) >= start:
                return False
            if carried.setdefault(b, a) is not a:
                return False
        return True

    def _goes_on(self, start: int, length: int, at: int, strides: dict[tuple[int, int], int]) -> bool:
        """Does an operator read what it must after the one of the step before?"""
        if self._looks[at] != self._looks[at + length]:
            return False
        own = (at - start) % length
        for index, (a, b) in enumerate(zip(self._sources[at], self._sources[at + length], strict=True)):
            if (own, index) in strides:
                found = self._series(a, b)
                is_next = found is not None and found.stride == strides[own, index]
                if not is_next or _kind(value_of(a)) != _kind(value_of(b)):
                    return False
            elif not (a is b and self._made(a) < start) and not self._is_later(a, b, length, start):
                return False
        return True

    def _origin(self, source: fx.Node) -> tuple[fx.Node, Hashable]:
        """The operator that a tensor comes of, and how: which of its results, which slice."""
        if source not in self._slices:
            return part_of(source)
        whole, part = part_of(self._slices[source][0])
        return whole, (part, self._slices[source][1:])

    def _made(self, source: fx.Node) -> int:
        """When a tensor is computed; -1 for constants and inputs."""
        return self._order.get(self._origin(source)[0], -1)

    def _is_later(self, a: fx.Node, b: fx.Node, length: int, start: int) -> bool:
        """Is a tensor of the loop what another one is, a step later?"""
        (first, how), (second, later) = self._origin(a), self._origin(b)
        made = self._order.get(first, -1)
        return how == later and made >= start and self._order.get(second, -1) - made == length

    def _is_like(self, a: fx.Node, b: fx.Node) -> bool:
        """May a tensor stand for another one: is it of the same kind, or are these constants among its numbers?"""
        first, second = value_of(a), value_of(b)
        if a.op != "get_attr" or second.quantization is None:
            return _kind(first) == _kind(second)
        low, high = second.quantization.range or (second.quantization.dtype.min, second.quantization.dtype.max)
        numbers = self._constants[str(a.target)]
        is_inside = numbers.numel() == 0 or bool((numbers >= low).all() and (numbers <= high).all())
        return (first.shape, first.dtype) == (second.shape, second.dtype) and is_inside

    def _series(self, a: fx.Node, b: fx.Node) -> Series | None:
        """The series that two tensors, one after the other, belong to."""
        if a in self._slices and b in self._slices:
            (source, axis, keeps_axis, first), after = self._slices[a], self._slices[b]
            is_one = (source, axis, keeps_axis) == after[:3] and first != after[3]
            return Series(source, axis, first, after[3] - first, keeps_axis) if is_one else None
        (whole, part), (other, next_part) = part_of(a), part_of(b)
        cut = slices_of(whole) if whole is other and whole.op == "call_function" else None
        if cut is not None and part is not None and next_part is not None:
            return Series(cut[0], cut[1], part, next_part - part, cut[2])
        if whole not in self._steps or other not in self._steps or part != next_part:
            return None
        (loop, time, index), (other_loop, next_time, other_index) = self._steps[whole], self._steps[other]
        if loop is not other_loop or index != other_index or time == next_time:
            return None
        return Series((loop, (index, part)), 0, time, next_time - time)


def _kind(value: Value) -> Hashable:
    """What a tensor is like: shape, type, and of integers the number format and the range."""
    known = value.quantization
    return value.shape, value.dtype, None if known is None else (str(known.dtype), known.range)
