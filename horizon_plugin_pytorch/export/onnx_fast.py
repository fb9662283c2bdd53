"""Files that take ONNX Runtime's int8 kernels throughout, and how many of their integers are not the model's."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_export import build_onnx, chosen_opset, program_to_write, write_fast
from horizon_plugin_pytorch.export.onnx_session import run_file
from horizon_plugin_pytorch.export.second_opinion import giving_all
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.program import Program
from horizon_plugin_pytorch.program.note import note_of
from horizon_plugin_pytorch.runtime.arguments import data_arguments

METADATA = "horizon_plugin_pytorch.fast"
_WRITTEN = ("is_exact", "differing", "integers", "share", "layers", "checked_with")


@dataclass(frozen=True)
class FastReport:
    """How a fast file compares with its model, on the data that it was exported with.

    Args:
        is_exact: every layer is proved to give the model's integers, on any data.
        differing: integers that differ, of all that the operators between QuantStub and DeQuantStub give.
        integers: how many these are.
        layers: those that may differ, each with why.
        checked_with: the runtime and the processor that gave the count.
        model: the file, an ``onnx.ModelProto``.

    >>> report = FastReport(False, 3, 100, {"layer1": "its sum has 8 bits before the residual is added"}, "...")
    >>> print(report)
    3.00 % of 100 integers differ (...); not exact: layer1
    """

    is_exact: bool
    differing: int
    integers: int
    layers: dict[str, str]
    checked_with: str
    model: Any = field(default=None, repr=False, compare=False)

    @property
    def share(self) -> float:
        """Of the integers, those that differ."""
        return self.differing / max(self.integers, 1)

    def __str__(self) -> str:
        if self.is_exact:
            return f"exact: every layer is proved to give the model's integers ({self.checked_with})"
        layers = ", ".join(self.layers)
        return f"{self.share:.2%}".replace("%", " %") + (
            f" of {self.integers} integers differ ({self.checked_with}); not exact: {layers}"
        )


def build_fast(
    model: nn.Module,
    args: Any,
    input_names: list[str] | None,
    output_names: list[str] | None,
    opset_version: int | None,
    dynamic_axes: Any,
) -> FastReport:
    """The fast file of a converted model, and how it compares with the model on the example inputs.

    Raises:
        ExportError: there is no ONNX Runtime to count with, or the opset has no clamp of bytes.
    """
    try:
        import onnxruntime  # noqa: F401 - asked for before any work is done
    except ImportError as error:
        raise ExportError(
            "`fast=True` counts the integers that differ, which needs the package `onnxruntime`: pip install "
            "'horizon-plugin-pytorch[onnx]'."
        ) from error
    opset = chosen_opset(opset_version)
    if opset < 12:
        raise ExportError(f"`fast=True` needs opset 12 or later, which can clamp bytes; got {opset}.")
    file = build_onnx(model, args, input_names, output_names, opset, False, dynamic_axes, is_fast=True)
    report = _compared(program_to_write(model, args, opset), data_arguments(model, args), opset, file)
    entry = file.metadata_props.add()
    entry.key, entry.value = METADATA, json.dumps({name: getattr(report, name) for name in _WRITTEN}, sort_keys=True)
    return report


def _compared(program: Program, args: Any, opset: int, file: Any) -> FastReport:
    """Run the file and the model, and count the integers of all operators that differ."""
    import onnxruntime

    every, names = giving_all(program)
    watched, layers = write_fast(every, [f"value_{i}" for i in range(len(names))], opset)
    given = [x.detach().cpu().numpy() for x in tensors_of(args)]
    found = dict(zip(names, run_file(watched, given, is_optimized=True), strict=True))
    differing = integers = 0
    for node, value in program.run(*args):
        known = note_of(node).value if node.op == "call_function" else None
        if known is not None and known.quantization is not None and node.name in found:
            differing += int((torch.from_numpy(found[node.name]) != value).sum())
            integers += value.numel()
    checked = f"ONNX Runtime {onnxruntime.__version__}, {platform.machine()}"
    return FastReport(not layers, differing, integers, layers, checked, file)
