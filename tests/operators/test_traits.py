"""What is special about an operator stands in its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import horizon_plugin_pytorch
from horizon_plugin_pytorch.nn import qat  # noqa: F401  # fills the table
from horizon_plugin_pytorch.operators.calls import is_cast
from horizon_plugin_pytorch.operators.table import Counts, Trait, row_named, rows

ROOT = Path(horizon_plugin_pytorch.__file__).parent
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_FORMS = [bn + add + relu for bn in ("", "BN") for add in ("", "Add") for relu in ("", "ReLU", "ReLU6")][1:]
TRAITS = {
    Trait.QUANT: "quant",
    Trait.DEQUANT: "dequant",
    Trait.FUNCTIONAL: "functional",
    Trait.CAST: "to to_numbers",
    Trait.NOTHING: "alpha_dropout dropout identity",
    Trait.UNREAD: "alpha_dropout dequant dropout identity to",
    Trait.CPU: "prelu selu",
    Trait.AVERAGE: "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d",
    Trait.PRODUCT: "addmm einsum matmul",
    Trait.SAMPLER: "grid_sample warp",
    Trait.CHOICE: "masked_fill where",
    Trait.KEEPS_BOOLEANS: "assign masked_fill",
    Trait.LOGARITHM: "log log10 log2",
    Trait.QUOTIENT: "div",
    Trait.FUSED: "add relu relu6",
    Trait.NUMBERS: "add add_scalar assign div eq ge gt le lt masked_fill mul mul_scalar ne pow sub where",
    Trait.MASKS: "add mul",
    Trait.COUNTS_BOOLEANS: "sum",
    Trait.SEVERAL: "split to_numbers",
    Trait.SIZED: " ".join(sorted([*_TRANSPOSED, *(f"ConvTranspose{form}{n}d" for form in _FORMS for n in (1, 2, 3))])),
}


@pytest.mark.parametrize("trait", list(Trait), ids=str)
def test_these_operators_have_the_trait(trait: Trait) -> None:
    assert sorted(row.name for row in rows() if trait in row.traits) == TRAITS[trait].split()


def test_operands_that_may_be_integers() -> None:
    found = {row.name: row.counts for row in rows() if row.counts is not None}
    numbers, whole = Counts(has_booleans=True), Counts()
    assert found == {
        **dict.fromkeys(("add", "sub", "mul"), numbers),
        **dict.fromkeys(("maximum", "minimum", "cat", "stack", "matmul", "assign"), whole),
        "where": Counts(1, 3),
    }


def test_casts_by_name() -> None:
    assert [is_cast(name) for name in ("to", "to_numbers", "add", "no such operator")] == [True, True, False, False]
    assert row_named("quant").is_stub and row_named("dequant").is_stub and not row_named("add").is_stub  # type: ignore[union-attr]


def test_nobody_asks_a_row_by_its_name() -> None:
    pattern = re.compile(r"(row|found\[0\])\.name (==|!=|in|not in) [(\[{\"']")
    found = [
        f"{file}: {line}"
        for file in ROOT.rglob("*.py")
        for line in file.read_text().splitlines()
        if pattern.search(line)
    ]
    assert not [line for line in found if ">>>" not in line and "..." not in line]
