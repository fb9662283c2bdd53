"""Steps of a program that repeat: what is found, and that one step, run again and again, gives what all give."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.program import Program, record_program
from horizon_plugin_pytorch.program.loops import Loop, Series, find_loops

STEPS = 7
X = torch.randn(STEPS, 3, 4, generator=torch.Generator().manual_seed(2))
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))


class Function(nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def _recorded(function: Callable) -> Program:
    return record_program(Function(function), X)


def _carried(x: Tensor) -> Tensor:
    h = torch.zeros(3, 4)
    for part in x:
        h = torch.tanh(h @ WEIGHT + part)
    return h


def _two_states(x: Tensor) -> Any:
    a, b, outs = x[0], x[1] * 2, []
    for t in range(STEPS):
        a, b = torch.sigmoid(b + x[t]), torch.tanh(a * x[STEPS - 1 - t])
        outs.append(a.chunk(2, -1)[1])
    return torch.stack(outs), b


def _swapped(x: Tensor) -> Tensor:
    """What a step takes is what another operator of the step before gave."""
    a = b = x[0]
    for t in range(1, STEPS):
        a, b = b, torch.tanh(a + b * x[t])
    return a + b


def _other_start(x: Tensor) -> Tensor:
    """The first step computes something else."""
    h = torch.relu(x[0])
    for t in range(1, STEPS):
        h = torch.tanh(torch.relu(h) + x[t])
    return torch.relu(h)


def _in_parts(x: Tensor) -> Tensor:
    """A loop reads what another one gave, backwards."""
    outs, h = [], torch.zeros(3, 4)
    for part in x.split(1):
        h = torch.tanh(h + part[0])
        outs.append(h)
    g = torch.ones(3, 4)
    for h in reversed(outs):
        g = torch.sigmoid(g * h)
    return g


def _both_ways(x: Tensor) -> Tensor:
    """Slices that the first loop has taken are read again."""
    outs = []
    for times in (range(STEPS), reversed(range(STEPS))):
        h = torch.zeros(3, 4)
        for t in times:
            h = torch.tanh(h * 0.5 + x[t])
        outs.append(h)
    return torch.cat(outs)


def _quarters(x: Tensor) -> Tensor:
    """A step takes its own result apart."""
    h = torch.zeros(3)
    for part in x:
        y = torch.tanh(part)
        h = torch.sigmoid(h + y[:, 0] * y[:, 1] + y[:, 2] * y[:, 3])
    return h


def _mapped(x: Tensor) -> Tensor:
    return torch.cat([torch.tanh(x[:, :, i : i + 1]).exp() for i in range(4)], -1)


_FUNCTIONS = (_carried, _two_states, _swapped, _other_start, _in_parts, _both_ways, _quarters, _mapped)
LOOPS = {f.__name__.strip("_"): f for f in _FUNCTIONS}


def _values(program: Program) -> dict[fx.Node, Any]:
    found: dict[fx.Node, Any] = {node: program.constants[str(node.target)] for node in program.graph.nodes
                                 if node.op == "get_attr"}  # fmt: skip
    return found | dict(program.run(X))


def _slice(series: Series, time: int, values: dict[fx.Node, Any]) -> Tensor:
    position = series.start + time * series.stride
    if isinstance(series.source, fx.Node):
        whole = values[series.source]
        return whole.narrow(series.axis, position, 1) if series.keeps_axis else whole.select(series.axis, position)
    loop, (index, part) = series.source
    value = values[loop.steps[position][index]]
    return value if part is None else value[part]


def _assert_repeats(loop: Loop, values: dict[fx.Node, Any]) -> None:
    """Run the body as often as there are steps, and compare with what the program computed."""
    state = {node: values[first] for node, first in loop.carried.items()}
    for time, step in enumerate(loop.steps):
        now = {**values, **state, **{node: _slice(series, time, values) for node, series in loop.series.items()}}
        for node, own in zip(loop.body, step, strict=True):
            args, kwargs = fx.map_arg((node.args, node.kwargs), now.__getitem__)
            now[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for part in node.users:
                if part.target is operator.getitem:
                    now[part] = now[node][part.args[1]]
                elif part in loop.slices:
                    now[part] = part.target(now[node], *part.args[1:])  # type: ignore[operator]
            torch.testing.assert_close(now[node], values[own], rtol=0, atol=0)
        last = dict(zip(loop.steps[0], loop.body, strict=True))
        for node in state:
            whole: Any = node.args[0] if node.target is operator.getitem else node
            state[node] = now[last[whole]] if whole is node else now[last[whole]][node.args[1]]


@pytest.mark.parametrize("name", LOOPS)
def test_one_step_stands_for_all(name: str) -> None:
    program = _recorded(LOOPS[name])
    loops = find_loops(program)
    assert loops and all(loop.count >= 4 for loop in loops)
    assert sum(loop.count * len(loop.body) for loop in loops) > 0.4 * len(program.operators)
    values = _values(program)
    for loop in loops:
        _assert_repeats(loop, values)


def test_what_passes_from_step_to_step_is_little() -> None:
    """A step begins where the fewest values are alive."""
    (loop,) = find_loops(_recorded(_other_start))
    assert len(loop.carried) == 1


def test_what_is_read_later() -> None:
    def function(x: Tensor) -> Any:
        h, outs = torch.zeros(3, 4), []
        for part in x:
            h = torch.tanh(h + part)
            outs.append(h)
        return h, outs[2]

    (loop,) = find_loops(_recorded(function))
    assert loop.read_later() == {(1, None): {2, STEPS - 1}}


def _two_back(x: Tensor) -> Tensor:
    a = b = x[0]
    for _ in range(STEPS):
        a, b = torch.tanh(b), a
    return a + b


def _growing(x: Tensor) -> Tensor:
    h = x[0]
    for part in x:
        h = torch.cat([h, part])
    return h


def _other_numbers(x: Tensor) -> Tensor:
    h = x[0]
    for t in range(STEPS):
        h = torch.tanh(h + x[t] * (1 + 0.1 * t))
    return h


def _other_constants(x: Tensor) -> Tensor:
    h = x[0]
    for t in range(STEPS):
        h = torch.tanh(h + x[t] * torch.full((4,), 1 + 0.1 * t))
    return h


def _uneven(x: Tensor) -> Tensor:
    h = x[0]
    for t in (0, 1, 3, 2, 4, 6, 5):
        h = torch.tanh(h + x[t])
    return h


@pytest.mark.parametrize("function", [_two_back, _growing, _other_numbers, _other_constants, _uneven])
def test_what_differs_from_step_to_step_is_no_loop(function: Callable) -> None:
    assert not find_loops(_recorded(function))


def test_few_steps_are_left_as_they_are() -> None:
    program = _recorded(_carried)
    assert find_loops(program, STEPS - 1) and not find_loops(program, STEPS + 1)
