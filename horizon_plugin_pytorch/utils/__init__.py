"""Helpers whose paths the guides give."""

from horizon_plugin_pytorch.utils import check_model, onnx_helper, quant_switch

__all__ = ["check_model", "onnx_helper", "quant_switch"]
