"""Steps that are alike are recorded three times, and then copied: the program is the same, and is made much sooner."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from horizon_plugin_pytorch.program.builder import Builder
from horizon_plugin_pytorch.program.memory import plain
from horizon_plugin_pytorch.program.note import note_of, set_note
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.steps import StepFunction

_RECORDED = 3  # steps: the first may be another one, and two must be alike


class CopiedSteps:
    """Takes the steps of a recurrent network while it is recorded.

    Args:
        builder: of the program.
        keep: gets tensors with data, which must stay alive.
    """

    def __init__(self, builder: Builder, keep: Any) -> None:
        self._builder, self._keep = builder, keep

    def __call__(self, step: StepFunction, inputs: Sequence[Any], state: tuple) -> list[tuple]:
        """The state after each step."""
        states: list[tuple] = []
        recorded: list[list[fx.Node]] = []
        for index, x in enumerate(inputs):
            if index == _RECORDED:
                copies = self._copied(inputs, states, recorded)
                if copies is not None:
                    return states + copies
            last = next(iter(reversed(self._builder.graph.nodes)), None)
            state = step(x, state)
            states.append(state)
            if index < _RECORDED:
                recorded.append(self._nodes_after(last))
        return states

    def _nodes_after(self, last: fx.Node | None) -> list[fx.Node]:
        found: list[fx.Node] = []
        for node in reversed(self._builder.graph.nodes):
            if node is last:
                break
            found.append(node)
        return found[::-1]

    def _copied(self, inputs: Sequence[Any], states: list[tuple], recorded: list[list[fx.Node]]) -> list[tuple] | None:
        """The states of the steps that are left; None if the last two recorded ones are not alike."""
        every = [*inputs, *(x for state in states[-2:] for x in state)]
        if not all(isinstance(x, QTensor) and self._builder.is_data(x) for x in every):
            return None
        before, now = ([node for node in nodes if node.op == "call_function"] for nodes in recorded[1:])
        nodes = [[self._builder.node_of(x) for x in state] for state in states]
        given = [self._builder.node_of(x) for x in inputs]
        likes = zip(states[-1], states[-2], strict=True)
        if not before or len(now) != len(recorded[2]) or not all(_is_like(a, b) for a, b in likes):
            return None
        passed = dict(zip(nodes[0], nodes[1], strict=True))
        if not _are_alike(before, now, {**passed, given[1]: given[2]}):
            return None
        return self._copies(now, given, inputs, nodes, states[-1])

    def _copies(
        self, step: list[fx.Node], given: list[fx.Node], inputs: Sequence[Any], nodes: list[list[fx.Node]], state: tuple
    ) -> list[tuple]:
        """Steps like a recorded one, which read each other's states.

        Nothing is computed: a program depends on no number, so the states have those of the step that was recorded.
        """
        found = []
        names = [self._name(node) for node in step]
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            values: list[Tensor] = [plain(x) for x in state]
            before, own = nodes[1], nodes[2]  # what the recorded step reads, and what it gives
            latest = own
            for index in range(_RECORDED, len(inputs)):
                known = {given[2]: given[index], **dict(zip(before, latest, strict=True))}
                for node, name in zip(step, names, strict=True):
                    known[node] = self._copy(node, name, known)
                latest = [known[node] for node in own]
                found.append(tuple(like.like(x.clone()) for like, x in zip(state, values, strict=True)))
                for node, x in zip(latest, found[-1], strict=True):
                    self._builder.bind(x, node)
                    self._keep(x)
        return found

    def _name(self, node: fx.Node) -> str:
        """What copies of a node are called; empty if that depends on what they read."""
        return "" if node.target is operator.getitem else self._builder.name_for(node.target, note_of(node).path)

    def _copy(self, node: fx.Node, name: str, known: dict[fx.Node, fx.Node]) -> fx.Node:
        """A node like another, which reads other nodes."""
        args, kwargs = (_with_nodes(values, known) for values in (node.args, node.kwargs))
        name = name or f"{args[0].name}_{args[1]}"
        copy = self._builder.graph.create_node(node.op, node.target, name=name)
        copy.args = args  # torch looks for symbols in what `create_node` is given, which takes most of its time
        if kwargs:
            copy.kwargs = kwargs
        return set_note(copy, note_of(node))


def _with_nodes(values: Any, known: dict[fx.Node, fx.Node]) -> Any:
    """Arguments in which known nodes stand for others."""
    return fx.map_arg(values, lambda x: known.get(x, x))


def _are_alike(before: list[fx.Node], now: list[fx.Node], known: dict[fx.Node, fx.Node]) -> bool:
    """Do nodes of a step what those of the step before do, where known nodes stand for others?"""
    if len(before) != len(now):
        return False
    known = dict(known)
    inside = set(now)
    for a, b in zip(before, now, strict=True):
        expected = fx.map_arg((a.args, a.kwargs), lambda x: known.get(x, x))
        if a.target is not b.target or expected != (b.args, b.kwargs) or note_of(a).path != note_of(b).path:
            return False
        read = [x for x in b.all_input_nodes if x not in inside and x not in known.values()]
        if any(x.op != "get_attr" for x in read):  # values of before, of which the numbers are not at hand
            return False
        known[a] = b
    return True


def _is_like(a: QTensor, b: QTensor) -> bool:
    """Are two tensors alike, but for their numbers?"""
    own = (a.shape, str(a.dtype), a.per_channel_axis, a.is_integer, a.is_rounded, a.range)
    other = (b.shape, str(b.dtype), b.per_channel_axis, b.is_integer, b.is_rounded, b.range)
    has_grid = any(x.grid is not None and not x.is_integer for x in (a, b))
    return own == other and not has_grid and torch.equal(a.q_scale(), b.q_scale())
