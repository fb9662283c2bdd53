"""ONNX export."""

from horizon_plugin_pytorch.export.onnx_files import export_quantized_onnx, export_to_onnx

__all__ = ["export_quantized_onnx", "export_to_onnx"]
