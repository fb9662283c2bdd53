"""Importing this lets `torch.onnx.export` write prepared and converted models."""

from horizon_plugin_pytorch.export.onnx_register import register_onnx_ops

register_onnx_ops()

__all__ = ["register_onnx_ops"]
