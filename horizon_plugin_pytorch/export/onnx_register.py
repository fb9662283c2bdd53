"""`torch.onnx.export` for models of this package."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_files import export_to_onnx
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule

# What decides on torch's own work, and not on the file.
_OF_TORCH = frozenset(
    "dynamo external_data report optimize verify profile dump_exported_program artifacts_dir autograd_inlining "
    "export_modules_as_functions fallback".split()
)


def register_onnx_ops() -> None:
    """Let `torch.onnx.export` write prepared and converted models as `export_to_onnx` does; others are torch's.

    Importing ``horizon_plugin_pytorch.utils._register_onnx_ops`` does it. The tensors of these models are classes of
    their own, which torch's exporter does not take.
    """
    torchs = torch.onnx.export
    if getattr(torchs, "writes_quantized_models", False):
        return

    @functools.wraps(torchs)
    def export(model: Any, args: Any = (), f: Any = None, **options: Any) -> Any:
        is_ours = isinstance(model, nn.Module) and any(
            isinstance(module, (QATModule, QuantizedModule)) for module in model.modules()
        )
        return _written(model, args, f, options) if is_ours else torchs(model, args, f, **options)

    export.writes_quantized_models = True  # type: ignore[attr-defined]
    torch.onnx.export = export


def _written(model: nn.Module, args: Any, f: Any, options: dict[str, Any]) -> Any:
    kept = {name: value for name, value in options.items() if name not in _OF_TORCH}
    named = kept.pop("kwargs", None)
    if named and args:
        raise ExportError(
            "torch.onnx.export: arguments of a quantized model are given all by position (`args`) or all by name "
            "(`kwargs`)."
        )
    if kept.pop("dynamic_shapes", None) is not None or kept.pop("custom_translation_table", None):
        raise ExportError(
            "torch.onnx.export: quantized models take `dynamic_axes`, as {'image': {0: 'batch'}}, and neither "
            "`dynamic_shapes` nor `custom_translation_table`."
        )
    if f is None:
        raise ExportError("torch.onnx.export: give the path of the file (`f`) that a quantized model is written to.")
    kept["verbose"] = bool(kept.get("verbose"))
    return export_to_onnx(model, named or args, f, **kept)
