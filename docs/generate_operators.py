"""Write `operators.md` from the operator table.

Run ``python -m docs.generate_operators`` after a row of the table changed; a test fails while the page is stale.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import horizon_plugin_pytorch  # fills the operator table
from horizon_plugin_pytorch.nn.operator_table import Operator, rows
from horizon_plugin_pytorch.nn.quantized.functional_modules import FUNCTIONAL_METHODS
from horizon_plugin_pytorch.operators.support import GROUPS, Support

PAGE = Path(__file__).parent / "operators.md"

_HEAD = """# Operators

Generated from the operator table by `docs/generate_operators.py`; do not edit by hand. The arithmetic of each
operator is in [Numerics](numerics.md).

*Float forms* are what you write in your model. In fx mode functions and methods are replaced by modules named
`_generated_<operator>_<n>`; in eager mode write the module or `FloatFunctional`. *Scale* says where the scale of the
output comes from: an observer of its own, or the input. Operators without classes only move or select values, and
run as they are.

The second table has published formats and limits: `i8`, `i16`, `i32`, `f16`, `f32` are number formats, input → output.
`prepare` refuses an operator that a chip does not have (`-`). `check_model` compares a converted model with formats and
limits; our arithmetic itself has no such limits, and runs int16 everywhere. Columns are groups of chips:
`bernoulli2` (BERNOULLI, BERNOULLI2), `bayes` (BAYES, BAYES_E), `nash-e` (NASH_B, NASH_E, NASH_M), `nash-h` (NASH_H,
NASH_P).

## Forms

| operator | float forms | QAT class | quantized class | scale |
|---|---|---|---|---|
"""

_METHODS = (
    """`FloatFunctional` has the methods {}. Classes with `Add`, `ReLU` or `BN` in their name are made by fusion."""
)
_LIMITS = """
{methods}

## Formats and limits

| operator | {groups} |
|---|{rule}|
"""

_SHORT = {"qint8": "i8", "qint16": "i16", "qint32": "i32", "float16": "f16", "float32": "f32", "qbool": "bool"}


def _path(cls: type | None) -> str:
    if cls is None:
        return ""
    return f"`{cls.__module__.removeprefix('horizon_plugin_pytorch.')}.{cls.__name__}`"


def _module(cls: type) -> str:
    if getattr(horizon_plugin_pytorch.nn, cls.__name__, None) is cls:
        return f"`horizon.nn.{cls.__name__}`"
    module = "torch.nn" if cls.__module__.startswith("torch.nn.modules.") else cls.__module__
    return f"`{module.replace('horizon_plugin_pytorch', 'horizon')}.{cls.__name__}`"


def _function(function: Any) -> str:
    name = function.__name__
    if name == "__get__":
        return f"`Tensor.{function.__self__.__name__}`"
    for owner, spelling in ((torch, "torch"), (F, "F"), (torch.special, "torch.special")):
        if getattr(owner, name.removeprefix("special_"), None) is function:
            return f"`{spelling}.{name.removeprefix('special_')}`"
    module = function.__module__.removeprefix("_")
    return f"`{module}.{name}`"


def _forms(row: Operator) -> str:
    functions = sorted({_function(f) for f in row.functions if f is not getattr})
    methods = [f"`Tensor.{name}`" for name in sorted(row.methods)]
    return ", ".join([_module(c) for c in row.modules] + functions + methods) or f"`FloatFunctional.{row.name}`"


def _formats(names: tuple[str, ...]) -> str:
    return ",".join(_SHORT.get(name, name) for name in names)


def _support(support: Support | None) -> str:
    if support is None:
        return "-"
    weights = f", weight {_formats(support.weights)}" if support.weights else ""
    arrow = f"{_formats(support.inputs)}{weights} → {_formats(support.outputs)}"
    return "; ".join([arrow, *(limit.text for limit in support.limits), *([support.note] if support.note else [])])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """The page's text."""
    ordered = sorted(rows(), key=lambda row: row.name.lower())
    forms = [_line([r.name, _forms(r), _path(r.qat), _path(r.quantized), r.scale_rule.value]) for r in ordered]
    limits = [_line([r.name, *(_support(r.marches.get(group)) for group in GROUPS)]) for r in ordered]
    methods = textwrap.fill(_METHODS.format(", ".join(f"`{name}`" for name in FUNCTIONAL_METHODS)), 120)
    middle = _LIMITS.format(methods=methods, groups=" | ".join(GROUPS), rule="|".join(["---"] * len(GROUPS)))
    return _HEAD + "\n".join(forms) + "\n" + middle + "\n".join(limits) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
