"""fx mode: trace the model, then replace, fuse and swap by itself."""

from horizon_plugin_pytorch.workflow.symbolic import QuantizationTracer, convert_fx, fuse_fx, prepare_qat_fx

__all__ = ["QuantizationTracer", "convert_fx", "fuse_fx", "prepare_qat_fx"]
