"""ONNX files of models at every stage."""

from __future__ import annotations

import io
import os
from typing import Any

from torch import nn

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import QuantizationWarning, require_module, warn
from horizon_plugin_pytorch.export.onnx_export import build_onnx
from horizon_plugin_pytorch.export.onnx_fast import build_fast
from horizon_plugin_pytorch.files import write_atomically

__all__ = ["export_quantized_onnx", "export_to_onnx"]


class _Named:
    """A default that is written as torch writes it; torch's own enumerations are leaving torch."""

    def __init__(self, owner: str, name: str) -> None:
        self.owner, self.name = owner, name

    def __repr__(self) -> str:
        return f"{self.owner}.{self.name}"


_EVAL = _Named("TrainingMode", "EVAL")
_FALLTHROUGH = _Named("OperatorExportTypes", "ONNX_FALLTHROUGH")


def export_to_onnx(
    model: nn.Module,
    args: Any,
    f: Any,
    export_params: bool = True,
    verbose: bool = False,
    training: Any = _EVAL,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    operator_export_type: Any = _FALLTHROUGH,
    opset_version: int | None = 11,
    do_constant_folding: bool = True,
    dynamic_axes: Any = None,
    keep_initializers_as_inputs: bool | None = None,
    custom_opsets: Any = None,
    example_outputs: Any = None,
    strip_doc_string: bool = True,
    enable_onnx_checker: bool = False,
) -> Any:
    """Write a float or QAT model as ONNX, in standard operators only: ONNX Runtime gives what the model gives.

    A QAT model is written as it trains: in float, with `QuantizeLinear` and `DequantizeLinear` where it rounds, also in
    the VALIDATION state, in which the model itself computes on integers (`export_quantized_onnx` writes those). In the
    CALIBRATION state nothing is rounded, in the file neither.

    Args:
        model: a float model, or the result of a prepare.
        args: example inputs; the file is for their shapes, but for `dynamic_axes`.
        f: a path, or a binary file object.
        input_names, output_names: names in the file.
        opset_version: 11 to 21. `QuantizeLinear` has scales of channels from 13 on, and int16 from 21 on; below, the
            same is written with elementary operators.
        dynamic_axes: sizes of the inputs that may change, such as ``{"image": {0: "batch"}}``.
        others: accepted for compatibility; a warning says where one asks for something that does not happen.

    Returns:
        The ``onnx.ModelProto``.

    >>> import io
    >>> import torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> data = torch.randn(1, 3, 4, 4)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 2, 1)), {"": get_default_qconfig()})
    >>> _ = qat(data)
    >>> proto = export_to_onnx(qat, data, io.BytesIO(), opset_version=13)
    >>> [node.op_type for node in proto.graph.node][:5]
    ['QuantizeLinear', 'DequantizeLinear', 'DequantizeLinear', 'Conv', 'QuantizeLinear']
    """
    require_module(model, "export_to_onnx")
    _require_file(f, "export_to_onnx")
    _tell_ignored("export_to_onnx", export_params, training, keep_initializers_as_inputs, custom_opsets)
    found = build_onnx(model, args, input_names, output_names, opset_version, True, dynamic_axes)
    return _saved(found, f, verbose)


def export_quantized_onnx(
    model: nn.Module,
    args: Any,
    f: Any,
    export_params: bool = True,
    verbose: bool = False,
    training: Any = _EVAL,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    operator_export_type: Any = _FALLTHROUGH,
    opset_version: int | None = None,
    do_constant_folding: bool = True,
    dynamic_axes: Any = None,
    keep_initializers_as_inputs: bool | None = None,
    custom_opsets: Any = None,
    example_outputs: Any = None,
    strip_doc_string: bool = True,
    enable_onnx_checker: bool = True,
    fast: bool = False,
) -> Any:
    """Write a converted model as ONNX, in standard operators only: stock ONNX Runtime gives the same integers.

    Args:
        model: the result of `convert_fx` or `convert`.
        args: example inputs; the file is for their shapes, but for `dynamic_axes`.
        f: a path, or a binary file object.
        input_names, output_names: names in the file.
        opset_version: 11 to 21; None takes 17.
        dynamic_axes: sizes of the inputs that may change, such as ``{"image": {0: "batch"}}``.
        others: accepted for compatibility; a warning says where one asks for something that does not happen.
        fast: take ONNX Runtime's int8 kernels also where they round other than the model does. The integers that differ
            are counted on `args`, and the file's metadata say how many (``horizon_plugin_pytorch.fast``).

    Returns:
        The ``onnx.ModelProto``; with `fast` a `FastReport`, whose `model` it is.

    >>> import io
    >>> import torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, convert_fx, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> data = torch.randn(1, 3, 4, 4)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 2, 1)), {"": get_default_qconfig()})
    >>> _ = qat(data)
    >>> proto = export_quantized_onnx(convert_fx(qat), data, io.BytesIO(), input_names=["image"])
    >>> proto.graph.input[0].name
    'image'
    >>> report = export_quantized_onnx(convert_fx(qat), data, io.BytesIO(), fast=True)
    >>> report.is_exact, report.differing
    (True, 0)
    """
    require_module(model, "export_quantized_onnx")
    _require_file(f, "export_quantized_onnx")
    _tell_ignored("export_quantized_onnx", export_params, training, keep_initializers_as_inputs, custom_opsets)
    if fast:
        report = build_fast(model, args, input_names, output_names, opset_version, dynamic_axes)
        _saved(report.model, f, verbose)
        return report
    found = build_onnx(model, args, input_names, output_names, opset_version, False, dynamic_axes)
    return _saved(found, f, verbose)


def _tell_ignored(name: str, export_params: bool, training: Any, initializers_as_inputs: Any, opsets: Any) -> None:
    """Say which arguments ask for what does not happen."""
    ignored = []
    if not export_params:
        ignored.append("export_params=False is ignored, weights are always written")
    if training is not None and getattr(training, "name", "EVAL") != "EVAL":
        ignored.append(f"training={training} is ignored, the file is of the model in eval mode")
    if initializers_as_inputs:
        ignored.append("keep_initializers_as_inputs=True is ignored, weights are constants of the file")
    if opsets:
        ignored.append("custom_opsets is ignored, the file has standard operators only")
    for what in ignored:
        warn(f"{name}: {what}.", QuantizationWarning)


def _require_file(f: Any, who: str) -> None:
    """Insist on what a file can be written to, before any work is done."""
    if isinstance(f, (str, os.PathLike)):
        return
    if not hasattr(f, "write") or isinstance(f, io.TextIOBase):
        given = "a file that is open for text: open it with mode 'wb'" if hasattr(f, "write") else repr(f)
        raise TypeError(f"{who} takes a path or a binary file object as `f`, got {given}.")


def _saved(onnx_model: Any, f: Any, verbose: bool) -> Any:
    data = onnx_model.SerializeToString()
    if isinstance(f, (str, os.PathLike)):
        write_atomically(data, os.fspath(f))
    else:
        f.write(data)
    if verbose:
        print(onnx_model)
    return onnx_model


show_at("utils.onnx_helper", export_quantized_onnx, export_to_onnx)
