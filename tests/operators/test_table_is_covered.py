"""No operator without a test: every row of the operator table appears in some case, or among the fused classes."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F

from horizon_plugin_pytorch.nn.intrinsic import FusedModule
from horizon_plugin_pytorch.nn.operator_table import Kind, Operator, ScaleRule, rows
from horizon_plugin_pytorch.nn.quantized.functional_modules import FUNCTIONAL_METHODS
from horizon_plugin_pytorch.qtensor import keeps_scale
from tests.operators.cases import CASES
from tests.operators.cases.calls import calls_of, rows_of
from tests.operators.test_one_arithmetic import BY_NAME, RUNS, SAMPLE, Run


@functools.cache
def _calls() -> dict[str, set[str]]:
    """How the cases call each row."""
    found: dict[str, set[str]] = {}
    for case in CASES:
        for call in calls_of(case):
            found.setdefault(call.row.name, set()).add(call.how)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("row", list(rows()), ids=lambda row: row.name)
def test_every_row_of_the_operator_table_has_a_case(row: Operator) -> None:
    if any(issubclass(cls, FusedModule) for cls in row.modules):
        return  # tests/passes/test_fusion.py walks every combination
    if row.is_real:
        return  # test_detection.py and test_colour.py have them all
    if row.is_functional:
        return  # its methods have rows of their own
    called = _calls().get(row.name, set())
    if row.qat is None:
        assert called, f"no case has `{row.name}`"
        return
    if row.functions or row.methods:
        assert called & {"call_function", "call_method"}, f"no case calls the function `{row.name}`"
    if any(cls.__module__.startswith("torch") for cls in row.modules):  # others stand for calls of functions
        assert "call_module" in called, f"no case has the module `{row.name}`"
    assert row.functions or row.methods or row.modules or row.name in FUNCTIONAL_METHODS


@pytest.mark.slow
def test_the_sample_of_runs_has_every_row_in_every_format() -> None:
    def met(runs: Iterable[Run]) -> set[tuple[str, str]]:
        return {(row.name, run.dtype) for run in runs for row in rows_of(BY_NAME[run.name])}

    assert met(RUNS) - met(SAMPLE) == set()


def test_every_operator_that_keeps_the_scale_has_a_row_and_a_handler() -> None:
    kept = [row for row in rows() if row.scale_rule is ScaleRule.INHERIT and row.qat is None and row.takes is None]
    kept = [row for row in kept if row.results == (Kind.QUANTIZED,)]
    functions = {function for row in kept for function in row.functions}
    methods = {getattr(torch.Tensor, name) for row in kept for name in row.methods}
    assert all(keeps_scale(target) for target in functions | methods)
    in_table = {function for row in rows() for function in row.functions} | {
        getattr(torch.Tensor, name) for row in rows() for name in row.methods
    }
    handled = {f for owner in (torch, torch.Tensor, F) for f in vars(owner).values() if callable(f) and _is_kept(f)}
    assert not {f.__name__ for f in handled - in_table} - {"relu_", "_max_pool2d"}


def _is_kept(function: object) -> bool:
    try:
        return keeps_scale(function)
    except TypeError:  # not hashable
        return False
