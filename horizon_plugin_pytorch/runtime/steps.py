"""Steps that a module takes one after the other: who writes them down may take a few, and know the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

StepFunction = Callable[[Any, tuple], tuple]
Walker = Callable[[StepFunction, Sequence[Any], tuple], list[tuple]]


class _Thread(threading.local):
    walker: Walker | None = None


_THREAD = _Thread()


def take_steps(step: StepFunction, inputs: Sequence[Any], state: tuple) -> list[tuple]:
    """The state after each of some steps that do the same.

    Args:
        step: gives the next state of an input and the state before.
        inputs: one for each step.
        state: the first one.

    >>> take_steps(lambda x, state: (state[0] + x,), [1, 2, 3], (10,))
    [(11,), (13,), (16,)]
    """
    walker = _THREAD.walker
    return _one_by_one(step, inputs, state) if walker is None else walker(step, inputs, state)


def _one_by_one(step: StepFunction, inputs: Sequence[Any], state: tuple) -> list[tuple]:
    states = []
    for x in inputs:
        state = step(x, state)
        states.append(state)
    return states


def is_walked() -> bool:
    """Does somebody else take the steps here?"""
    return _THREAD.walker is not None


@contextmanager
def walking(walker: Walker) -> Iterator[None]:
    """Let somebody else take the steps of what runs in here."""
    before, _THREAD.walker = _THREAD.walker, walker
    try:
        yield
    finally:
        _THREAD.walker = before
