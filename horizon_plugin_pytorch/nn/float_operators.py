"""Rows for operators that compute in real numbers, before the QuantStub or after the DeQuantStub.

They have no scale and no module of ours to train; the table says that they are there, and on which chips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horizon_plugin_pytorch.nn.anchor_generator import AnchorGenerator
from horizon_plugin_pytorch.nn.bgr_to_yuv444 import BgrToYuv444, bgr_to_yuv444
from horizon_plugin_pytorch.nn.boxes3d import box3d_iou, box3d_iou_bev, box3d_overlap_bev, nms3d
from horizon_plugin_pytorch.nn.detection_post_process import DetectionPostProcess
from horizon_plugin_pytorch.nn.detection_post_process_v1 import DetectionPostProcessV1
from horizon_plugin_pytorch.nn.filtering import filter, rle
from horizon_plugin_pytorch.nn.matching import ig_region_match, max_iou_match
from horizon_plugin_pytorch.nn.nms import batched_nms, nms
from horizon_plugin_pytorch.nn.proposals import decode, get_top_n
from horizon_plugin_pytorch.nn.rcnn_post_process import RcnnPostProcess
from horizon_plugin_pytorch.nn.rotated_boxes import nms_rotated
from horizon_plugin_pytorch.nn.voxelization import _voxelization, point_pillars_preprocess
from horizon_plugin_pytorch.operators.support import INT8, INTS, WIDE, Marches, Support, on
from horizon_plugin_pytorch.operators.table import Call, Kind, Operator, ScaleRule, register

FLOAT = ("float32",)
INDEX = ("int64",)


def _on_all(inputs: tuple[str, ...], outputs: tuple[str, ...], bernoulli2: str = "") -> Marches:
    """The same formats on every chip, with a note for BERNOULLI2."""
    same = Support(inputs, outputs)
    return on(bernoulli2=Support(inputs, outputs, note=bernoulli2), bayes=same, nash=same, nash_h=same)


def _as_it_is(*args: Any, **kwargs: Any) -> Call | None:
    """Nothing to replace."""
    return None


def _register(
    name: str,
    modules: tuple[type, ...] = (),
    functions: tuple[Callable, ...] = (),
    marches: Marches | None = None,
    result: Kind = Kind.FLOAT,
) -> None:
    register(
        Operator(
            name,
            ScaleRule.NONE,
            modules=modules,
            functions=dict.fromkeys(functions, _as_it_is),
            marches=_on_all(FLOAT, FLOAT) if marches is None else marches,
            results=(result,),
        )
    )


_register("bgr_to_yuv444", (BgrToYuv444,), (bgr_to_yuv444,))
_register(
    "anchor_generator", (AnchorGenerator,), marches=_on_all((*WIDE, *FLOAT), FLOAT, bernoulli2="shapes must be static")
)
_register("detection_post_process", (DetectionPostProcess,))
_register("detection_post_process_v1", (DetectionPostProcessV1,), marches=on(bernoulli2=Support(INT8, FLOAT)))
_register("rcnn_post_process", (RcnnPostProcess,))
_register("filter", functions=(filter,), marches=_on_all(INTS, FLOAT))
_register("nms", functions=(nms, batched_nms, nms_rotated, nms3d))
_register("box_iou", functions=(box3d_iou, box3d_iou_bev, box3d_overlap_bev))
_register("box_match", functions=(max_iou_match, ig_region_match), marches=_on_all(FLOAT, INDEX))
_register("box_decode", functions=(decode, get_top_n))
_register("point_pillars_preprocess", functions=(point_pillars_preprocess, _voxelization))
_register("rle", functions=(rle,), marches=_on_all((*INTS, *INDEX), INDEX), result=Kind.INDEX)
