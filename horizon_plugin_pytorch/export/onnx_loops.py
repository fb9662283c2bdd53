"""Loops of a program as ONNX `Scan`: one step is written, however many there are."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph
from horizon_plugin_pytorch.program import Program
from horizon_plugin_pytorch.program.loops import Loop, Part, Series, find_loops, part_of, slices_of
from horizon_plugin_pytorch.program.note import note_of, operator_name, value_of

_JOINING = ("aten::stack", "aten::cat")
_END = 2**62


class Writer(Protocol):
    """Who writes the operators of a program."""

    graph: OnnxGraph

    def bind(self, node: fx.Node, name: str) -> None:
        """Let a value of the file be what a node gives."""

    def name_of(self, node: fx.Node) -> str:
        """The value of the file that a node gives."""

    def name_of_part(self, node: fx.Node, part: int | None) -> str:
        """The value of the file that a node gives, or one of several."""

    def add(self, node: fx.Node, label: str = "") -> None:
        """Write a node."""

    def own_names(self) -> Any:
        """What is bound in here is forgotten afterwards."""


@dataclass
class _Results:
    """What a loop of the file gives."""

    finals: dict[Part, str] = field(default_factory=dict)
    kept: dict[Part, tuple[str, bool]] = field(default_factory=dict)  # of all steps; does the last one come first?


class LoopWriter:
    """Writes the loops of a program.

    Args:
        program: what is written.
        writer: who writes its other operators.
        fewest: steps of a loop; where there are fewer, each is written.
    """

    def __init__(self, program: Program, writer: Writer, fewest: int) -> None:
        self._writer, self._graph = writer, writer.graph
        self._loops = {loop.steps[0][0]: loop for loop in find_loops(program, fewest)}
        self._places: dict[fx.Node, tuple[Loop, int, int]] = {}
        self._sliced: set[fx.Node] = set()  # operators that cut a tensor into slices, which loops read
        self._slices: set[fx.Node] = set()  # and those that show one slice: written where they are read
        self._results: dict[Loop, _Results] = {}
        for loop in self._loops.values():
            for time, step in enumerate(loop.steps):
                self._places.update((node, (loop, time, index)) for index, node in enumerate(step))
            self._slices.update(loop.slices)
            cuts = [part_of(node)[0] for node in loop.series]
            self._sliced.update(node for node in cuts if slices_of(node) is not None)

    def takes(self, node: fx.Node) -> bool:
        """Write the loop that starts at a node; true also for nodes that are written with a loop, or when asked for."""
        if not self._loops:
            return False
        if node in self._loops:
            self._write(self._loops[node])
        whole, _ = part_of(node)
        return whole in self._places or whole in self._sliced or node in self._slices

    def is_late(self, node: fx.Node) -> bool:
        """Is this operator written where it is read?"""
        return node in self._slices

    def find(self, node: fx.Node) -> str | None:
        """What a node gives that is in a loop, or a slice of what loops read; None for others."""
        whole, part = part_of(node)
        if whole in self._sliced and part is not None:
            source, axis, keeps_axis = slices_of(whole)  # type: ignore[misc]
            index: Any = [part] if keeps_axis else part
            position = self._graph.constant(index, torch.int64, "index")
            return self._graph.node("Gather", self._writer.name_of(source), position, axis=axis)
        if whole not in self._places or self._places[whole][0] not in self._results:
            return None
        loop, time, own = self._places[whole]
        results = self._results[loop]
        if time == loop.count - 1 and (own, part) in results.finals:
            return results.finals[own, part]
        name, is_reversed = results.kept[own, part]
        position = self._graph.constant(loop.count - 1 - time if is_reversed else time, torch.int64, "index")
        return self._graph.node("Gather", name, position, axis=0)

    # -- a loop ------------------------------------------------------------------------------------------------------

    def _write(self, loop: Loop) -> None:
        graph, writer = self._graph, self._writer
        wholes = {series: self._whole(series, loop.count) for series in dict.fromkeys(loop.series.values())}
        firsts = {node: writer.name_of(first) for node, first in loop.carried.items()}
        later, results = loop.read_later(), _Results()
        with graph.body(), writer.own_names():
            given = {node: graph.step_input("state", value_of(node).dtype) for node in loop.carried}
            slices = {series: self._slice(series, loop) for series in wholes}
            for node, name in given.items():
                writer.bind(node, name)
            for node, series in loop.series.items():
                writer.bind(node, self._shaped(slices[series], series))
            for node, label in zip(loop.body, loop.steps[0], strict=True):
                writer.add(node, label.name)
            index_of = {node: index for index, node in enumerate(loop.steps[0])}
            parts: list[Part] = [(index_of[whole], part) for whole, part in map(part_of, loop.carried)]
            kept = [
                part for part, times in later.items() if part not in parts or times != {loop.count - 1}
            ]  # fmt: skip
            states = [
                (firsts[node], given[node], self._of_body(loop, part))
                for node, part in zip(loop.carried, parts, strict=True)
            ]
            backwards = {part: _is_read_backwards(loop, part) for part in kept}
            read = [(wholes[series][0], slices[series], *wholes[series][1:]) for series in wholes]
            if not read:  # a Scan has as many steps as what it reads
                steps = graph.constant(torch.zeros(loop.count, dtype=torch.uint8), hint="steps")
                read = [(steps, graph.step_input("slice", torch.uint8), 0, False)]
            lasts, wholes_kept = graph.scan(
                states, read, [(self._of_body(loop, part), backwards[part]) for part in kept]
            )
        results.finals = dict(zip(parts, lasts, strict=True))
        results.kept = {part: (name, backwards[part]) for part, name in zip(kept, wholes_kept, strict=True)}
        self._results[loop] = results

    def _of_body(self, loop: Loop, part: Part) -> str:
        return self._writer.name_of_part(loop.body[part[0]], part[1])

    def _whole(self, series: Series, count: int) -> tuple[str, int, bool]:
        """What a series is read of, slice by slice; the axis, and whether the last slice comes first."""
        first, stride = series.start, series.stride
        if isinstance(series.source, fx.Node):
            name, size = self._writer.name_of(series.source), value_of(series.source).shape[series.axis]
        else:
            loop, part = series.source
            size = loop.count
            name, is_reversed = self._results[loop].kept[part]
            if is_reversed:
                first, stride = size - 1 - first, -stride
        ends = sorted((first, first + (count - 1) * stride))
        return self._cut(name, series.axis, ends[0], ends[1] + 1, abs(stride), size), series.axis, stride < 0

    def _cut(self, name: str, axis: int, low: int, high: int, step: int, size: int) -> str:
        """Some of the slices of a tensor."""
        if (low, high, step) == (0, size, 1):
            return name
        # Counted from the end, the end is the same at all sizes.
        bounds = (low, _END if high >= size else high - size, axis, step)
        return self._graph.node("Slice", name, *(self._graph.constant([v], torch.int64, "slice") for v in bounds))

    def _slice(self, series: Series, loop: Loop) -> str:
        """The name of a slice in the body."""
        source = series.source
        if isinstance(source, fx.Node):
            dtype = value_of(source).dtype
        else:
            other, (index, part) = source
            dtype = note_of(other.body[index]).values[part or 0].dtype
        return self._graph.step_input("slice", dtype)

    def _shaped(self, name: str, series: Series) -> str:
        if not series.keeps_axis:
            return name
        return self._graph.node("Unsqueeze", name, self._graph.constant([series.axis], torch.int64, "axes"))

    # -- what all steps give -----------------------------------------------------------------------------------------

    def joined(self, node: fx.Node) -> str | None:
        """What joins results of the steps of a loop; None for other operators."""
        if not self._results or operator_name(node) not in _JOINING:
            return None
        tensors: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
        runs = self._runs(tensors)
        if len(runs) == len(tensors):
            return None
        is_stack, shape = operator_name(node) == "aten::stack", value_of(node).shape
        dim: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        axis = dim % len(shape)
        pieces = [self._piece(tensors, run, axis, is_stack) for run in runs]
        return pieces[0] if len(pieces) == 1 else self._graph.node("Concat", *pieces, axis=axis)

    def _runs(self, tensors: Sequence[fx.Node]) -> list[tuple[int, int]]:
        """Neighbours in a list that steps after steps give, from one position to another."""
        runs: list[tuple[int, int]] = []
        places = [self._place(x) for x in tensors]
        for at, place in enumerate(places):
            if runs and place is not None:
                first, end = runs[-1]
                before, start = places[end - 1], places[first]
                step = 0 if before is None or before[::2] != place[::2] else place[1] - before[1]
                is_next = abs(step) == 1 and (end - first == 1 or (before[1] - start[1]) * step > 0)  # type: ignore[index]
                if is_next:
                    runs[-1] = (first, at + 1)
                    continue
            runs.append((at, at + 1))
        return runs

    def _place(self, x: fx.Node) -> tuple[Loop, int, Part] | None:
        whole, part = part_of(x)
        if whole not in self._places:
            return None
        loop, time, index = self._places[whole]
        return loop, time, (index, part)

    def _piece(self, tensors: Sequence[fx.Node], run: tuple[int, int], axis: int, is_stack: bool) -> str:
        """What a run of tensors is, joined along an axis."""
        graph, (first, end) = self._graph, run
        if end - first == 1:
            name = self._writer.name_of(tensors[first])
            return graph.node("Unsqueeze", name, graph.constant([axis], torch.int64, "axes")) if is_stack else name
        place, last = self._place(tensors[first]), self._place(tensors[end - 1])
        assert place is not None and last is not None
        loop, time, part = place
        name, is_reversed = self._results[loop].kept[part]
        times = [loop.count - 1 - t if is_reversed else t for t in (time, last[1])]
        name = self._cut(name, 0, min(times), max(times) + 1, 1, loop.count)
        if times[0] > times[1]:
            bounds = (-1, -_END, 0, -1)
            name = graph.node("Slice", name, *(graph.constant([v], torch.int64, "slice") for v in bounds))
        shape = list(value_of(tensors[first]).shape)
        if axis:
            order = list(range(1, len(shape) + 1))
            order.insert(axis, 0)
            name = graph.node("Transpose", name, perm=order)
        if is_stack:
            return name
        shape[axis] *= end - first
        return graph.reshape(name, shape)


def _is_read_backwards(loop: Loop, part: Part) -> bool:
    """Does somebody join results of the steps, the last one first?"""
    index, number = part
    values = []
    for step in loop.steps[:2]:
        node = step[index]
        if number is not None:
            node = next((u for u in node.users if u.target is operator.getitem and u.args[1] == number), node)
        values.append(node)
    for user in values[1].users:
        joined: Any = user.args[0] if operator_name(user) in _JOINING else ()
        if values[0] in joined:
            return joined.index(values[0]) > joined.index(values[1])
    return False
