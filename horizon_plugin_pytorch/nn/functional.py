"""Functions of `horizon_plugin_pytorch.nn` that torch does not have: detection, point clouds, colour."""

from horizon_plugin_pytorch.nn.bgr_to_yuv444 import bgr_to_yuv444
from horizon_plugin_pytorch.nn.filtering import filter, rle
from horizon_plugin_pytorch.nn.grid_sample import warp
from horizon_plugin_pytorch.nn.matching import ig_region_match, max_iou_match
from horizon_plugin_pytorch.nn.nms import batched_nms, nms
from horizon_plugin_pytorch.nn.point_pillars_scatter import point_pillars_scatter
from horizon_plugin_pytorch.nn.proposals import decode, get_top_n
from horizon_plugin_pytorch.nn.roi_align import roi_align
from horizon_plugin_pytorch.nn.voxelization import point_pillars_preprocess
from horizon_plugin_pytorch.nn.window import window_partition, window_reverse

__all__ = [
    "batched_nms", "bgr_to_yuv444", "decode", "filter", "get_top_n", "ig_region_match", "max_iou_match", "nms",
    "point_pillars_preprocess", "point_pillars_scatter", "rle", "roi_align", "warp", "window_partition",
    "window_reverse",
]  # fmt: skip
