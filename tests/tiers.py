"""The tiers of tests.

`make smoke`: of everything one case, of the operators each one. `make test`: everything but what is marked `soak`, the
breadth of which it has a sample. `make soak`: that breadth, among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

SMOKE = "--smoke"
SOAK = "--soak"


def in_soak(*cases: Any) -> list[Any]:
    """Cases of `pytest.mark.parametrize` that only `make soak` runs; a tuple has the values of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]


def soak(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the tests into those that only `make soak` runs and the others."""
    broad = [item for item in items if item.get_closest_marker("soak") is not None]
    return broad, [item for item in items if item.get_closest_marker("soak") is None]


def smoke(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the tests into those of the smoke tier and the others.

    A test function keeps its first case. One that is marked `smoke_each("name")` keeps the first case for each value
    of that parameter, or of that attribute of a parameter: cases list int8 before int16, so this is each operator once,
    in int8. Slow tests (a quarter of a second or more) and those that start processes are left out.
    """
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for item in items:
        case = (item.nodeid.partition("[")[0], _values(item))
        if case in seen or any(item.get_closest_marker(name) is not None for name in ("slow", "processes")):
            left_out.append(item)
        else:
            seen.add(case)
            kept.append(item)
    return kept, left_out


def _values(item: pytest.Item) -> tuple[str, ...]:
    """The values of the parameters for each of which the smoke tier keeps a case."""
    marker = item.get_closest_marker("smoke_each")
    params = getattr(getattr(item, "callspec", None), "params", {})
    if marker is None:
        return ()
    parts = [name.partition(".") for name in marker.args]
    return tuple(repr(getattr(params[name], of) if of else params[name]) for name, _, of in parts)
