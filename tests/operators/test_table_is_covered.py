"""No operator without a test: every row of the operator table appears in some case, or among the fused classes."""

from __future__ import annotations

import warnings

import pytest

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.intrinsic import FusedModule
from horizon_plugin_pytorch.nn.operator_table import Operator, rows
from horizon_plugin_pytorch.quantization import default_qat_8bit_fake_quant_qconfig, prepare_qat_fx
from tests.operators.cases import CASES, wrap


@pytest.fixture(scope="module")
def met() -> tuple[set[str], set[type]]:
    """Names of generated modules and classes of QAT modules over all cases."""
    names: set[str] = set()
    classes: set[type] = set()
    set_march(March.BAYES)
    for case in CASES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            qat = prepare_qat_fx(wrap(case.make(), len(case.shapes)), {"": default_qat_8bit_fake_quant_qconfig})
        for path, module in qat.named_modules():
            classes.add(type(module))
            name = path.rpartition(".")[2]
            if name.startswith("_generated_"):
                names.add(name.removeprefix("_generated_").rpartition("_")[0])
    return names, classes


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_every_row_of_the_operator_table_has_a_case(row: Operator, met: tuple[set[str], set[type]]) -> None:
    if any(issubclass(cls, FusedModule) for cls in row.modules):
        return  # tests/verbs/test_fusion.py walks every combination
    names, classes = met
    if row.functions or row.methods:
        assert row.name in names, f"no case calls the function `{row.name}`"
    if row.modules:
        assert row.qat in classes, f"no case has the module `{row.name}`"
    assert row.functions or row.methods or row.modules
