"""ONNX export."""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch import nn

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_export import build_onnx
from horizon_plugin_pytorch.files import write_atomically

__all__ = ["export_quantized_onnx", "export_to_onnx"]


def export_quantized_onnx(
    model: nn.Module,
    args: Any,
    f: Any,
    export_params: bool = True,
    verbose: bool = False,
    training: Any = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    operator_export_type: Any = None,
    opset_version: int | None = None,
    do_constant_folding: bool = True,
    dynamic_axes: Any = None,
    keep_initializers_as_inputs: bool | None = None,
    custom_opsets: Any = None,
    example_outputs: Any = None,
    strip_doc_string: bool = True,
    enable_onnx_checker: bool = True,
) -> Any:
    """Write a converted model as ONNX, in standard operators only: stock ONNX Runtime gives the same integers.

    Args:
        model: the result of `convert_fx` or `convert`.
        args: example inputs; the file is for their shapes.
        f: a path, or a binary file object.
        input_names, output_names: names in the file.
        opset_version: 13 to 20; None takes 17.
        dynamic_axes: not supported, shapes are fixed.
        others: accepted for compatibility.

    Returns:
        The ``onnx.ModelProto``.

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
    """
    if dynamic_axes:
        raise ExportError(
            "export_quantized_onnx: shapes are fixed; export once for each batch size instead of dynamic_axes."
        )
    if not export_params:
        warnings.warn(
            "export_quantized_onnx: export_params=False is ignored, weights are always written.", stacklevel=2
        )
    onnx_model = build_onnx(model, args, input_names, output_names, opset_version)
    data = onnx_model.SerializeToString()
    if isinstance(f, (str, os.PathLike)):
        write_atomically(data, os.fspath(f))
    else:
        f.write(data)
    if verbose:
        print(onnx_model)
    return onnx_model


def export_to_onnx(model: nn.Module, args: Any, f: Any, *others: Any, **options: Any) -> Any:
    """The vendor's export of float and QAT models, for looking at; not in this version.

    Raises:
        ExportError: always; it says what there is instead.
    """
    raise ExportError(
        "export_to_onnx: float and QAT models are not exported by this version. Convert the model and write it with "
        "`export_quantized_onnx`, which also runs; a float model is written by `torch.onnx.export`."
    )


show_at("utils.onnx_helper", export_quantized_onnx, export_to_onnx)
