"""An integer graph as a module."""

from horizon_plugin_pytorch.export.graph_profiler import HbirModuleWrapper

__all__ = ["HbirModuleWrapper"]
