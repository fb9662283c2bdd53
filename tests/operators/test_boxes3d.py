"""Upright boxes in space: known cases, properties, and points thrown at random."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch import box3d_iou, box3d_iou_bev, box3d_overlap_bev, functional, nms3d
from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.qtensor import QTensor

BOX = torch.tensor([[1.0, 2, 3, 4, 2, 6, 0.3]])
FUNCTIONS = [box3d_iou, box3d_iou_bev, box3d_overlap_bev]

place, size, angle = st.floats(-3, 3), st.floats(0.2, 4), st.floats(-4, 4)
boxes = st.lists(st.tuples(place, place, place, size, size, size, angle), min_size=1, max_size=4)


def moved(box: Tensor, **changes: float) -> Tensor:
    out = box.clone()
    for name, value in changes.items():
        out[:, ["x", "y", "z", "dx", "dy", "dz", "yaw"].index(name)] += value
    return out


def test_known_cases() -> None:
    assert float(box3d_overlap_bev(BOX, BOX)) == pytest.approx(8)
    assert float(box3d_iou(BOX, BOX)) == pytest.approx(1) and float(box3d_iou_bev(BOX, BOX)) == pytest.approx(1)
    raised = moved(BOX, z=3)  # by half of its height
    assert float(box3d_iou_bev(BOX, raised)) == pytest.approx(1) and float(box3d_iou(BOX, raised)) == pytest.approx(
        1 / 3
    )
    along = moved(BOX, x=2 * math.cos(0.3), y=2 * math.sin(0.3))  # by half of its length, along its own axis
    assert float(box3d_overlap_bev(BOX, along)) == pytest.approx(4)
    assert float(box3d_iou(BOX, along)) == pytest.approx(1 / 3)
    across = moved(BOX, yaw=math.pi / 2)
    assert float(box3d_overlap_bev(BOX, across)) == pytest.approx(4)
    assert float(box3d_iou(BOX, across)) == pytest.approx(1 / 3)
    square, diamond = torch.tensor([[0.0, 0, 0, 2, 2, 1, 0]]), torch.tensor([[0.0, 0, 0, 2, 2, 1, math.pi / 4]])
    assert float(box3d_overlap_bev(square, diamond)) == pytest.approx(8 * (math.sqrt(2) - 1))
    above = moved(BOX, z=6)  # it stands on top
    assert float(box3d_iou(BOX, above)) == 0 and float(box3d_iou_bev(BOX, above)) == pytest.approx(1)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(boxes, boxes, st.floats(-3, 3), angle)
def test_overlaps_are_symmetric_and_move_with_their_boxes(a: Any, b: Any, shift: float, turn: float) -> None:
    first, second = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    for function in FUNCTIONS:
        found = function(first, second)
        assert found.shape == (len(a), len(b)) and found.dtype is torch.float64
        assert torch.allclose(found, function(second, first).T, atol=1e-9)
        rotation = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]).double()
        others = []
        for box in (first, second):
            other = box.clone()
            other[:, :2] = box[:, :2] @ rotation.T + shift
            other[:, 2] += shift
            other[:, 6] += turn
            others.append(other)
        assert torch.allclose(function(*others), found, atol=1e-6)
    flat = box3d_overlap_bev(first, second)
    areas = (first[:, 3] * first[:, 4])[:, None], (second[:, 3] * second[:, 4])[None]
    assert bool((flat <= torch.minimum(*areas) + 1e-9).all()) and bool((flat >= 0).all())
    assert torch.allclose(box3d_iou_bev(first, second), flat / (areas[0] + areas[1] - flat), atol=1e-9)
    assert bool((box3d_iou(first, second) <= 1 + 1e-9).all())


def _is_inside(points: Tensor, box: Tensor) -> Tensor:
    cos, sin = math.cos(float(box[6])), math.sin(float(box[6]))
    x, y, z = (points - box[:3]).unbind(1)
    own = torch.stack([x * cos + y * sin, y * cos - x * sin, z], 1)
    return (own.abs() <= box[3:6] / 2).all(1)


@pytest.mark.parametrize("seed", range(4))
def test_volumes_are_those_of_points_thrown_at_random(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.cat([torch.rand(3, 3, generator=generator), torch.rand(3, 3, generator=generator) * 3 + 1,
                   torch.rand(3, 1, generator=generator) * 6], 1)  # fmt: skip
    b = torch.cat([torch.rand(2, 3, generator=generator), torch.rand(2, 3, generator=generator) * 3 + 1,
                   torch.rand(2, 1, generator=generator) * 6], 1)  # fmt: skip
    points = torch.rand(200_000, 3, generator=generator) * 8 - 3.5
    inside_a, inside_b = ([_is_inside(points, box) for box in x] for x in (a, b))
    found = box3d_iou(a, b)
    for i, first in enumerate(inside_a):
        for j, second in enumerate(inside_b):
            expected = float((first & second).sum()) / float((first | second).sum())
            assert float(found[i, j]) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_have_the_type_of_the_boxes_and_inside_nothing_is_lost(dtype: torch.dtype) -> None:
    a, b = BOX.to(dtype), moved(BOX, x=0.5, yaw=0.25).to(dtype)
    for function in FUNCTIONS:
        exact = function(a.double(), b.double())
        assert function(a, b).dtype is dtype and torch.equal(function(a, b), exact.to(dtype))
    assert function(a, b.double()).dtype is torch.float64
    assert nms3d(torch.cat([a, a, b]), torch.tensor([0.5, 0.7, 0.6], dtype=dtype), 0.99).tolist() == [1, 2]


def test_no_boxes_and_boxes_without_size() -> None:
    none = torch.zeros(0, 7)
    for function in FUNCTIONS:
        assert function(none, BOX).shape == (0, 1) and function(BOX, none).shape == (1, 0)
        assert function(none, none).shape == (0, 0)
        assert function(torch.zeros(2, 7), torch.zeros(1, 7)).tolist() == [[0.0], [0.0]]
        assert function(BOX, torch.zeros(1, 7)).tolist() == [[0.0]]
    assert nms3d(none, torch.zeros(0), 0.5).tolist() == []
    assert nms3d(torch.zeros(2, 7), torch.zeros(2), 0.5).tolist() == [0, 1]


def test_further_numbers_of_a_box_do_not_count() -> None:
    fast = torch.cat([BOX, torch.full((1, 2), 99.0)], 1)
    assert torch.equal(box3d_iou(fast, BOX), box3d_iou(BOX, BOX))
    assert nms3d(torch.cat([fast, fast]), torch.tensor([1, 2]), 0.5).tolist() == [1]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(place, place, place, size, size, size, angle), max_size=12), st.sampled_from([0.0, 0.1, 0.5]))
def test_suppression_is_that_of_a_plain_loop(items: Any, threshold: float) -> None:
    found = torch.tensor(items).reshape(-1, 7)
    scores = torch.tensor([(7 * i % 5) / 5 for i in range(len(items))])
    kept: list[int] = []
    for i in sorted(range(len(items)), key=lambda i: (-float(scores[i]), i)):
        if all(float(box3d_iou_bev(found[j : j + 1].double(), found[i : i + 1].double())) <= threshold for j in kept):
            kept.append(i)
    assert nms3d(found, scores, threshold).tolist() == kept


@pytest.mark.slow
def test_many_boxes_at_one_place_need_little_memory() -> None:
    many = BOX.repeat(300, 1) + torch.rand(300, 7, generator=torch.Generator().manual_seed(0)) * 0.1
    found = box3d_iou(many, many)
    assert torch.allclose(found.diagonal(), torch.ones(300)) and float(found.min()) > 0.5
    assert len(nms3d(many, torch.rand(300, generator=torch.Generator().manual_seed(1)), 0.3)) == 1


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_are_no_boxes_is_refused(function: Any) -> None:
    with pytest.raises(OperatorInputError, match=r"yaw; got shape \(3, 5\)"):
        function(torch.zeros(3, 5), BOX)
    with pytest.raises(OperatorInputError, match=r"yaw; got shape \(7,\)"):
        function(BOX, BOX[0])
    with pytest.raises(OperatorInputError, match="DeQuantStub"):
        function(QTensor(torch.zeros(1, 7), 1.0, "qint8"), BOX)


def test_scores_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OperatorInputError, match="one score for each box"):
        nms3d(BOX, torch.zeros(2), 0.5)


def test_they_have_no_gradient_and_both_paths() -> None:
    trained = BOX.clone().requires_grad_()
    assert all(not function(trained, trained).requires_grad for function in FUNCTIONS)
    for name in ("box3d_iou", "box3d_iou_bev", "box3d_overlap_bev", "nms3d"):
        assert getattr(horizon, name) is getattr(functional, name)
