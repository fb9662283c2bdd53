"""Shared by all tests: one thread, a fixed seed, and a march."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from horizon_plugin_pytorch.march import March, get_march, set_march


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds; CI runs it, `-m 'not slow'` leaves it out")
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("here", deadline=None)  # a busy machine is no failure
    hypothesis.settings.load_profile("here")


@pytest.fixture(autouse=True)
def march() -> Iterator[March]:
    """Every test starts with the same march and seed, and leaves the march as it was."""
    before = get_march()
    set_march(March.BAYES)
    torch.manual_seed(0)
    yield March.BAYES
    set_march(before)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the walk over the operator table saw."""
    reports = [
        r for r in terminalreporter.getreports("passed") + terminalreporter.getreports("failed") if r.when == "call"
    ]
    facts = [dict(report.user_properties) for report in reports]
    walked = [f for f in facts if "mismatches" in f]
    if walked:
        met = {row for f in facts for row in f.get("rows", ())}
        different = sum(f["mismatches"] for f in walked)
        terminalreporter.write_line(f"operators: {len(met)} rows, {len(walked)} cases, {different} mismatches")
