"""Where a model enters and leaves the quantized part."""

from horizon_plugin_pytorch.nn.stubs import DeQuantStub, QuantStub, QuantWrapper

__all__ = ["DeQuantStub", "QuantStub", "QuantWrapper"]
