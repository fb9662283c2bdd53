"""Calls that need the vendor's compiler, which is not part of this project; they say so when they are called."""

from __future__ import annotations

from typing import Any, NoReturn

from horizon_plugin_pytorch.errors import ExportError

__all__ = ["compile_model", "export_hbir", "perf_model", "visualize_model"]

_INSTEAD = (
    "`export_quantized_onnx` writes the integers of the converted model as standard ONNX, and `check_model` says "
    "whether it keeps the chip's published formats and limits"
)


def _refuse(name: str, what: str) -> NoReturn:
    raise ExportError(f"{name} {what}. {_INSTEAD}.")


def compile_model(module: Any, example_inputs: Any, hbm: Any, *others: Any, **options: Any) -> NoReturn:
    """Compile a model for the chip; the vendor's compiler does that.

    Raises:
        ExportError: always.
    """
    _refuse("compile_model", "needs the vendor's compiler (hbdk), which is not part of this project")


def perf_model(module: Any, example_inputs: Any, *others: Any, **options: Any) -> NoReturn:
    """Estimate speed on the chip; the vendor's compiler does that.

    Raises:
        ExportError: always.
    """
    _refuse("perf_model", "needs the vendor's compiler (hbdk), which alone knows the chip's speed")


def visualize_model(module: Any, example_inputs: Any, *others: Any, **options: Any) -> NoReturn:
    """Show the compiled model as a picture; the vendor's compiler does that.

    Raises:
        ExportError: always.
    """
    _refuse(
        "visualize_model", "shows what the vendor's compiler (hbdk) makes of a model; an ONNX file is shown by Netron"
    )


def export_hbir(module: Any, example_inputs: Any, hbir: Any, *others: Any, **options: Any) -> NoReturn:
    """Write a model in the format of the vendor's compiler.

    Raises:
        ExportError: always.
    """
    _refuse("export_hbir", "writes the format of the vendor's compiler, which is not public")
