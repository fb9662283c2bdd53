"""Detection: suppression against a plain loop, post-processing step by step, and whole models with it at their end."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from horizon_plugin_pytorch import functional
from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.errors import OperatorInputError, UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.boxes import clip, decode, overlap
from horizon_plugin_pytorch.nn.functional import batched_nms, filter, max_iou_match, nms, point_pillars_preprocess, rle
from horizon_plugin_pytorch.nn.functional import decode as decode_boxes
from horizon_plugin_pytorch.nn.operator_table import row_of_function, row_of_module, rows
from horizon_plugin_pytorch.nn.rotated_boxes import rotated_overlap
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import OPTIMIZATION, as_numbers, assert_one_arithmetic, calibrate, mismatches, qconfig, run_onnx

# Coordinates of halves make overlaps equal to thresholds, and few scores make ties.
coordinate = st.integers(0, 24).map(lambda v: v / 2)
side = st.integers(0, 12).map(lambda v: v / 2)
box = st.tuples(coordinate, coordinate, side, side)
scored = st.lists(st.tuples(box, st.integers(0, 8).map(lambda v: v / 8), st.integers(0, 2)), max_size=40)


def _tensors(items: Any) -> tuple[Tensor, Tensor, Tensor]:
    boxes = torch.tensor([[x, y, x + w, y + h] for (x, y, w, h), _, _ in items]).reshape(-1, 4)
    return boxes, torch.tensor([s for _, s, _ in items]), torch.tensor([k for _, _, k in items], dtype=torch.int64)


def _naive(boxes: Tensor, scores: Tensor, kinds: Tensor | None, threshold: float) -> list[int]:
    order = sorted(range(len(boxes)), key=lambda i: (-float(scores[i]), i))
    kept: list[int] = []
    for i in order:
        if not any(
            (kinds is None or kinds[i] == kinds[j]) and float(overlap(boxes[j : j + 1], boxes[i : i + 1])) > threshold
            for j in kept
        ):
            kept.append(i)
    return kept


@settings(deadline=None)
@given(scored, st.sampled_from([0.0, 0.25, 0.5, 0.75]))
def test_suppression_is_that_of_a_plain_loop(items: Any, threshold: float) -> None:
    boxes, scores, kinds = _tensors(items)
    assert nms(boxes, scores, threshold).tolist() == _naive(boxes, scores, None, threshold)
    wanted = _naive(boxes, scores, kinds, threshold)
    assert batched_nms(boxes, scores, kinds, threshold).tolist() == wanted
    assert batched_nms(boxes, scores, kinds, threshold, output_num=3).tolist() == wanted[:3]
    high = [i for i in range(len(boxes)) if scores[i] > 0.5]
    found = _naive(boxes[high], scores[high], None, threshold)
    assert nms(boxes, scores, threshold, score_threshold=0.5).tolist() == [high[i] for i in found]
    best = sorted(range(len(boxes)), key=lambda i: (-float(scores[i]), i))[:7]
    found = _naive(boxes[best], scores[best], None, threshold)
    assert nms(boxes, scores, threshold, pre_nms_top_n=7).tolist() == [best[i] for i in found]


@pytest.mark.parametrize("spread", [30.0, 300.0])
def test_suppression_across_blocks(spread: float) -> None:
    """More candidates than a block holds, with long chains of who removes whom."""
    corner = torch.rand(1500, 2) * torch.tensor([spread, 5.0])
    boxes = torch.cat([corner, corner + 4], 1)
    scores = torch.rand(1500)
    assert nms(boxes, scores, 0.3).tolist() == _fast_naive(boxes, scores, 0.3)
    assert nms(boxes, scores, 0.3, output_num=5).tolist() == _fast_naive(boxes, scores, 0.3)[:5]


def _fast_naive(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    order = scores.sort(descending=True, stable=True).indices
    over = overlap(boxes[order], boxes[order]) > threshold
    alive = torch.ones(len(order), dtype=torch.bool)
    for i in range(len(order)):
        if alive[i]:
            alive[i + 1 :] &= ~over[i, i + 1 :]
    return order[alive].tolist()


def test_suppression_at_the_edges() -> None:
    nothing = torch.zeros(0, 4)
    assert nms(nothing, torch.zeros(0), 0.5).tolist() == []
    flat = torch.tensor([[1.0, 1, 1, 5]] * 2)  # no area, no overlap
    assert nms(flat, torch.ones(2), 0.0).tolist() == [0, 1]
    scores = torch.tensor([math.nan, 0.1, math.inf])
    assert nms(torch.rand(3, 4), scores, 1.0).tolist() == [2, 1, 0]
    assert nms(torch.tensor([[0, 0, 4, 4], [0, 0, 4, 4]]), torch.tensor([1, 2]), 0.5).tolist() == [1]
    with pytest.raises(ValueError, match=r"got \(3, 5\) and \(3,\)"):
        nms(torch.zeros(3, 5), torch.zeros(3), 0.5)
    with pytest.raises(OperatorInputError, match="`batched_nms`.* computes in float.*DeQuantStub"):
        batched_nms(QTensor(torch.zeros(1, 4), 1.0, "qint8"), torch.zeros(1), torch.zeros(1), 0.5)
    assert functional.nms is nms and functional.filter is filter


# Round numbers make edges parallel and corners meet.
place, length, turn = (
    st.one_of(st.floats(low, high), st.integers(-8, 8).map(lambda v, s=step, o=base: o + v * s))
    for low, high, step, base in ((-5, 5, 0.5, 0), (0.1, 6, 0.25, 2.5), (-4, 4, math.pi / 8, 0))
)
turned = st.tuples(place, place, length, length, turn)


def _polygon(box: Any) -> list[tuple[float, float]]:
    x, y, w, h, angle = (float(v) for v in box)
    cos, sin = math.cos(angle), math.sin(angle)
    halves = [(-w / 2, -h / 2), (w / 2, -h / 2), (w / 2, h / 2), (-w / 2, h / 2)]
    return [(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in halves]


def _clipped_area(subject: list[tuple[float, float]], window: list[tuple[float, float]]) -> float:
    """Cut the polygon along each edge of the window, one after the other."""
    for (ax, ay), (bx, by) in zip(window, window[1:] + window[:1], strict=True):
        sides = [(bx - ax) * (y - ay) - (by - ay) * (x - ax) for x, y in subject]
        cut = []
        for i, ((x, y), side) in enumerate(zip(subject, sides, strict=True)):
            (px, py), before = subject[i - 1], sides[i - 1]
            if (side > 0) != (before > 0):
                t = before / (before - side)
                cut.append((px + t * (x - px), py + t * (y - py)))
            if side > 0:
                cut.append((x, y))
        subject = cut
    return abs(sum(subject[i - 1][0] * y - subject[i - 1][1] * x for i, (x, y) in enumerate(subject))) / 2


@settings(deadline=None)
@given(turned, turned)
def test_turned_boxes_overlap_as_polygons_that_are_cut(a: Any, b: Any) -> None:
    first, second = torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
    shared = _clipped_area(_polygon(a), _polygon(b))
    found = float(rotated_overlap(first, second))
    assert found == pytest.approx(shared / (a[2] * a[3] + b[2] * b[3] - shared), abs=1e-6)
    assert float(rotated_overlap(second, first)) == pytest.approx(found, abs=1e-6)
    assert float(rotated_overlap(first, first)) == pytest.approx(1.0, abs=1e-6)


@settings(deadline=None)
@given(scored)
def test_boxes_that_are_not_turned_overlap_as_others(items: Any) -> None:
    boxes, scores, _ = _tensors(items)
    boxes = boxes + torch.tensor([0.0, 0, 0.25, 0.25])  # no empty ones
    center, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    for quarter in (0.0, math.pi):
        turned_boxes = torch.cat([center, size, torch.full((len(boxes), 1), quarter)], 1)
        assert torch.allclose(rotated_overlap(turned_boxes, turned_boxes), overlap(boxes, boxes), atol=1e-6)
    assert functional.nms_rotated(turned_boxes, scores, 0.31).tolist() == _naive(boxes, scores, None, 0.31)


def test_turned_boxes_with_known_overlaps() -> None:
    square, diamond = torch.tensor([[3.0, -2, 2, 2, 0]]), torch.tensor([[3.0, -2, 2, 2, math.pi / 4]])
    octagon = 8 * (math.sqrt(2) - 1)  # of a square of side 2 and the same square turned by 45 degrees
    assert float(rotated_overlap(square, diamond)) == pytest.approx(octagon / (8 - octagon), rel=1e-6)
    inner = torch.tensor([[3.0, -2, 1, 1, 0.7]])
    assert float(rotated_overlap(square, inner)) == pytest.approx(0.25, rel=1e-6)
    beside = torch.tensor([[5.0, -2, 2, 2, 0]])
    assert float(rotated_overlap(square, beside)) == 0
    far = torch.tensor([[1e5, 1e5, 4, 2, 0.3], [1e5, 1e5, 2, 4, 0.3 + math.pi / 2]])
    assert float(rotated_overlap(far[:1], far[1:])) == pytest.approx(1.0, abs=1e-5)
    assert functional.nms_rotated(torch.zeros(0, 5), torch.zeros(0), 0.5).tolist() == []
    with pytest.raises(ValueError, match=r"\[n, 5\].*got \(2, 4\)"):
        functional.nms_rotated(torch.zeros(2, 4), torch.zeros(2), 0.5)


def test_decoding_moves_and_grows() -> None:
    anchors = torch.tensor([[10.0, 20, 30, 60]])
    assert decode(anchors, torch.zeros(1, 4)).tolist() == anchors.tolist()
    grown = decode(anchors, torch.tensor([[0.0, 0.0, math.log(2), 0.0]]))
    assert torch.allclose(grown, torch.tensor([[0.0, 20, 40, 60]]))
    assert decode(anchors, torch.tensor([[1.0, -1, 0, 0]]), True).tolist() == [[11, 19, 31, 59]]
    assert torch.isfinite(decode(anchors, torch.full((1, 4), 1e4))).all()
    assert clip(torch.tensor([[-3.0, -4, 50, 70]]), (32, 24)).tolist() == [[0, 0, 24, 32]]


def test_anchors_are_those_of_the_published_formula() -> None:
    make = hnn.AnchorGenerator(((32, 64), (128,)), ((0.5, 1.0, 2.0),))
    assert make.num_anchors_per_location() == [6, 3]
    found = make(torch.zeros(2, 3, 64, 96), [torch.zeros(2, 8, 4, 6), torch.zeros(2, 8, 2, 3)])
    assert len(found) == 2 and torch.equal(found[0], found[1])
    assert found[0].shape == (4 * 6 * 6 + 2 * 3 * 3, 4)
    # 32 * sqrt(2) = 45.25 wide and 22.63 high for a ratio of 0.5; halves are rounded.
    assert found[0][0].tolist() == [-23, -11, 23, 11]
    assert found[0][2].tolist() == [-16, -16, 16, 16]  # size 32, ratio 1
    assert found[0][6 + 2].tolist() == [0, -16, 32, 16]  # a step of 16 to the right
    assert found[0][6 * 6 + 2].tolist() == [-16, 0, 16, 32]  # and one down
    assert found[0][4 * 6 * 6 + 3 + 1].tolist() == [-32, -64, 96, 64]  # size 128, a step of 32

    class Images:
        tensors = torch.zeros(1, 3, 8, 8)

    assert hnn.AnchorGenerator((8,), (1.0,))(Images(), [torch.zeros(1, 1, 1, 1)])[0].tolist() == [[-4, -4, 4, 4]]
    with pytest.raises(ValueError, match="2 rows of sizes for 1 feature maps"):
        make(torch.zeros(1, 3, 8, 8), [torch.zeros(1, 1, 1, 1)])
    with pytest.raises(ValueError, match="sizes are for 1 feature maps, aspect_ratios for 2"):
        hnn.AnchorGenerator(((8,),), ((1.0,), (2.0,)))


def _raw(n: int = 2, classes: int = 3, seed: int = 0) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Anchors, scores and regressions of two levels with two anchors a position."""
    generator = torch.Generator().manual_seed(seed)
    boxes, scores, deltas = [], [], []
    for h, w in ((4, 6), (2, 3)):
        corner = torch.rand(h * w * 2, 2, generator=generator) * 40
        boxes.append(torch.cat([corner, corner + 4 + torch.rand(h * w * 2, 2, generator=generator) * 20], 1))
        scores.append(torch.rand(n, 2 * classes, h, w, generator=generator))
        deltas.append(torch.randn(n, 8, h, w, generator=generator) * 0.3)
    return boxes, scores, deltas


def _loop(boxes: Any, scores: Any, deltas: Any, n: int, classes: int, **o: Any) -> list[tuple[float, int, list[float]]]:
    """Post-processing of one image in Python, box by box, from maps."""
    levels = []
    for level_boxes, level_scores, level_deltas in zip(boxes, scores, deltas, strict=True):
        _, _, h, w = level_scores.shape
        anchors = []
        for y in range(h):
            for x in range(w):
                for a in range(2):
                    s = level_scores[n, a * classes : (a + 1) * classes, y, x].tolist()
                    d = level_deltas[n, a * 4 : (a + 1) * 4, y, x] * o.get("regression_scale", 1.0)
                    anchors.append((s, d, level_boxes[(y * w + x) * 2 + a]))
        background = o.get("background_class_idx")
        if "pre_decode_top_n" in o:
            anchors.sort(key=lambda v: -max(s for k, s in enumerate(v[0]) if k != background))
            anchors = anchors[: o["pre_decode_top_n"]]
        found = []
        for s, d, anchor in anchors:
            for k, value in enumerate(s):
                if k == background or not value > o.get("score_threshold", 0):
                    continue
                b = decode(anchor[None], d[None])
                b = (clip(b, o["image_size"]) if "image_size" in o else b)[0]
                if min(b[2] - b[0], b[3] - b[1]) >= o.get("size_threshold", -math.inf):
                    found.append((value, k, b))
        found.sort(key=lambda v: -v[0])
        levels.append(found[: o.get("post_decode_top_n")])
    groups = levels if o.get("nms_on_each_level") else [[*levels[0], *levels[1]]]
    out: list[Any] = []
    for group in groups:
        group = sorted(group, key=lambda v: -v[0])[: o.get("pre_nms_top_n")]
        if "iou_threshold" in o and group:
            stacked = torch.stack([b for _, _, b in group])
            kinds = torch.tensor([k for _, k, _ in group])
            kept = _naive(stacked, torch.tensor([v for v, _, _ in group]), kinds, o["iou_threshold"])
            group = [group[i] for i in kept]
        out += group
    out.sort(key=lambda v: -v[0])
    return [(v, k, b.tolist()) for v, k, b in out[: o.get("post_nms_top_n")]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(score_threshold=0.5, regression_scale=0.5),
        dict(background_class_idx=0, image_size=(30, 40), size_threshold=5.0),
        dict(pre_decode_top_n=9, post_decode_top_n=11),
        dict(iou_threshold=0.3),
        dict(iou_threshold=0.3, pre_nms_top_n=20, post_nms_top_n=7, nms_on_each_level=True),
        dict(background_class_idx=2, score_threshold=0.3, pre_decode_top_n=30, iou_threshold=0.4, pre_nms_top_n=40,
             post_nms_top_n=12, image_size=(32, 48)),
        dict(score_threshold=2.0, iou_threshold=0.5),
    ],
    ids=lambda o: "-".join(o) or "defaults",
)  # fmt: skip
def test_post_processing_is_that_of_a_plain_loop(options: dict[str, Any]) -> None:
    boxes, scores, deltas = _raw()
    found = hnn.DetectionPostProcess(**options)(boxes, scores, deltas)
    assert [len(part) for part in found] == [2, 2, 2]
    rows = [[x.permute(0, 2, 3, 1).reshape(2, -1, k) for x in xs] for xs, k in ((scores, 3), (deltas, 4))]
    same = hnn.DetectionPostProcess(**options)([torch.cat(boxes)] * 2, *rows)  # anchors by image, predictions as rows
    for n in range(2):
        wanted = _loop(boxes, scores, deltas, n, 3, **options)
        assert found[1][n].tolist() == [v for v, _, _ in wanted]
        assert found[2][n].tolist() == [k for _, k, _ in wanted]
        assert torch.allclose(found[0][n], torch.tensor([b for _, _, b in wanted]).reshape(-1, 4), atol=1e-5)
        assert all(torch.equal(a[n], b[n]) for a, b in zip(found, same, strict=True))


def test_image_shapes_win_over_the_image_size() -> None:
    boxes, scores, deltas = _raw()
    post = hnn.DetectionPostProcess(image_size=(1, 1))
    found = post(boxes, scores, deltas, image_shapes=[(10, 20), torch.tensor([30, 5])])[0]
    assert found[0].amax(0).tolist()[2:] == [20, 10] and found[1].amax(0).tolist()[2:] == [5, 30]


def test_yolo_looks_at_objectness() -> None:
    boxes = [torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30], [0, 0, 10, 10]])]
    scores = [torch.tensor([[[0.9, 0.2, 0.8], [0.3, 1.0, 1.0], [0.8, 0.5, 0.75]]])]
    deltas = [torch.tensor([[[1.0, 2, 0, 0], [0, 0, 0, 0], [1.0, 2, 0, 0]]])]
    post = hnn.DetectionPostProcess(0.5, mode="yolo", iou_threshold=0.5)
    found = [part[0] for part in post(boxes, scores, deltas)]
    assert found[0].tolist() == [[1, 2, 11, 12]] and found[2].tolist() == [1]
    assert float(found[1]) == pytest.approx(0.72)
    with pytest.raises(ValueError, match="'normal' or 'yolo', got 'yolov3'"):
        hnn.DetectionPostProcess(mode="yolov3")


def test_post_processing_of_nothing() -> None:
    boxes, scores, deltas = _raw(0)
    assert hnn.DetectionPostProcess(iou_threshold=0.5)(boxes, scores, deltas) == ((), (), ())
    with pytest.raises(ValueError, match=r"\[48, 12\] anchors on their levels, boxes have \[12, 48\]"):
        hnn.DetectionPostProcess()(boxes[::-1], scores, deltas)


def _v1(**options: Any) -> hnn.DetectionPostProcessV1:
    defaults = dict(
        num_classes=3, box_filter_threshold=0.5, class_offsets=(0, 10), use_clippings=True, image_size=(64, 64),
        nms_threshold=0.5, pre_nms_top_k=50, post_nms_top_k=20,
    )  # fmt: skip
    return hnn.DetectionPostProcessV1(**{**defaults, **options})


def _v1_data(n: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    boxes, scores, deltas = _raw(n)
    pairs = [(d.unflatten(1, (2, 4)), s.unflatten(1, (2, 3))) for s, d in zip(scores, deltas, strict=True)]
    data = [torch.cat(pair, 2).flatten(1, 2) for pair in pairs]
    anchors = [b.reshape(1, *s.shape[2:], 8).permute(0, 3, 1, 2) for b, s in zip(boxes, scores, strict=True)]
    return data, anchors


def test_v1_takes_the_best_class_of_each_anchor() -> None:
    data, anchors = _v1_data()
    boxes, scores, deltas = _raw()
    for n, (found, values, classes) in enumerate(_v1()(data, anchors)):
        best, kinds, places = [], [], []
        for level in range(2):
            rows = scores[level][n].permute(1, 2, 0).reshape(-1, 3)
            best.append(rows.amax(1))
            kinds.append(rows.argmax(1) + (0, 10)[level])
            places.append(decode(boxes[level], deltas[level][n].permute(1, 2, 0).reshape(-1, 4)))
        every, kind, place = torch.cat(best), torch.cat(kinds), clip(torch.cat(places), (64, 64))
        chosen = (every > 0.5).nonzero()[:, 0]
        chosen = chosen[every[chosen].sort(descending=True, stable=True).indices[:50]]
        kept = chosen[_naive(place[chosen], every[chosen], kind[chosen], 0.5)][:20]
        assert torch.equal(values, every[kept]) and torch.equal(classes, kind[kept])
        assert torch.allclose(found, place[kept], atol=1e-5)


def test_v1_pads_and_filters() -> None:
    data, anchors = _v1_data()
    few = _v1(box_filter_threshold=0.97)
    count = len(few(data, anchors)[0][0])
    assert 0 < count < 20
    zeros = _v1(box_filter_threshold=0.97, nms_padding_mode="pad_zero")(data, anchors)[0]
    assert [len(x) for x in zeros] == [20, 20, 20] and not zeros[0][count:].any()
    again = _v1(box_filter_threshold=0.97, nms_padding_mode="rollover")(data, anchors)[0]
    assert torch.equal(again[1][count : 2 * count], again[1][:count])
    assert _v1(box_filter_threshold=9.0, nms_padding_mode="rollover")(data, anchors)[0][0].tolist() == [[0.0] * 4] * 20
    sides = _v1(bbox_min_hw=(12, 8))(data, anchors)[0][0]
    assert float((sides[:, 3] - sides[:, 1]).min()) >= 12 and float((sides[:, 2] - sides[:, 0]).min()) >= 8
    sizes = _v1()(data, anchors, image_sizes=[(10, 10), (64, 64)])
    assert float(sizes[0][0].max()) == 10 < float(sizes[1][0].max())
    with pytest.raises(ValueError, match="nms_padding_mode must be one of"):
        _v1(nms_padding_mode="zeros")
    with pytest.raises(ValueError, match="2 levels of data, 1 of anchors and 2 class_offsets"):
        _v1()(data, anchors[:1])
    assert _v1()(*_v1_data(0)) == []


def test_v1_suppresses_only_beyond_the_margin() -> None:
    anchors = [torch.tensor([0.0, 0, 10, 10, 0, 0, 10, 10, 0, 0, 10, 10]).reshape(1, 12, 1, 1)]
    data = [torch.tensor([0.0] * 4 + [0.9] + [0.0] * 4 + [0.8] + [0.0] * 4 + [0.6]).reshape(1, 15, 1, 1)]
    options = dict(num_classes=1, class_offsets=(0,))
    assert _v1(**options)(data, anchors)[0][1].tolist() == pytest.approx([0.9])
    assert _v1(**options, nms_margin=0.2)(data, anchors)[0][1].tolist() == pytest.approx([0.9, 0.8])
    assert _v1(**options, nms_margin=0.5)(data, anchors)[0][1].tolist() == pytest.approx([0.9, 0.8, 0.6])


def test_rcnn_is_that_of_a_plain_loop() -> None:
    post = hnn.RcnnPostProcess((40, 50), 0.4, 0.3, 2, 8, (0.1, 0.0, 0.0, 0.0), (0.1, 0.1, 0.2, 0.2))
    corner = torch.rand(11, 2) * 30
    boxes = torch.cat([corner, corner + 10], 1).split([7, 4])
    scores, deltas = torch.rand(11, 3, 1, 1), torch.randn(11, 12, 1, 1)
    found = post(boxes, scores, deltas)
    assert found.shape == (2, 8, 6)
    start = 0
    for n, proposals in enumerate(boxes):
        candidates = []
        for i, proposal in enumerate(proposals):
            for k in (1, 2):
                value = scores[start + i, k, 0, 0]
                if value > 0.3:
                    move = deltas[start + i, 4 * k : 4 * k + 4, 0, 0] * torch.tensor(post.delta_std)
                    b = clip(decode(proposal[None], (move + torch.tensor(post.delta_mean))[None]), (40, 50))[0]
                    candidates.append((b, value, k - 1))
        places, values = torch.stack([c[0] for c in candidates]), torch.stack([c[1] for c in candidates])
        kinds = torch.tensor([c[2] for c in candidates])
        kept = _naive(places, values, kinds, 0.4)[:8]
        wanted = torch.full((8, 6), -1.0)
        wanted[: len(kept)] = torch.cat([places, values[:, None], kinds[:, None].float()], 1)[kept]
        assert torch.allclose(found[n], wanted, atol=1e-5)
        start += len(proposals)
    with pytest.raises(ValueError, match="scores of 11 boxes and 2 . 1 classes"):
        post(boxes, scores[:10], deltas)
    assert post(boxes, scores, deltas, image_sizes=[(5, 5), (40, 50)])[0, :, :4].max() == 5
    assert post([torch.zeros(0, 4)], scores[:0], deltas[:0]).unique().tolist() == [-1.0]
    assert post([], scores[:0], deltas[:0]).shape == (0, 8, 6)


def test_filter_finds_the_positions() -> None:
    scores, data = torch.rand(2, 5, 4, 6), torch.randn(2, 3, 4, 6)
    for idx_range, (first, last) in ((None, (0, 5)), ((1, 4), (1, 4))):
        for n, (value, index, place, *rest) in enumerate(filter(scores, data, threshold=0.7, idx_range=idx_range)):
            part = scores[n, first:last]
            wanted = [(y, x) for y in range(4) for x in range(6) if float(part[:, y, x].max()) > 0.7]
            assert place.tolist() == [list(p) for p in wanted]
            for i, (y, x) in enumerate(wanted):
                assert value[i] == part[:, y, x].max() and index[i] == part[:, y, x].argmax() + first
                assert torch.equal(rest[0][i], scores[n, :, y, x]) and torch.equal(rest[1][i], data[n, :, y, x])
    empty = filter(scores, threshold=2.0)[0]
    assert [tuple(x.shape) for x in empty] == [(0,), (0,), (0, 2), (0, 5)]
    assert filter(scores[:0], threshold=0.0) == []
    with pytest.raises(OperatorInputError, match=r"\(2, 5, 4, 6\), \(2, 3, 4, 5\)"):
        filter(scores, data[..., 1:], threshold=0.5)


def test_filter_gives_the_real_values_of_a_qtensor() -> None:
    q = QTensor(torch.randint(-128, 128, (1, 3, 4, 4), dtype=torch.int8), 0.5, "qint8")
    real = q.dequantize()
    for a, b in zip(filter(q, q, threshold=20.0)[0], filter(real, real, threshold=20.0)[0], strict=True):
        assert type(a) is Tensor and torch.equal(a, b)


@given(st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), max_size=3))
def test_runs_decode_to_what_was_encoded(rows: list[list[int]]) -> None:
    x = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), 2, 3)
    for row, code in zip(rows, rle(x), strict=True):
        runs = code[1:].reshape(-1, 2)
        assert code.dtype == torch.int64 and int(code[0]) == len(runs)
        assert runs[:, 0].repeat_interleave(runs[:, 1]).tolist() == row
        assert bool((runs[1:, 0] != runs[:-1, 0]).all())
    assert all(torch.equal(a, b) for a, b in zip(rle(x), rle(x.float()), strict=True))


def test_runs_of_a_qtensor_and_of_fractions() -> None:
    q = QTensor(torch.tensor([[5, 5, -1]], dtype=torch.int8), 0.1, "qint8")
    assert rle(q)[0].tolist() == [2, 5, 2, -1, 1]
    assert rle(torch.zeros(1, 0))[0].tolist() == [0]
    with pytest.raises(OperatorInputError, match="whole numbers"):
        rle(torch.tensor([[0.5]]))
    with pytest.raises(OperatorInputError, match="one number"):
        rle(torch.tensor(3))


class Detector(nn.Module):
    """One level, two anchors a position, two classes."""

    def __init__(self, post: nn.Module, is_quantized: bool = False) -> None:
        super().__init__()
        self.quant, self.dequant, self.is_quantized = QuantStub(), DeQuantStub(), is_quantized
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.head = nn.Conv2d(8, 2 * (4 + 2), 1)
        self.anchors, self.post = hnn.AnchorGenerator(((6, 10),), ((1.0,),)), post

    def forward(self, x: Tensor) -> Any:
        features = self.stem(self.quant(x))
        out = self.head(features)
        anchors = self.anchors(x, [features])
        if isinstance(self.post, hnn.DetectionPostProcessV1):
            out = out if self.is_quantized else self.dequant(out)
            grid = anchors[0].reshape(1, 4, 4, 8).permute(0, 3, 1, 2)
            return self.post([out], [grid])
        deltas, scores = self.dequant(out[:, :8]), torch.sigmoid(self.dequant(out[:, 8:]))
        if isinstance(self.post, hnn.DetectionPostProcess):
            return self.post(anchors, [scores], [deltas])
        rows = scores.permute(0, 2, 3, 1).reshape(-1, 2, 1, 1)
        moves = torch.cat([deltas, deltas], 1).permute(0, 2, 3, 1).reshape(-1, 8, 1, 1)
        return self.post([anchors[0], anchors[1]], rows, moves)


V1 = dict(
    num_classes=2, box_filter_threshold=0.1, class_offsets=[0], use_clippings=True, image_size=(8, 8),
    nms_threshold=0.5, pre_nms_top_k=20, post_nms_top_k=10,
)  # fmt: skip
MODELS = {
    "detection": lambda: Detector(hnn.DetectionPostProcess(0.3, iou_threshold=0.5, image_size=(8, 8))),
    "rcnn": lambda: Detector(hnn.RcnnPostProcess((8, 8), post_nms_top_k=5)),
    "v1": lambda: Detector(hnn.DetectionPostProcessV1(**V1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_detector_goes_through_with_its_post_processing(name: str) -> None:
    model, x = MODELS[name]().eval(), torch.randn(2, 3, 8, 8)
    qat = calibrate(prepare_qat_fx(model, {"": qconfig()}), (x,))
    assert any(n.target == "post" for n in qat.graph.nodes)
    quantized = convert_fx(qat)
    found, trained = as_numbers(quantized(x)), as_numbers(qat(x))
    assert mismatches(found, trained) == 0 and sum(x.numel() for x in found) > 0


def test_v1_follows_integers_on_its_chip() -> None:
    set_march(March.BERNOULLI2)
    model, x = Detector(hnn.DetectionPostProcessV1(**V1), is_quantized=True).eval(), torch.randn(2, 3, 8, 8)
    model.register_buffer("unused", torch.zeros(1))
    qat = prepare_qat_fx(model, {"": qconfig()})
    for state in FakeQuantState.CALIBRATION, FakeQuantState.QAT, FakeQuantState.VALIDATION:
        set_fake_quantize(qat, state)
        assert qat(x)[0][0].shape[1] == 4
    quantized = convert_fx(qat)
    for a, b in zip(as_numbers(quantized(x)), as_numbers(qat(x)), strict=True):
        assert torch.equal(a, b)
    scores = quantized(x)[0][1]
    assert torch.equal(scores * 16, (scores * 16).round())  # on the grid of 1/16
    set_march(March.BAYES)
    with pytest.raises(UnsupportedOperatorError, match="bernoulli2 only, and the march is bayes.*DeQuantStub"):
        quantized(x)
    with pytest.raises(UnsupportedOperatorError, match="DetectionPostProcessV1` at `post`.*supported on bernoulli"):
        prepare_qat_fx(model, {"": qconfig()})


def test_v1_rescales_to_sixteenths() -> None:
    set_march(March.BERNOULLI2)
    data, anchors = _v1_data()
    for scale, dtype in ((1 / 16, "qint8"), (0.013, "qint8"), (2e-4, "qint16")):
        storage = torch.int8 if dtype == "qint8" else torch.int16
        info = torch.iinfo(storage)
        integers = [(x / scale).round().clamp(info.min, info.max) for x in data]
        quantized = [QTensor(q.to(storage), scale, dtype) for q in integers]
        rounded = [((q.double() * scale * 16) + 0.5).floor().clamp(-128, 127).float() / 16 for q in integers]
        for a, b in zip(as_numbers(_v1()(quantized, anchors)), as_numbers(_v1()(rounded, anchors)), strict=True):
            assert torch.equal(a, b)


def test_anchors_that_are_buffers_stay_as_they_are() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.head = QuantStub(), nn.Conv2d(3, 10, 1)
            self.post = _v1(class_offsets=[0], num_classes=1)
            self.register_buffer("anchors", torch.rand(1, 8, 4, 4) * 1000)

        def forward(self, x: Tensor) -> Any:
            return self.post([self.head(self.quant(x))], [self.anchors])

    set_march(March.BERNOULLI2)
    qat = calibrate(prepare_qat_fx(Net().eval(), {"": qconfig()}), (torch.randn(1, 3, 4, 4),))
    assert not [name for name, _ in qat.named_modules() if "_generated_quant" in name]


@pytest.mark.parametrize("post", [hnn.DetectionPostProcess(), hnn.RcnnPostProcess()], ids=lambda m: type(m).__name__)
def test_float_post_processing_asks_for_a_stub(post: nn.Module) -> None:
    q = QTensor(torch.zeros(1, 8, 2, 2), 1.0, "qint8")
    with pytest.raises(OperatorInputError, match=f"`{type(post).__name__}`.* computes in float.*put a DeQuantStub"):
        post([torch.zeros(8, 4)], [q], [q])


class Filtering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv, self.data = QuantStub(), nn.Conv2d(3, 4, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.quant(x)
        return filter(self.conv(x), self.data(x), threshold=0.4)


def test_filter_is_a_model_output_without_a_stub(tmp_path: Any) -> None:
    x = torch.randn(2, 3, 5, 7)
    qat = calibrate(prepare_qat_fx(Filtering().eval(), {"": qconfig()}), (x,))
    nothing, everything = torch.full_like(x, -100.0), torch.full_like(x, 100.0)
    assert len({len(qat(batch)[0][0]) for batch in (x, nothing, everything)}) > 1
    quantized = assert_one_arithmetic(qat, (x,), tmp_path, [(nothing,), (everything,)])
    found = quantized(x)
    assert all(type(t) is Tensor for image in found for t in image) and len(found[0][0]) > 0


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Any:
        scores = self.conv(self.quant(x))
        return torch.argmax(scores, 1), rle(torch.argmax(scores, 1)), rle(scores)


@pytest.mark.parametrize("opset", [13, 17, 20])
def test_classes_and_runs_are_model_outputs_without_a_stub(opset: int, tmp_path: Any) -> None:
    x = torch.randn(2, 3, 5, 7)
    quantized = convert_fx(calibrate(prepare_qat_fx(Segmenter().eval(), {"": qconfig()}), (x,)))
    model = export_quantized_onnx(quantized, x, tmp_path / "model.onnx", opset_version=opset)
    for batch in (x, torch.zeros_like(x), torch.randn_like(x)):
        for optimization in OPTIMIZATION:
            assert mismatches(run_onnx(model, (batch,), optimization), as_numbers(quantized(batch))) == 0
    shapes = [[d.dim_value for d in o.type.tensor_type.shape.dim] for o in model.graph.output]
    assert shapes == [[2, 5, 7], [0], [0], [0], [0]]  # the number of runs is open


def test_every_float_operator_of_the_table_is_here() -> None:
    tested = [
        hnn.BgrToYuv444, hnn.AnchorGenerator, hnn.DetectionPostProcess, hnn.DetectionPostProcessV1, hnn.RcnnPostProcess
    ]  # fmt: skip
    functions = [filter, nms, point_pillars_preprocess, decode_boxes, max_iou_match, functional.box3d_iou]
    found = [row_of_module(cls) for cls in tested] + [row_of_function(f)[0] for f in functions]  # type: ignore[index]
    assert {row.name for row in rows() if row.is_real} == {row.name for row in found if row is not None}


def _two_levels(**changes: Any) -> hnn.DetectionPostProcessV1:
    arguments = {"class_offsets": [0, 0], "use_clippings": False, "image_size": (64, 64)}
    return hnn.DetectionPostProcessV1(
        **{"num_classes": 3, "box_filter_threshold": -9.0, **arguments, **changes},
        nms_threshold=0.5, pre_nms_top_k=10, post_nms_top_k=10,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(1, 8, 4, 4), (1, 8, 4, 2)], r"level 1.*\(1, 14, 2, 4\).*16 anchors of 7"),  # as many, on another map
        ([(1, 8, 2, 4), (1, 8, 4, 4)], "level 0.*32 anchors of 7 numbers.* are 16"),  # as many in sum, on other levels
        ([(2, 8, 4, 4), (1, 8, 2, 4)], "level 0.*same images or one set for all"),
        ([(1, 9, 4, 4), (1, 8, 2, 4)], r"anchors of shape \(1, 9, 4, 4\): an anchor has 4 numbers"),
    ],
)
def test_v1_takes_only_anchors_of_its_predictions(shapes: list[tuple[int, ...]], message: str) -> None:
    data = [torch.rand(1, 14, 4, 4), torch.rand(1, 14, 2, 4)]
    with pytest.raises(ValueError, match=message):
        _two_levels()(data, [torch.rand(shape) for shape in shapes])


def test_v1_names_a_wrong_number_of_classes() -> None:
    data, anchors = [torch.rand(1, 14, 4, 4)] * 2, [torch.rand(1, 8, 4, 4)] * 2
    assert len(_two_levels()(data, anchors)) == 1
    with pytest.raises(ValueError, match=r"data of shape \(1, 14, 4, 4\): an anchor has 8 numbers"):
        _two_levels(num_classes=4)(data, anchors)


@pytest.mark.parametrize(
    ("scores", "regressions", "arguments", "message"),
    [
        ([(1, 6, 4, 4)], [(1, 9, 4, 4)], {}, r"regressions of shape \(1, 9, 4, 4\): an anchor has 4 numbers"),
        ([(1, 7, 4, 4)], [(1, 8, 4, 4)], {}, r"scores of shape \(1, 7, 4, 4\)"),
        ([(1, 6, 2, 8)], [(1, 8, 4, 4)], {}, "both must have the same anchors"),
        ([(1, 31, 3)], [(1, 8, 4, 4)], {}, "both must have the same anchors"),
        ([(1, 6, 4, 4)] * 2, [(1, 8, 4, 4)], {}, "scores of 2 levels and regressions of 1"),
        ([(1, 6, 4, 4)], [(1, 8, 4, 4)], {"background_class_idx": 3}, "background_class_idx=3.*3 classes"),
        ([(1, 6, 4, 4)], [(1, 8, 4, 4)], {"background_class_idx": 2, "mode": "yolo"}, "2 classes"),
    ],
)
def test_predictions_that_do_not_fit_are_named(scores: Any, regressions: Any, arguments: Any, message: str) -> None:
    maps = [[torch.rand(s) for s in shapes] for shapes in (scores, regressions)]
    with pytest.raises(ValueError, match=message):
        hnn.DetectionPostProcess(**arguments)([torch.rand(1, 8, 4, 4)], *maps)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"idxs of shape \(2,\) for 3 boxes"):
        batched_nms(torch.rand(3, 4), torch.rand(3), torch.zeros(2), 0.5)
    for idx_range in ((2, 2), (3, 1), (0, 6), (-1, 2)):
        with pytest.raises(OperatorInputError, match="idx_range.*which has 5"):
            filter(torch.rand(1, 5, 2, 2), threshold=0.5, idx_range=idx_range)
    for function in (functional.rgb2bgr, functional.bgr2rgb):
        with pytest.raises(OperatorInputError, match=r"\[N, 3, H, W\], got \(1, 4, 2, 2\)"):
            function(torch.rand(1, 4, 2, 2))
