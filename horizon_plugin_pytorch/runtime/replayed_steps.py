"""Steps on integers, taken again without the modules around them.

A step of a recurrent module is a dozen operators on a few numbers, and what surrounds them (modules, scales, plans)
costs a hundred times as much as they do. From the second step on all steps are alike: the second is written down as a
list of calls, and the others run this list. It gives the same integers: our operators are there with the same
constants, for few numbers on the CPU in forms whose calls cost least, on arrays of numpy
(`fixed_point/step_forms.py`), else as the operators of torch that they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from horizon_plugin_pytorch.fixed_point.library import kernel_of
from horizon_plugin_pytorch.fixed_point.step_forms import in_float64, move_form, step_form
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.steps import is_walked
from horizon_plugin_pytorch.untraced import is_recorded

_FEWEST = 4  # steps for which writing one down is worth it
_MOST_NUMBERS = 4096  # in a state, for which the calls take longer than the numbers


def replay_steps(step: nn.Module, inputs: QTensor, state: tuple, is_reversed: bool) -> tuple[QTensor, tuple] | None:
    """Take all steps on a sequence: the first part of the state after each of them, in the sequence's order; the last.

    Args:
        step: gives the next state of an input and the state before; a state is a tuple of tensors.
        inputs: for all steps, along the first axis.
        state: the first one.
        is_reversed: begin at the end of the sequence.

    Returns:
        None where only the step itself will do: while training or observing, and where somebody watches its parts.
    """
    count = inputs.shape[0]
    if count < _FEWEST or is_walked() or is_recorded() or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return None
    if not _has_integers_alone(inputs) or any(map(_is_watched, step.modules())):
        return None
    order = range(count - 1, -1, -1) if is_reversed else range(count)
    first = step(inputs[order[0]], state)
    if not all(map(_has_integers_alone, first)):
        return None
    x: Any = inputs[order[1]]
    is_small = max(y.numel() for y in first) <= _MOST_NUMBERS
    for is_short in (True, False) if is_small and inputs.device.type == "cpu" else (False,):
        recording = _Recording([x.as_grid(), *(y.as_grid() for y in first)], is_short)
        with recording:
            second = step(x, first)
        if not all(map(_has_integers_alone, second)) or not all(map(_is_like, first, second)):
            return None
        if _shared(first) != _shared(second):
            return None
        program = recording.program([x.as_grid() for x in second])
        states = None if program is None else _walked(program, inputs, first, second, order)
        if program is not None and states is not None:
            shown = program.stacked([state[0] for state in (reversed(states) if is_reversed else states)])
            last = [program.stacked([x]).squeeze(0) for x in states[-1]]
            return _as(second[0], shown), tuple(map(_as, second, last))
    return None


def _walked(
    program: _Program, inputs: QTensor, first: tuple, second: tuple, order: Sequence[int]
) -> list[tuple[Any, ...]] | None:
    """The states after each step, of which the first two are known; None if the program gives another second."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        given = program.inputs(inputs.as_grid())
        states = [tuple(program.numbers(x.as_grid()) for x in state) for state in (first, second)]
        run = program.run
        again = run(*[x[order[1]] for x in given], *states[0])
        if not all(bool((x == y).all()) for x, y in zip(again, states[1], strict=True)):  # a constant of it was none
            return None
        if len(given) == 1:
            for index in order[2:]:
                states.append(run(given[0][index], *states[-1]))
        else:
            for index in order[2:]:
                states.append(run(*[x[index] for x in given], *states[-1]))
    return states


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _has_integers_alone(x: Any) -> bool:
    """Are its integers all that is wanted of a tensor, and no gradient?"""
    is_exact = isinstance(x, QTensor) and x.grid is not None
    return is_exact and not (torch.is_grad_enabled() and x.requires_grad)


def _is_like(one: QTensor, other: QTensor) -> bool:
    facts = [(x.shape, x.dtype, x.range, x.per_channel_axis, x.is_integer) for x in (one, other)]
    return facts[0] == facts[1] and torch.equal(one.scale, other.scale)


def _shared(state: tuple) -> list[int]:
    """For each tensor, the first one that shows the same memory."""
    shown = [_shown(x.as_grid()) for x in state]
    return list(map(shown.index, shown))


def _as(like: QTensor, integers: Tensor) -> QTensor:
    return like.like(integers) if like.is_integer else like.with_grid(integers)


# What gives the numbers that it takes, of whatever type and layout. `narrow` and `chunk` are seen in inference mode
# only: elsewhere torch takes them apart.
_MOVES = frozenset(
    f"aten::{name}" for name in "slice select split narrow chunk cat stack unsqueeze squeeze expand alias".split()
)


class _Recording(TorchDispatchMode):
    """Writes down what is computed of some tensors, which are known by the memory they show.

    What depends on none of the tensors is a constant.

    Args:
        given: the tensors.
        is_short: write our operators in their forms for short steps, on float64; else as the operators of torch that
            they are made of.
    """

    def __init__(self, given: Sequence[Tensor], is_short: bool) -> None:
        super().__init__()
        self._is_short = is_short
        self._given = self._count = len(given)
        self._places: dict[tuple, int] = {}
        for place, x in enumerate(given):
            self._places.setdefault(_shown(x), place)
        self._inputs = set(map(_memory, given))
        self._data = set(self._inputs)  # memory that depends on them
        self._calls: list[_Call] = []
        self._alive: list[Any] = list(given)  # memory that is given back would be shown by others
        self._is_plain = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper for that would import the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        is_own = func.namespace == "horizon"
        if is_own and not self._is_short:
            with self:
                return kernel_of(func)(*args, **kwargs)
        out = func(*args, **kwargs)
        if any(map(self._is_data, _tensors((args, kwargs)))):
            if is_own:
                self._write_short(func, args, out)
            else:
                self._write(func, args, kwargs, out)
        return out

    def _is_data(self, x: Any) -> bool:
        return isinstance(x, Tensor) and _memory(x) in self._data

    def _write_short(self, func: Any, args: tuple, out: Any) -> None:
        operands = [i for i, x in enumerate(args) if self._is_data(x)]
        if len(operands) != sum(map(self._is_data, _tensors(args))) or not isinstance(out, Tensor):
            self._is_plain = False  # operands in a list
            return
        form = step_form(func, args)
        if form is None:
            self._note(in_float64(func), args, {}, out)
            return
        taken = [x if self._is_data(x) else x.double().numpy() for x in args[: form.operands]]
        if form.prepared is not None:
            taken[1] = self._prepared(form.prepared, taken[1])
        self._note(form.function, tuple(taken), {}, out)

    def _prepared(self, function: Callable[[np.ndarray], np.ndarray], x: Tensor | np.ndarray) -> Tensor | np.ndarray:
        if isinstance(x, np.ndarray):
            return function(x)
        term = torch.from_numpy(function(x.double().numpy()))
        self._note(function, (x,), {}, term, is_of_all=True)
        return term

    def _write(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        if not all(isinstance(x, Tensor) for x in results):
            self._is_plain = False  # a number leaves the tensors
            return
        if func._schema.is_mutable:
            written = set(map(_memory, results))
            self._is_plain &= written <= self._data - self._inputs  # a constant that is written to is none
        elif all(_shown(x) in self._places for x in results):
            self._alive += results
            return  # another object for the same memory
        is_moving = func._schema.name in _MOVES
        function = move_form(func) if is_moving and self._is_short else func._op
        self._note(function, args, kwargs, out, is_moving=is_moving)

    def _note(
        self, function: Any, args: tuple, kwargs: dict, out: Any, is_of_all: bool = False, is_moving: bool = True
    ) -> None:
        """Put a call on the list."""
        gives_several = isinstance(out, (tuple, list))
        results, inputs = list(out) if gives_several else [out], _tensors((args, kwargs))
        if not all(_shown(x) in self._places for x in inputs if self._is_data(x)):
            self._is_plain = False
            return
        self._alive += results
        places = []
        for x in results:
            place = self._places.setdefault(_shown(x), self._count)
            self._count += place == self._count
            places.append(place)
        gives, reads = set(map(_memory, results)), set(map(_memory, inputs))
        self._data |= gives
        self._calls.append(_Call(function, args, kwargs, places, gives_several, gives, reads, is_of_all, is_moving))

    def program(self, wanted: Sequence[Tensor]) -> _Program | None:
        """How others are computed of the given tensors; None if what was seen is not all."""
        ends = [self._places.get(_shown(x)) for x in wanted]
        if not self._is_plain or None in ends:
            return None
        needed = set(map(_memory, wanted))
        kept = []
        for call in reversed(self._calls):
            if not needed.isdisjoint(call.gives):
                needed |= call.reads
                kept.append(call)
        if self._is_short and not all(call.is_moving for call in kept):
            return None
        before = [call for call in kept[::-1] if call.is_of_all and self._places[_shown(call.args[0])] == 0]
        rest = [call for call in kept[::-1] if call not in before]
        given = [0, *(call.places[0] for call in before), *range(1, self._given)]
        run = _compiled(rest, self._places, given, ends)
        return _Program(run, [call.function for call in before], self._is_short)


@dataclass(frozen=True)
class _Program:
    """A step as a function of its input, of what can be had of the inputs of all steps at once, and of the state."""

    run: Callable[..., tuple]
    before: list[Callable[[Any], Any]]
    is_short: bool

    def numbers(self, x: Tensor) -> Any:
        """A tensor as the function takes it."""
        return x.detach().double().numpy() if self.is_short else x.float()

    def inputs(self, x: Tensor) -> list[Any]:
        """What steps take of the inputs of all of them, along the first axis."""
        taken = self.numbers(x)
        return [taken if self.is_short else taken.unbind(0), *(function(taken) for function in self.before)]

    def stacked(self, numbers: Sequence[Any]) -> Tensor:
        """What the function gave in several steps, as one tensor."""
        return torch.from_numpy(np.stack(numbers)).float() if self.is_short else torch.stack(list(numbers))


@dataclass(frozen=True, eq=False)
class _Call:
    """A call: its arguments, the places of its results, and the memory that it gives and reads.

    Attributes:
        is_of_all: can it be had for all steps at once?
        is_moving: does it give integers in float64 for such?
    """

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    places: list[int]
    gives_several: bool
    gives: set[int]
    reads: set[int]
    is_of_all: bool
    is_moving: bool


def _shown(x: Tensor) -> tuple:
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [x for part in parts for x in _tensors(part)]


def _compiled(
    calls: Sequence[_Call], places: dict[tuple, int], given: Sequence[int], ends: Sequence[int | None]
) -> Callable[..., tuple]:
    """The calls as one Python function: a loop over them would cost as much as some of them.

    Args:
        places: of tensors, by the memory they show.
        given: what the function takes.
        ends: what the function gives.
    """
    constants: dict[str, Any] = {}

    def text(value: Any) -> str:
        if isinstance(value, Tensor) and _shown(value) in places:
            return f"v{places[_shown(value)]}"
        if isinstance(value, (tuple, list)) and any(_shown(x) in places for x in _tensors(value)):
            return f"[{', '.join(map(text, value))}]"
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    lines = []
    for number, call in enumerate(calls):
        constants[f"f{number}"] = call.function
        arguments = [*map(text, call.args), *(f"{name}={text(value)}" for name, value in call.kwargs.items())]
        results = ", ".join(f"v{place}" for place in call.places)
        results = f"[{results}]" if call.gives_several else results
        lines.append(f"    {results} = f{number}({', '.join(arguments)})")
    parameters, results = (", ".join(f"v{place}" for place in some) for some in (given, ends))
    source = "\n".join([f"def run({parameters}):", *lines, f"    return ({results},)"])
    exec(source, constants)
    return constants["run"]
