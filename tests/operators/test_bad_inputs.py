"""The package's own functions on inputs of wrong shapes, types and sizes: each says what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import functional
from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.errors import HorizonError, OperatorInputError
from horizon_plugin_pytorch.nn import functional as F
from horizon_plugin_pytorch.quantization import FakeQuantState, QuantStub, convert_fx, set_fake_quantize
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx, export_to_onnx
from tests.routes import prepared

PILLARS, PLACES, SHAPE = torch.rand(3, 7), torch.zeros(3, 4, dtype=torch.long), (1, 7, 4, 4)
IMAGE, BOXES, SCORES = torch.rand(1, 3, 8, 8), torch.tensor([[0.0, 0, 4, 4], [1, 1, 5, 5]]), torch.rand(2)
RANKS, CLOUD, CUBE = torch.arange(3), [torch.rand(5, 4)], [0, 0, 0, 1, 1, 1]


def _bev(shape: tuple[int, ...] = (1, 1, 2, 4, 5), length: int = 3, feat: tuple[int, ...] = (1, 1, 2, 3, 5)) -> Tensor:
    depth, start = torch.rand(1, 1, 4, 2, 3), RANKS[:1]
    return hnn.BevPoolV2()(depth, torch.rand(feat), RANKS, RANKS, RANKS * 0, start, start + length, shape)


# What is called, and what the message says.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "scatter-one-axis": (lambda: F.point_pillars_scatter(PILLARS[0], PLACES, SHAPE), r"features \[M, C\]"),
    "scatter-image": (lambda: F.point_pillars_scatter(torch.rand(1, 7, 3, 1), PLACES, SHAPE), r"x.squeeze\(0\)"),
    "scatter-rows": (lambda: F.point_pillars_scatter(PILLARS[:2], PLACES, SHAPE), "for each row of coords"),
    "scatter-places": (lambda: F.point_pillars_scatter(PILLARS, PLACES[:, :2], SHAPE), r"coords \[M, \(n"),
    "scatter-booleans": (lambda: F.point_pillars_scatter(PILLARS, PLACES > 0, SHAPE), "whole numbers"),
    "scatter-channels": (lambda: F.point_pillars_scatter(PILLARS, PLACES, (1, 5, 4, 4)), "output_shape with 7"),
    "scatter-size": (lambda: F.point_pillars_scatter(PILLARS, PLACES, (4, 4)), r"\[N, C, H, W\]"),
    "scatter-no-shape": (lambda: hnn.PointPillarsScatter()(PILLARS, PLACES), r"PointPillarsScatter\(output_shape\)"),
    "scatter-no-tensor": (lambda: F.point_pillars_scatter([1.0], PLACES, SHAPE), "voxel_features list"),
    "boxes-without-image": (lambda: F.roi_align(IMAGE, BOXES, 2), r"\[K, 5\]"),
    "boxes-of-three": (lambda: F.roi_align(IMAGE, [BOXES[:, :3]], 2), r"boxes \[2, 3\]"),
    "no-boxes": (lambda: F.roi_align(IMAGE, [], 2), r"list of tensors \[n, 4\]"),
    "one-map": (lambda: F.roi_align(IMAGE[0], [BOXES], 2), r"\[N, C, H, W\]"),
    "whole-map": (lambda: F.roi_align(IMAGE.long(), [BOXES], 2), "real numbers"),
    "roi-of-nothing": (lambda: F.roi_align(IMAGE, [BOXES], 0), "positive"),
    "roi-of-one-size": (lambda: F.roi_align(IMAGE, [BOXES], (2,)), "one or two"),
    "maps-and-strides": (lambda: hnn.MultiScaleRoIAlign(2, [4, 8])([IMAGE], [BOXES]), "2 feature maps"),
    "warp-one-map": (lambda: F.warp(IMAGE[0], torch.zeros(1, 8, 8, 2)), r"\[N, C, H, W\]"),
    "windows-that-do-not-fit": (lambda: F.window_partition(torch.rand(1, 15, 14, 3), 7), "multiples.*Pad it"),
    "windows-channels-first": (lambda: F.window_partition(torch.rand(1, 3, 14, 14), 7), "permute"),
    "windows-of-nothing": (lambda: F.window_partition(torch.rand(1, 14, 14, 3), 0), "multiples"),
    "windows-of-no-map": (lambda: F.window_reverse(torch.rand(5, 7, 7, 3), 7, 14, 14), "height H and width W"),
    "windows-flat": (lambda: F.window_reverse(torch.rand(4, 49, 3), 7, 14, 14), "window_size"),
    "nms-lists": (lambda: F.nms([[0, 0, 1, 1]], SCORES[:1], 0.5), "boxes list"),
    "nms-threshold": (lambda: F.nms(BOXES, SCORES, None), "iou_threshold None"),
    "nms-counts": (lambda: F.nms(BOXES, SCORES, 0.5, pre_nms_top_n=-1), "None is all"),
    "filter-lists": (lambda: F.filter([IMAGE], threshold=0.5), "maps"),
    "filter-threshold": (lambda: F.filter(IMAGE, threshold=None), "threshold None"),
    "rle-lists": (lambda: F.rle([1, 1]), "Stack"),
    "decode-clip": (lambda: F.decode(BOXES, SCORES, BOXES, clip_size=(1, 2, 3)), "height and width"),
    "decode-scale": (lambda: F.decode(BOXES, SCORES, BOXES, regression_scale=(1, 2, 3)), "one or four"),
    "match-counts": (lambda: F.max_iou_match(BOXES, BOXES[None], torch.tensor([1.5]), 0.5, 0.4), r"\[1.5\]"),
    "voxels-of-nothing": (lambda: F.point_pillars_preprocess(CLOUD, CUBE, [0, 1, 1], 2, 2), "positive voxel_size"),
    "range-turned": (lambda: F.point_pillars_preprocess(CLOUD, CUBE[::-1], [1, 1, 1], 2, 2), "minima below maxima"),
    "no-voxels": (lambda: F.point_pillars_preprocess(CLOUD, CUBE, [1, 1, 1], -1, 2), "max_voxels -1"),
    "no-points": (lambda: F.point_pillars_preprocess(CLOUD, CUBE, [1, 1, 1], 2, 0), "max_points_per_voxel 0"),
    "norm-dims": (
        lambda: F.point_pillars_preprocess(CLOUD, CUBE, [1, 1, 1], 2, 2, norm_range=[0, 1], norm_dims=[9]),
        "the 4 numbers",
    ),
    "complex-images": (lambda: functional.rgb2yuv(IMAGE + 0j), "complex64"),
    "view-channels": (lambda: _bev((1, 1, 2, 4, 9)), r"\[B, Z, Y, X, C\]"),
    "view-axes": (lambda: _bev(feat=(2, 3)), r"\[B, N, H, W, C\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(OperatorInputError, match=text):
        call()


def test_intervals_that_end_behind_the_points() -> None:
    with pytest.raises(RuntimeError, match="ends at 5 of 3"):
        _bev(length=5)


EMPTY: dict[str, Callable[[], Any]] = {
    "scatter": lambda: F.point_pillars_scatter(PILLARS[:0], PLACES[:0], SHAPE),
    "scatter-of-images": lambda: F.point_pillars_scatter(torch.rand(3, 7, 1, 1), PLACES, SHAPE),
    "roi": lambda: F.roi_align(IMAGE, [BOXES[:0]], 2),
    "warp": lambda: F.warp(IMAGE[:0], torch.zeros(0, 8, 8, 2)),
    "windows": lambda: F.window_reverse(F.window_partition(torch.rand(0, 14, 14, 3), 7), 7, 14, 14),
    "nms": lambda: F.nms(BOXES[:0], SCORES[:0], 0.5, pre_nms_top_n=0),
    "filter": lambda: F.filter(IMAGE[:0], threshold=0.5),
    "rle": lambda: F.rle(torch.zeros(2, 0)),
    "decode": lambda: F.decode(BOXES[:0], SCORES[:0], BOXES[:0]),
    "cloud": lambda: F.point_pillars_preprocess([torch.rand(0, 4)], CUBE, [1, 1, 1], 2, 2),
}


@pytest.mark.parametrize("name", EMPTY)
def test_of_nothing_comes_nothing(name: str) -> None:
    found = EMPTY[name]()
    tensors = [x for x in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(x, Tensor)]
    assert all(torch.count_nonzero(x) == 0 or name == "scatter-of-images" for x in tensors)


class Pillars(nn.Module):
    """Pillars that are scattered into an image."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.scatter = QuantStub(), hnn.PointPillarsScatter(SHAPE)

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        return self.scatter(self.quant(x), coords)


def test_a_scatter_names_its_module_in_every_stage(tmp_path: Any) -> None:
    image = (torch.rand(1, 7, 3, 1), PLACES)
    text = r"takes a row of features for each row of coords, got voxel_features \[1, 7, 3, 1\]"
    with pytest.raises(OperatorInputError, match=rf"`point_pillars_scatter` \(test_bad_inputs.py:\d+\) {text}"):
        Pillars()(*image)
    placed = rf"`PointPillarsScatter` at `scatter` \(test_bad_inputs.py:\d+\) {text}"
    model = prepared(Pillars(), (PILLARS, PLACES))
    for state in FakeQuantState:
        set_fake_quantize(model, state)
        with pytest.raises(OperatorInputError, match=placed):
            model(*image)
    with pytest.raises(HorizonError, match=placed):
        export_to_onnx(model, image, tmp_path / "qat.onnx")
    quantized = convert_fx(model)
    with pytest.raises(OperatorInputError, match=placed):
        quantized(*image)
    with pytest.raises(HorizonError, match=placed):
        export_quantized_onnx(quantized, image, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
