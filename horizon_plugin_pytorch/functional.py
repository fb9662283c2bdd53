"""Functions on images and boxes that need no module: colour spaces, overlap, non-maximum suppression.

They compute in real numbers, before or after the quantized part of a model; a symbolic trace records each as one call.
"""

from torch import abs

from horizon_plugin_pytorch.nn.boxes3d import box3d_iou, box3d_iou_bev, box3d_overlap_bev, nms3d
from horizon_plugin_pytorch.nn.colour import (
    bgr2centered_gray,
    bgr2centered_yuv,
    bgr2gray,
    bgr2rgb,
    bgr2yuv,
    centered_yuv2bgr,
    centered_yuv2rgb,
    rgb2bgr,
    rgb2centered_gray,
    rgb2centered_yuv,
    rgb2gray,
    rgb2yuv,
)
from horizon_plugin_pytorch.nn.filtering import filter
from horizon_plugin_pytorch.nn.nms import batched_nms, batched_nms_with_padding, nms
from horizon_plugin_pytorch.nn.rotated_boxes import nms_rotated
from horizon_plugin_pytorch.nn.selection import argmax, sort

__all__ = [
    "abs", "argmax", "batched_nms", "batched_nms_with_padding", "bgr2centered_gray", "bgr2centered_yuv", "bgr2gray",
    "bgr2rgb", "bgr2yuv", "box3d_iou", "box3d_iou_bev", "box3d_overlap_bev", "centered_yuv2bgr", "centered_yuv2rgb",
    "filter", "nms", "nms3d", "nms_rotated", "rgb2bgr", "rgb2centered_gray", "rgb2centered_yuv", "rgb2gray", "rgb2yuv",
    "sort",
]  # fmt: skip
