"""The tiers of tests.

`make smoke`: of everything one case, of the operators each one. `make test`: everything but what is marked `soak`, the
breadth of which it has a sample. `make soak`: that breadth, among others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SMOKE = "--smoke"
SOAK = "--soak"


def in_soak(*cases: Any) -> list[Any]:
    """Cases of `pytest.mark.parametrize` that only `make soak` runs; a tuple has the values of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]


def in_turns(metafunc: pytest.Metafunc) -> None:
    """Mark as `soak` what a test that is marked `in_turns("a", "b", "c")` leaves out of the product of its parameters.

    Each combination of the others meets one value of the first parameter, the next combination the next value, so that
    every value of each is met. With ``of=2`` it meets every second value.
    """
    marker = metafunc.definition.get_closest_marker("in_turns")
    if marker is None:
        return
    names = marker.args
    places: dict[str, dict[int, int]] = {name: {} for name in names}
    for call in metafunc._calls:
        for name, place in places.items():
            place.setdefault(call.indices[name], len(place))
    count = marker.kwargs.get("of", len(places[names[0]]))
    calls = [call for call in metafunc._calls if all(mark.name != "soak" for mark in call.marks)]
    chosen = [call for call in calls if sum(places[name][call.indices[name]] for name in names) % count == 0]
    for name in names:
        met, wanted = ({call.indices[name] for call in of} for of in (chosen, calls))
        assert met == wanted, f"{metafunc.definition.nodeid}: `in_turns` leaves values of `{name}` out"
    kept = set(map(id, chosen))
    for call in calls:
        if id(call) not in kept:
            call.marks.append(pytest.mark.soak.mark)


def soak(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the tests into those that only `make soak` runs and the others."""
    broad = [item for item in items if item.get_closest_marker("soak") is not None]
    return broad, [item for item in items if item.get_closest_marker("soak") is None]


_LEFT_OUT = ("slow", "processes", "soak")  # marks of what the smoke tier does not have
_MARKED_FILE = re.compile(rf"^pytestmark = .*pytest\.mark\.({'|'.join(_LEFT_OUT)})\b", re.MULTILINE)


def is_left_out(file: Path) -> bool:
    """True for a file that has nothing for the smoke tier, which does not import it.

    It is no test file (only the examples of its docstrings would be collected), or its `pytestmark` says so.
    """
    is_test = file.name.startswith("test_")
    return file.suffix == ".py" and (not is_test or _MARKED_FILE.search(file.read_text()) is not None)


def first_cases(metafunc: pytest.Metafunc) -> None:
    """Keep only the cases of a test that the smoke tier may have: items are made of these alone.

    A test function keeps its first case. One that is marked `smoke_each("name")` keeps the first case for each value
    of that parameter, or of that attribute of a parameter: each operator once, in int8 or in int16.
    """
    marker = metafunc.definition.get_closest_marker("smoke_each")
    names = () if marker is None else marker.args
    kept: dict[tuple[str, ...], Any] = {}
    for call in metafunc._calls:
        if not any(mark.name in _LEFT_OUT for mark in call.marks):
            kept.setdefault(_values(call.params, names), call)
    metafunc._calls[:] = kept.values() or metafunc._calls[:1]  # none would be a test without parameters


def _values(params: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """The values of the parameters for each of which the smoke tier keeps a case."""
    parts = [name.partition(".") for name in names]
    return tuple(repr(getattr(params[name], of) if of else params[name]) for name, _, of in parts)


def smoke(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the tests into those of the smoke tier and the others: slow ones (a quarter of a second or more), and those
    that start processes."""
    parts: tuple[list[pytest.Item], list[pytest.Item]] = [], []
    for item in items:
        parts[any(item.get_closest_marker(name) is not None for name in _LEFT_OUT)].append(item)
    return parts
