"""Helpers whose paths the guides, or public code, give."""

from horizon_plugin_pytorch.utils import (
    check_model,
    fx_helper,
    misc,
    onnx_helper,
    quant_profiler,
    quant_switch,
    serialization,
)

__all__ = ["check_model", "fx_helper", "misc", "onnx_helper", "quant_profiler", "quant_switch", "serialization"]
