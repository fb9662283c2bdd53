"""Graph modules at each stage."""

from horizon_plugin_pytorch.capture.graph_module import (
    GraphModuleWithAttr,
    ObservedGraphModule,
    QuantizedGraphModule,
)
from horizon_plugin_pytorch.workflow.split import split_compilable_model

__all__ = ["GraphModuleWithAttr", "ObservedGraphModule", "QuantizedGraphModule", "split_compilable_model"]
