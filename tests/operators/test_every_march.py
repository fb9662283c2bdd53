"""Every operator on every group of chips, in every format: it runs to the same integers, or says who has it.

`test_one_arithmetic` compares the routes (float, QAT, converted, ONNX Runtime) on one chip. The arithmetic does not
depend on the chip, and here that is checked: each chip's converted model gives the integers of the case's own chip.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.analysis.limits import find_limits
from horizon_plugin_pytorch.capture.region import quantized_nodes, row_of_node
from horizon_plugin_pytorch.capture.tracing import trace
from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.operator_table import Operator, rows
from horizon_plugin_pytorch.operators.support import GROUPS, Limit, TensorFact, Use, group_of
from horizon_plugin_pytorch.quantization import convert_fx
from tests.operators.cases import CASES, Case
from tests.routes import as_numbers, mismatches, prepared

BY_NAME = {case.name: case for case in CASES}
CHIPS = {group: members[-1] for group, members in GROUPS.items()}
RUNS = [(case.name, group) for case in CASES for group in CHIPS if group != group_of(case.march)]


def _rows(model: nn.Module) -> list[Operator]:
    """The rows of the operators in a model's quantized part."""
    graph_module = torch.fx.GraphModule(model, trace(model))
    region = quantized_nodes(graph_module)
    found = [row_of_node(graph_module, node) for node in graph_module.graph.nodes if node in region]
    return [row for row in found if row is not None]


def _quantized(case: Case, chip: March, dtype: str) -> nn.Module:
    set_march(chip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # int16 on BERNOULLI2, accumulators
        return convert_fx(prepared(case.model(), case.inputs(), dtype))


@pytest.mark.parametrize(("name", "group"), RUNS)
def test_the_same_integers_on_every_chip_that_has_it(name: str, group: str, record_property: Any) -> None:
    case, chip = BY_NAME[name], CHIPS[group]
    found = _rows(case.model())
    missing = [row for row in found if row.support(chip) is None]
    record_property("rows", [row.name for row in found])
    if missing:
        with pytest.raises(UnsupportedOperatorError) as error:
            _quantized(case, chip, case.formats[0])
        text = str(error.value)
        assert f"on {chip}" in text
        assert any(all(march in text for march in row.march_names) for row in missing)
        return
    different = 0
    for dtype in case.formats:
        inputs = case.inputs()
        here, there = (_quantized(case, c, dtype) for c in (chip, case.march))
        with torch.no_grad():
            different += mismatches(as_numbers(here(*inputs)), as_numbers(there(*inputs)))
        _check_formats(here, case, found, chip, dtype)
    record_property("mismatches", different)
    assert different == 0


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
