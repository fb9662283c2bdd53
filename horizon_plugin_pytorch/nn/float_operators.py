"""Rows for operators that compute in real numbers, before the QuantStub or after the DeQuantStub.

They have no scale and no module of ours to train; the table says that they are there, and on which chips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horizon_plugin_pytorch.nn.anchor_generator import AnchorGenerator
from horizon_plugin_pytorch.nn.bgr_to_yuv444 import BgrToYuv444, bgr_to_yuv444
from horizon_plugin_pytorch.nn.detection_post_process import DetectionPostProcess
from horizon_plugin_pytorch.nn.detection_post_process_v1 import DetectionPostProcessV1
from horizon_plugin_pytorch.nn.filtering import filter, rle
from horizon_plugin_pytorch.nn.nms import batched_nms, nms
from horizon_plugin_pytorch.nn.operator_table import Call, Kind, Operator, ScaleRule, register
from horizon_plugin_pytorch.nn.rcnn_post_process import RcnnPostProcess
from horizon_plugin_pytorch.nn.rotated_boxes import nms_rotated
from horizon_plugin_pytorch.nn.support import INT8, INTS, WIDE, Marches, Support, on
from horizon_plugin_pytorch.nn.voxelization import point_pillars_preprocess

FLOAT = ("float32",)
_EVERYWHERE = on(bernoulli2=Support(FLOAT, FLOAT), bayes=Support(FLOAT, FLOAT), nash_h=Support(FLOAT, FLOAT))


def _as_it_is(*args: Any, **kwargs: Any) -> Call | None:
    """Nothing to replace."""
    return None


def _register(
    name: str,
    modules: tuple[type, ...] = (),
    functions: tuple[Callable, ...] = (),
    marches: Marches = _EVERYWHERE,
    result: Kind = Kind.FLOAT,
) -> None:
    register(
        Operator(
            name,
            ScaleRule.NONE,
            modules=modules,
            functions=dict.fromkeys(functions, _as_it_is),
            marches=marches,
            results=(result,),
        )
    )


_register("bgr_to_yuv444", (BgrToYuv444,), (bgr_to_yuv444,))
_register(
    "anchor_generator",
    (AnchorGenerator,),
    marches=on(
        bernoulli2=Support((*WIDE, *FLOAT), FLOAT, note="shapes must be static"), bayes=Support((*WIDE, *FLOAT), FLOAT)
    ),
)
_register("detection_post_process", (DetectionPostProcess,))
_register("detection_post_process_v1", (DetectionPostProcessV1,), marches=on(bernoulli2=Support(INT8, FLOAT)))
_register("rcnn_post_process", (RcnnPostProcess,))
_register("filter", functions=(filter,), marches=on(bernoulli2=Support(INTS, FLOAT), bayes=Support(INTS, FLOAT)))
_register("nms", functions=(nms, batched_nms, nms_rotated))
_register("point_pillars_preprocess", functions=(point_pillars_preprocess,))
_register("rle", functions=(rle,), marches=on(bernoulli2=Support(INTS), bayes=Support(INTS)), result=Kind.INDEX)
