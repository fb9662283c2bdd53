"""Which operators of a TorchScript module no chip has. Scales and number formats are not known of a script."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from horizon_plugin_pytorch.analysis.findings import UNBIND_ADVICE, Finding
from horizon_plugin_pytorch.errors import at
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.operators.table import row_of_function, row_of_method
from horizon_plugin_pytorch.program.script import ScriptSteps
from horizon_plugin_pytorch.torch_functions import PASSING_OPERATORS


def script_findings(script: torch.jit.ScriptModule, args: tuple) -> tuple[list[Finding], int]:
    """The operators between quantize and dequantize that no chip has; and how many operators of integers there are.

    Operators inside of this package's modules are what these are made of, and not looked at.
    """
    integers: dict[int, Tensor] = {}  # by identity; they stay alive
    findings: list[Finding] = []
    count = 0

    def see(kind: str, owner: str, path: str, line: str, inputs: list[Any], outputs: list[Any]) -> None:
        nonlocal count
        is_inside = any(id(x) in integers for x in tensors_of(inputs))
        if kind != "horizon::quantize" and (not is_inside or kind == "horizon::dequantize"):
            return
        count += kind.startswith("horizon::")
        for x in tensors_of(outputs):
            integers[id(x)] = x
        if not owner.startswith("horizon_plugin_pytorch.") and not _is_known(kind):
            advice = UNBIND_ADVICE if kind == "aten::unbind" else "move it after the DeQuantStub, or write it otherwise"
            findings.append(
                Finding(at(path, line).removeprefix("at "), kind, "supported nodes", "unsupported node", advice)
            )

    with torch.no_grad():
        ScriptSteps(script, watch=see)(*args)
    return list(dict.fromkeys(findings)), count


def _is_known(kind: str) -> bool:
    space, name = kind.split("::")
    name = name.rstrip("_")
    if space == "horizon" or name in PASSING_OPERATORS:
        return True
    if name == "unbind":
        return False
    functions = [getattr(home, name) for home in (torch, F, torch.special) if hasattr(home, name)]
    return row_of_method(name) is not None or any(row_of_function(function) is not None for function in functions)
