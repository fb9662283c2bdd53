"""Every operator on every group of chips, in every format: it runs to the same integers, or says who has it.

`test_one_arithmetic` compares the routes (float, QAT, converted, ONNX Runtime) on one chip. The arithmetic does not
depend on the chip, and here that is checked: each chip's converted model gives the integers of the case's own chip.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.limits import find_limits
from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.operator_table import Operator, rows
from horizon_plugin_pytorch.operators.support import GROUPS, Limit, TensorFact, Use, group_of
from horizon_plugin_pytorch.quantization import convert_fx
from tests.operators.cases import CASES, Case
from tests.operators.cases.calls import rows_of
from tests.routes import as_numbers, mismatches, prepared

BY_NAME = {case.name: case for case in CASES}
CHIPS = {group: members[-1] for group, members in GROUPS.items()}


@functools.cache
def _first_cases() -> dict[str, Case]:
    """Of each row of the operator table that cases call the first of them."""
    return {row.name: case for case in reversed(CASES) for row in rows_of(case)}


@pytest.mark.slow
@pytest.mark.parametrize("row", [row.name for row in rows()])
def test_a_row_gives_the_same_integers_on_another_chip_that_has_it(row: str, record_property: Any) -> None:
    case = _first_cases().get(row)
    if case is not None:  # test_table_is_covered says which must have one
        _compare(case, record_property, is_sample=True)


@pytest.mark.soak
@pytest.mark.parametrize("name", BY_NAME)
def test_a_case_gives_the_same_integers_on_every_chip_that_has_it(name: str, record_property: Any) -> None:
    _compare(BY_NAME[name], record_property)


def _compare(case: Case, record_property: Any, is_sample: bool = False) -> None:
    """Run a case on every chip.

    Args:
        is_sample: on one of the other chips that have it, in one format: the next case on the next one, and so on.
    """
    found = rows_of(case)
    record_property("rows", [row.name for row in found])
    has = {group: all(row.support(chip) is not None for row in found) for group, chip in CHIPS.items()}
    for group, chip in CHIPS.items():
        if not has[group]:
            _check_refusal(case, chip, [row for row in found if row.support(chip) is None])
    others = [
        (CHIPS[group], dtype)
        for group in CHIPS
        if has[group] and group != group_of(case.march)
        for dtype in case.formats
    ]
    if is_sample and others:
        others = [others[CASES.index(case) % len(others)]]
    at_home: dict[str, list[Tensor]] = {}
    different = 0
    for chip, dtype in others:
        if dtype not in at_home:
            at_home[dtype] = _run(_quantized(case, case.march, dtype), case)
        quantized = _quantized(case, chip, dtype)
        different += mismatches(_run(quantized, case), at_home[dtype])
        _check_formats(quantized, case, found, chip, dtype)
    record_property("mismatches", different)
    assert different == 0


def _quantized(case: Case, chip: March, dtype: str) -> nn.Module:
    set_march(chip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # int16 on BERNOULLI2, accumulators
        return convert_fx(prepared(case.model(), case.inputs(), dtype))


def _run(quantized: nn.Module, case: Case) -> list[Tensor]:
    with torch.no_grad():
        return as_numbers(quantized(*case.inputs()))


def _check_refusal(case: Case, chip: March, missing: list[Operator]) -> None:
    """The error names the chip, and the chips of an operator that it lacks."""
    with pytest.raises(UnsupportedOperatorError) as error:
        _quantized(case, chip, case.formats[0])
    text = str(error.value)
    assert f"on {chip}" in text
    assert any(all(march in text for march in row.march_names) for row in missing)


def _check_formats(quantized: nn.Module, case: Case, found: list[Operator], chip: March, dtype: str) -> None:
    """check_model names a format that the tables do not give to an operator of this chip."""
    reported = {f.operator for f in find_limits(quantized, case.inputs(), chip) if f.limit.startswith("input ")}
    outside = {row.name for row in found if dtype not in row.support(chip).inputs} - {"quant"}  # type: ignore[union-attr]
    assert reported <= outside
    if len({row.name for row in found} - {"quant"}) == 1 and not any(row.is_source for row in found):
        assert reported == outside


def _bounds() -> list[tuple[str, str, Limit]]:
    return [
        (row.name, group, limit)
        for row in rows()
        for group, support in row.marches.items()
        for limit in support.limits
        if limit.bounds is not None
    ]


@pytest.mark.parametrize(("name", "group", "limit"), _bounds(), ids=lambda v: v.text if isinstance(v, Limit) else v)
def test_limits_hold_up_to_their_ends_and_not_beyond(name: str, group: str, limit: Limit) -> None:
    assert limit.bounds is not None
    number, low, high = limit.bounds

    def use(value: float) -> Use:
        return Use(name, "", (TensorFact((1, 1, 1, 1), "qint8"),), attributes={number: value})

    assert limit.holds(use(high)) and not limit.holds(use(high + 1))
    if not math.isinf(low):
        assert limit.holds(use(low)) and not limit.holds(use(low - 1))
    assert number in limit.found(use(high))
