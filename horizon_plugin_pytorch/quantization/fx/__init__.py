"""Graph modules at each stage."""

from horizon_plugin_pytorch.quantization.fx.graph_module import (
    GraphModuleWithAttr,
    ObservedGraphModule,
    QuantizedGraphModule,
)

__all__ = ["GraphModuleWithAttr", "ObservedGraphModule", "QuantizedGraphModule"]
