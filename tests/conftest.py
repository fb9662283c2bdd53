"""Shared by all tests: one thread, a fixed seed, a march, and the tiers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from horizon_plugin_pytorch.fixed_point import use_integer_kernels
from horizon_plugin_pytorch.march import March, get_march, set_march
from tests import tiers


class _TorchRandom:
    """torch's generator in the form in which hypothesis seeds and restores generators."""

    # `torch.manual_seed` takes a millisecond: it keeps the stack for each kind of device that has not been used yet.
    seed = staticmethod(torch.default_generator.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# An example draws the same tensors whichever ran before it: what fails under a seed fails again under it, and shrinks.
_TORCH_RANDOM = _TorchRandom()  # hypothesis keeps only a weak reference
hypothesis.register_random(_TORCH_RANDOM)  # type: ignore[arg-type]

hypothesis.settings.register_profile("here", deadline=None)  # a busy machine is no failure
hypothesis.settings.register_profile("smoke", deadline=None, max_examples=4)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(tiers.SMOKE, action="store_true", help="one case of each test, each operator once")
    parser.addoption(tiers.SOAK, action="store_true", help="the tests marked `soak`, which other runs leave out")


def pytest_configure() -> None:
    torch.set_num_threads(1)
    gc.disable()  # until all tests are collected: none of what they are made of is garbage


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_smoke = config.getoption(tiers.SMOKE)
    return True if is_smoke and collection_path.is_file() and tiers.is_left_out(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    tiers.in_turns(metafunc)
    if metafunc.config.getoption(tiers.SMOKE):
        tiers.first_cases(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    broad, others = tiers.soak(items)
    chosen, left_out = (broad, others) if config.getoption(tiers.SOAK) else (others, broad)
    if config.getoption(tiers.SMOKE):
        chosen, more = tiers.smoke(chosen)
        left_out += more
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def march() -> Iterator[March]:
    """Every test starts with the same march and seed; march and integer kernels are left as they were."""
    before = get_march()
    set_march(March.BAYES)
    _TORCH_RANDOM.seed(0)
    yield March.BAYES
    set_march(before)
    use_integer_kernels(None)


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
