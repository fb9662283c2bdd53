"""Write `operators.md` from the operator table.

Run ``python -m docs.generate_operators`` after a row of the table changed; a test fails while the page is stale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import horizon_plugin_pytorch  # noqa: F401 - fills the operator table
from horizon_plugin_pytorch.nn.operator_table import Operator, rows

PAGE = Path(__file__).parent / "operators.md"

_HEAD = """# Operators

Generated from the operator table by `docs/generate_operators.py`; do not edit by hand. The arithmetic of each
operator is in [Numerics](numerics.md).

*Float forms* are what you write in your model. In fx mode functions and methods are replaced by modules named
`_generated_<operator>_<n>`; in eager mode write the module or `FloatFunctional`. *Scale* says where the scale of the
output comes from: an observer of its own, or the input. Operators without classes only move or select values, and
run as they are. Every operator takes qint8 and qint16 activations.
*Marches* are groups: `bernoulli2` (BERNOULLI, BERNOULLI2), `bayes` (BAYES, BAYES_E), `nash-e` (NASH_B, NASH_E,
NASH_M), `nash-h` (NASH_H, NASH_P).

| operator | float forms | QAT class | quantized class | scale | marches |
|---|---|---|---|---|---|
"""

_TAIL = """
`FloatFunctional` has the methods `add`, `sub`, `mul`, `cat`, `matmul`, `sum`, `mean`, `add_scalar`, `mul_scalar`
and `add_relu`. The classes `Conv...`, `ConvTranspose...` and `Linear...` with `Add` or `ReLU` in their name are
made by fusion.
"""


def _path(cls: type | None) -> str:
    if cls is None:
        return ""
    return f"`{cls.__module__.removeprefix('horizon_plugin_pytorch.')}.{cls.__name__}`"


def _module(cls: type) -> str:
    module = "torch.nn" if cls.__module__.startswith("torch.nn.modules.") else cls.__module__
    return f"`{module.replace('horizon_plugin_pytorch', 'horizon')}.{cls.__name__}`"


def _function(function: Any) -> str:
    name = function.__name__
    for owner, spelling in ((torch, "torch"), (F, "F"), (torch.special, "torch.special")):
        if getattr(owner, name.removeprefix("special_"), None) is function:
            return f"`{spelling}.{name.removeprefix('special_')}`"
    module = function.__module__.removeprefix("_")
    return f"`{module}.{name}`"


def _forms(row: Operator) -> str:
    functions = sorted({_function(f) for f in row.functions})
    methods = [f"`Tensor.{name}`" for name in sorted(row.methods)]
    return ", ".join([_module(c) for c in row.modules] + functions + methods)


def _table(row: Operator) -> str:
    cells = [row.name, _forms(row), _path(row.qat), _path(row.quantized), row.scale_rule.value, ", ".join(row.marches)]
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    """The page's text."""
    return _HEAD + "\n".join(_table(row) for row in rows()) + "\n" + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
