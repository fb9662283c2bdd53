"""`prepare`: from a float model to one that calibrates and trains on the integer grid."""

from horizon_plugin_pytorch.workflow.prepare import GRAPH_FILE, PrepareMethod, prepare

__all__ = ["GRAPH_FILE", "PrepareMethod", "prepare"]
