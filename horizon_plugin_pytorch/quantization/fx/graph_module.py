"""Graph modules that keep the attributes of the model they were made from."""

from horizon_plugin_pytorch.capture.graph_module import (
    GraphModuleWithAttr,
    ObservedGraphModule,
    QuantizedGraphModule,
    _rebuild,  # noqa: F401 - named in pickles
    write_later,
    write_now,
)

__all__ = ["GraphModuleWithAttr", "ObservedGraphModule", "QuantizedGraphModule", "write_later", "write_now"]
