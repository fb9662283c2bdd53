"""What a QuantStub takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError, OperatorInputError

_SEVERAL = "A QuantStub quantizes one tensor: give each tensor that is to be quantized a QuantStub of its own"


MAPPED = (
    "A model that computes with scales has no form for each sample by itself; it takes any number of them at once: "
    "`model(x.flatten(0, 1))` for an axis before the batch, whose results `unflatten(0, ...)` takes apart again"
)


def is_mapped(x: Any) -> bool:
    """Is it what `torch.vmap` makes of a tensor?"""
    return isinstance(x, Tensor) and torch._C._functorch.is_batchedtensor(x)


def require_tensor(x: Any, place: str) -> None:
    """Insist that a QuantStub is given one dense tensor of real numbers; integers and booleans count as numbers.

    Args:
        place: ``at `path` (file:line)`` of the stub.

    Raises:
        OperatorInputError: names the stub and what it got.

    >>> try:
    ...     require_tensor([torch.ones(1)], "at `quant`")
    ... except OperatorInputError as error:
    ...     print(str(error)[:66])
    `QuantStub` at `quant` got a list instead of a tensor of real numb
    """
    if isinstance(x, Tensor) and x.layout is torch.strided and not (x.is_complex() or x.is_nested or is_mapped(x)):
        return
    got, remedy = _explained(x)
    raise OperatorInputError(f"`QuantStub` {place} got {got} instead of a tensor of real numbers. {remedy}.")


def _explained(x: Any) -> tuple[str, str]:
    """What it is, and what to do."""
    name = type(x).__name__
    if is_mapped(x):
        return "a tensor of `torch.vmap`", MAPPED
    if isinstance(x, Tensor):
        kind = "nested" if x.is_nested else "complex" if x.is_complex() else "sparse"
        remedy = {
            "nested": "Give it a padded tensor, `x.to_padded_tensor(0.0)`",
            "complex": "Give it real numbers, as in `torch.view_as_real(x)`",
            "sparse": "Give it a dense tensor, `x.to_dense()`",
        }[kind]
        return f"a {kind} tensor", remedy
    if hasattr(x, "__array__"):
        return f"a {name} of numpy", "Make a tensor of it before the model is called, as in `torch.from_numpy(array)`"
    if isinstance(x, (Mapping, list, tuple, set)) or hasattr(x, "__dict__"):
        return f"a {name}", _SEVERAL
    if x is None:
        return "None", "Where an input may be missing, call the stub only if it is there: `if x is not None`"
    return f"a {name}", "A number that is no input needs no stub; an input is given as a tensor, `torch.tensor(...)`"


def refuse_export(place: str) -> None:
    """Say what `torch.export` can take, which cannot make quantized tensors.

    Raises:
        ExportError: while it looks at a model.
    """
    if torch.compiler.is_exporting():
        raise ExportError(
            f"QuantStub {place}: torch cannot export the code of a model whose tensors have scales, only what a "
            "converted model computes. Convert a prepared model first; call `torch.export.export` by this name, after "
            "`import horizon_plugin_pytorch`, and not a reference that was taken before it; or give torch "
            "`record_program(model, x).graph_module`."
        )
