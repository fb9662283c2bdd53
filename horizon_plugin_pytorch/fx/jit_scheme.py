"""What a model can say about its own code to `prepare`."""

from horizon_plugin_pytorch.capture.dynamic_block import (
    Tracer,
    _IsTracing,  # noqa: F401 - named in pickles
    dynamic_block,
)

__all__ = ["Tracer", "dynamic_block"]
