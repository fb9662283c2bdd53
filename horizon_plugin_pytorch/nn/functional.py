"""Functions of `horizon_plugin_pytorch.nn` that torch does not have: detection, point clouds, colour."""

from horizon_plugin_pytorch.nn.bgr_to_yuv444 import bgr_to_yuv444

__all__ = ["bgr_to_yuv444"]
