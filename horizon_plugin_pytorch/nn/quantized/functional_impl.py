"""The path that public code imports `_voxelization` from; it computes in real numbers."""

from horizon_plugin_pytorch.nn.voxelization import _voxelization

__all__ = ["_voxelization"]
