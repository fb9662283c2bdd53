"""Recording what an integer graph computes, operator by operator."""

from horizon_plugin_pytorch.export.graph_profiler import HbirModelProfiler

__all__ = ["HbirModelProfiler"]
