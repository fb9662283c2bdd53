"""No operator without a test: every row of the operator table appears in some case, or among the fused classes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from horizon_plugin_pytorch.march import set_march
from horizon_plugin_pytorch.nn.intrinsic import FusedModule
from horizon_plugin_pytorch.nn.operator_table import Kind, Operator, ScaleRule, rows
from horizon_plugin_pytorch.nn.quantized.functional_modules import FUNCTIONAL_METHODS
from horizon_plugin_pytorch.qtensor import keeps_scale
from horizon_plugin_pytorch.quantization import default_qat_8bit_fake_quant_qconfig, prepare_qat_fx
from tests.operators.cases import CASES


@pytest.fixture(scope="module")
def met() -> tuple[set[str], set[type]]:
    """What the cases' prepared graphs call: names of generated modules and of functions, and classes of modules."""
    names: set[str] = set()
    classes: set[type] = set()
    for case in CASES:
        set_march(case.march)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            qat = prepare_qat_fx(case.model(), {"": default_qat_8bit_fake_quant_qconfig})
        names |= {getattr(n.target, "__name__", str(n.target)) for n in qat.graph.nodes if n.op.startswith("call_")}
        for path, module in qat.named_modules():
            classes.add(type(module))
            name = path.rpartition(".")[2]
            if name.startswith("_generated_"):
                names.add(name.removeprefix("_generated_").rpartition("_")[0])
    return names, classes


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_every_row_of_the_operator_table_has_a_case(row: Operator, met: tuple[set[str], set[type]]) -> None:
    if any(issubclass(cls, FusedModule) for cls in row.modules):
        return  # tests/passes/test_fusion.py walks every combination
    if row.is_real:
        return  # test_detection.py and test_colour.py have them all
    names, classes = met
    if row.qat is None:
        spelled = {function.__name__ for function in row.functions} | set(row.methods)
        assert spelled & names or classes & set(row.modules), f"no case has `{row.name}`"
        return
    if row.functions or row.methods:
        assert row.name in names, f"no case calls the function `{row.name}`"
    if row.modules:
        assert row.qat in classes, f"no case has the module `{row.name}`"
    assert row.functions or row.methods or row.modules or row.name in FUNCTIONAL_METHODS


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
