"""The smallest tier of tests, `make smoke`: of everything one case, of the operators each one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

SMOKE = "--smoke"


def smoke(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the tests into those of the smoke tier and the others.

    A test function keeps its first case. One that is marked `smoke_each("name")` keeps the first case for each value
    of that parameter: cases list int8 before int16, so this is each operator once, in int8. Slow tests and those that
    start processes are left out.
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
    return tuple(repr(params[name]) for name in marker.args) if marker is not None else ()
