"""Steps on integers, taken again without the modules around them.

A step of a recurrent module is a dozen operators on a few numbers, and what surrounds them (modules, scales, plans)
costs a hundred times as much as they do. From the second step on all steps are alike: the second is written down as a
list of operators on ordinary tensors, and the others run this list. It gives the same integers, as it is the same
kernels with the same constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from horizon_plugin_pytorch.fixed_point.library import kernel_of
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.steps import is_walked
from horizon_plugin_pytorch.untraced import is_recorded

_FEWEST = 4  # steps for which writing one down is worth it


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
    given = inputs.as_grid().unbind(0)
    x: Any = inputs[order[1]]
    recording = _Recording([x.as_grid(), *(y.as_grid() for y in first)])
    with recording:
        second = step(x, first)
    if not all(map(_has_integers_alone, second)) or not all(map(_is_like, first, second)):
        return None
    if _shared(first) != _shared(second):
        return None
    run = recording.program([x.as_grid() for x in second])
    if run is None:
        return None
    states = [tuple(x.as_grid() for x in state) for state in (first, second)]
    with torch.no_grad(), torch._C.DisableTorchFunction():
        again = run(given[order[1]], *states[0])
        if not all(map(torch.equal, again, states[1])):  # a constant of the list was none
            return None
        for index in order[2:]:
            states.append(run(given[index], *states[-1]))
        shown = torch.stack([state[0] for state in (reversed(states) if is_reversed else states)])
    return _as(second[0], shown), tuple(_as(x, values) for x, values in zip(second, states[-1], strict=True))


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


class _Recording(TorchDispatchMode):
    """Writes down what is computed of some tensors, which are known by the memory they show.

    Our operators are written as the operators of torch that they are made of; what depends on none of the tensors is a
    constant.

    Args:
        given: the tensors.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._given = self._count = len(given)
        self._places: dict[tuple, int] = {}
        for place, x in enumerate(given):
            self._places.setdefault(_shown(x), place)
        self._inputs = set(map(_memory, given))
        self._data = set(self._inputs)  # memory that depends on them
        self._calls: list[_Call] = []
        self._alive: list[Any] = list(given)  # memory that is given back would be shown by others
        self._is_plain = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "horizon":
            with self:
                return kernel_of(func)(*args, **kwargs)
        out = func(*args, **kwargs)
        if any(_memory(x) in self._data for x in _tensors((args, kwargs))):
            self._write(func, args, kwargs, out)
        return out

    def _write(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        inputs = _tensors((args, kwargs))
        is_known = all(_shown(x) in self._places for x in inputs if _memory(x) in self._data)
        if not is_known or not all(isinstance(x, Tensor) for x in results):
            self._is_plain = False  # a number leaves the tensors
            return
        self._alive += results
        if func._schema.is_mutable:
            written = set(map(_memory, results))
            self._is_plain &= written <= self._data - self._inputs  # a constant that is written to is none
        elif all(_shown(x) in self._places for x in results):
            return  # another object for the same memory
        places = []
        for x in results:
            place = self._places.setdefault(_shown(x), self._count)
            self._count += place == self._count
            places.append(place)
        self._data.update(map(_memory, results))
        gives, reads = set(map(_memory, results)), set(map(_memory, inputs))
        self._calls.append(_Call(func._op, args, kwargs, places, isinstance(out, (tuple, list)), gives, reads))

    def program(self, wanted: Sequence[Tensor]) -> Callable[..., tuple] | None:
        """A function of the given tensors that computes others; None if what was seen is not all."""
        ends = [self._places.get(_shown(x)) for x in wanted]
        if not self._is_plain or None in ends:
            return None
        needed = set(map(_memory, wanted))
        kept = []
        for call in reversed(self._calls):
            if not needed.isdisjoint(call.gives):
                needed |= call.reads
                kept.append(call)
        return _compiled(kept[::-1], self._places, self._given, ends)


@dataclass(frozen=True)
class _Call:
    """An operator of torch, its arguments, the places of its results, and the memory that it gives and reads."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    places: list[int]
    gives_several: bool
    gives: set[int]
    reads: set[int]


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
    calls: Sequence[_Call], places: dict[tuple, int], given: int, ends: Sequence[int | None]
) -> Callable[..., tuple]:
    """The calls as one Python function: a loop over them would cost as much as some of them.

    Args:
        places: of tensors, by the memory they show; the first are given.
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
    parameters, results = (", ".join(f"v{place}" for place in some) for some in (range(given), ends))
    source = "\n".join([f"def run({parameters}):", *lines, f"    return ({results},)"])
    exec(source, constants)
    return constants["run"]
