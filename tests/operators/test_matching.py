"""Boxes matched to ground truth and to regions to ignore: against plain loops, and where there is nothing to match."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn.functional import ig_region_match, max_iou_match
from horizon_plugin_pytorch.qtensor import QTensor

# Few coordinates make equal overlaps, and overlaps equal to thresholds.
box = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 5), st.integers(0, 5))
some = st.lists(box, min_size=1, max_size=7)


def _boxes(items: Any) -> Tensor:
    return torch.tensor([[x, y, x + w, y + h] for x, y, w, h in items], dtype=torch.float32).reshape(-1, 4)


def _share(a: list[float], b: list[float], legacy: bool, of_box: bool = False) -> float:
    one = 1 if legacy else 0
    width = min(a[2], b[2]) - max(a[0], b[0]) + one
    height = min(a[3], b[3]) - max(a[1], b[1]) + one
    shared = max(width, 0) * max(height, 0)
    area = [(box[2] - box[0] + one) * (box[3] - box[1] + one) for box in (a, b)]
    whole = area[0] if of_box else area[0] + area[1] - shared
    return shared / whole if whole > 0 else 0.0


def _matched(boxes: Any, truth: Any, pos: float, neg: float, low: float | None, legacy: bool) -> list[tuple[int, int]]:
    shares = [[_share(a, b, legacy) for b in truth] for a in boxes]
    found = []
    for row in shares:
        best = max(row, default=0.0)
        if row and best >= pos:
            found.append((1, row.index(best)))
        else:
            found.append((0 if best < neg or not truth else -1, -1))  # without ground truth all are negative
    taken = {which for flag, which in found if flag == 1}
    claims: dict[int, tuple[float, int]] = {}
    for j in range(len(truth)) if low is not None else ():
        best = max(row[j] for row in shares)
        if j in taken or best < low or best == 0:
            continue
        for i, row in enumerate(shares):
            if row[j] == best and best > claims.get(i, (-1.0, -1))[0]:
                claims[i] = (best, j)
    return [(1, claims[i][1]) if i in claims else match for i, match in enumerate(found)]


@settings(deadline=None)
@given(
    some,
    st.lists(box, max_size=4),
    st.sampled_from([(0.7, 0.3), (0.5, 0.5), (1.0, 0.0)]),
    st.sampled_from([None, 0.0, 0.3]),
    st.booleans(),
)
def test_matching_is_that_of_a_plain_loop(items: Any, truth: Any, limits: Any, low: float | None, legacy: bool) -> None:
    boxes, real = _boxes(items).double(), _boxes(truth).double()
    padded = torch.cat([torch.cat([real, torch.ones(len(real), 1)], 1), torch.full((3, 5), torch.nan)]).unsqueeze(0)
    settings = (*limits, low is not None, 0.3 if low is None else low, legacy)
    flags, matched = max_iou_match(boxes, padded.double(), torch.tensor([len(real)]), *settings)
    expected = _matched(boxes.tolist(), real.tolist(), *limits, low, legacy)
    assert list(zip(flags[0].tolist(), matched[0].tolist(), strict=True)) == expected


def test_images_of_a_batch_are_matched_by_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(3, 20, 2, generator=generator) * 10
    boxes = torch.cat([corner, corner + torch.rand(3, 20, 2, generator=generator) * 5 + 1], 2)
    truth = torch.cat([boxes[:, ::4] + 0.3, torch.ones(3, 5, 1)], 2)
    counts = torch.tensor([5, 0, 2])
    flags, matched = max_iou_match(boxes, truth, counts, 0.5, 0.4)
    for n in range(3):
        one = max_iou_match(boxes[n], truth[n : n + 1], counts[n : n + 1], 0.5, 0.4)
        assert torch.equal(flags[n], one[0][0]) and torch.equal(matched[n], one[1][0])
    assert flags[1].tolist() == [0] * 20 and matched[1].tolist() == [-1] * 20
    shared = max_iou_match(boxes[0], truth, counts, 0.5, 0.4)
    assert shared[0].shape == (3, 20) and torch.equal(shared[0][0], flags[0])


def test_every_truth_without_a_box_takes_its_best() -> None:
    boxes, truth = _boxes([(0, 0, 4, 4), (0, 0, 4, 4), (6, 6, 2, 2)]), torch.tensor([[[0.0, 0, 4, 8], [9, 9, 9, 9]]])
    counts = torch.tensor([2])
    flags, matched = max_iou_match(boxes, truth, counts, 0.9, 0.3)
    assert flags.tolist() == [[1, 1, 0]] and matched.tolist() == [[0, 0, -1]]  # both are equally good
    flags, matched = max_iou_match(boxes, truth, counts, 0.9, 0.3, True, 0.6)
    assert flags.tolist() == [[-1, -1, 0]] and matched.tolist() == [[-1, -1, -1]]
    assert max_iou_match(boxes, truth, counts, 0.9, 0.3, False)[0].tolist() == [[-1, -1, 0]]


@settings(deadline=None)
@given(some, st.lists(st.tuples(box, st.integers(-1, 3)), max_size=4), st.sampled_from([0.0, 0.5]), st.booleans())
def test_regions_are_those_of_a_plain_loop(items: Any, regions: Any, overlap: float, legacy: bool) -> None:
    boxes = _boxes(items).double()
    real = torch.cat([_boxes([r for r, _ in regions]), torch.tensor([float(k) for _, k in regions]).reshape(-1, 1)], 1)
    padded = torch.cat([real, torch.full((2, 5), torch.nan)]).unsqueeze(0).double()
    flags = ig_region_match(boxes, padded, torch.tensor([len(regions)]), 3, overlap, legacy)
    assert flags.shape == (1, 3, len(items)) and flags.dtype is torch.int64
    for k in range(3):
        for i, own in enumerate(boxes.tolist()):
            inside = [_share(own, r[:4], legacy, of_box=True) > overlap for r in real.tolist() if r[4] == k]
            assert int(flags[0, k, i]) == int(any(inside))


def test_all_boxes_are_ignored_and_none() -> None:
    boxes, everywhere = _boxes([(1, 1, 2, 2), (3, 3, 1, 1)]), torch.tensor([[[0.0, 0, 99, 99, 1]]])
    assert ig_region_match(boxes, everywhere, torch.tensor([1]), 2, 0.9).tolist() == [[[0, 0], [1, 1]]]
    assert not ig_region_match(boxes, everywhere, torch.tensor([0]), 2, 0.9).any()
    assert ig_region_match(boxes, torch.zeros(2, 0, 5), torch.tensor([0, 0]), 2, 0.9).shape == (2, 2, 2)
    assert ig_region_match(torch.zeros(0, 4), everywhere, torch.tensor([1]), 2, 0.9).shape == (1, 2, 0)
    assert ig_region_match(boxes, torch.zeros(0, 0, 5), torch.zeros(0), 2, 0.9).shape == (0, 2, 2)


def test_no_boxes_no_truth_no_images() -> None:
    boxes, truth = _boxes([(1, 1, 2, 2)]), torch.zeros(1, 3, 5)
    for own, others, counts, shape in (
        (boxes, truth, [0], (1, 1)),
        (boxes, torch.zeros(1, 0, 5), [0], (1, 1)),
        (torch.zeros(0, 4), truth, [3], (1, 0)),
        (boxes, torch.zeros(0, 3, 5), [], (0, 1)),
    ):
        flags, matched = max_iou_match(own, others, torch.tensor(counts, dtype=torch.int64), 0.5, 0.4)
        assert flags.shape == matched.shape == shape and not flags.any() and bool((matched == -1).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_every_type_is_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    boxes, truth = _boxes([(200, 300, 100, 200), (0, 0, 50, 50)]), torch.tensor([[[204.0, 304, 300, 500, 1]]])
    found = [max_iou_match(boxes.to(t), truth.to(t), torch.tensor([1]), 0.9, 0.5) for t in (dtype, torch.float64)]
    assert torch.equal(found[0][0], found[1][0]) and found[0][0].tolist() == [[1, 0]]
    assert ig_region_match(boxes.to(dtype), truth.to(dtype), torch.tensor([1]), 2, 0.9).tolist() == [[[0, 0], [1, 0]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 5), torch.zeros(1, 2, 5), torch.tensor([1]), 0.5, 0.4), r"boxes \[n, 4\]"),
        ((torch.zeros(3, 4), torch.zeros(2, 5), torch.tensor([1]), 0.5, 0.4), r"got \(2, 5\)"),
        ((torch.zeros(3, 4), torch.zeros(1, 2, 5), torch.tensor([3]), 0.5, 0.4), r"\[3\] of 2 boxes"),
        ((torch.zeros(2, 3, 4), torch.zeros(1, 2, 5), torch.tensor([1]), 0.5, 0.4), "2 images and ground truth of 1"),
        ((torch.zeros(3, 4), torch.zeros(1, 2, 5), 1, 0.5, 0.4), "tensors second and third"),
        ((torch.zeros(3, 4), torch.zeros(1, 2, 5), torch.tensor([1]), 0.4, 0.5), "greater than pos_iou"),
        ((torch.zeros(3, 4), torch.zeros(1, 2, 5), torch.tensor([1]), 0.5, True), "neg_iou is a number"),
        ((torch.zeros(3, 4), torch.zeros(1, 2, 5), torch.tensor([1]), 0.5, 0.4, 0.3), "True or False"),
        ((torch.zeros(3, 4), torch.zeros(1, 2, 5), torch.tensor([1]), 0.5, 0.4, True, False), "a number, got False"),
        ((QTensor(torch.zeros(1, 4), 1.0, "qint8"), torch.zeros(1, 2, 5), torch.tensor([1]), 0.5, 0.4), "DeQuantStub"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(OperatorInputError, match=message):
        max_iou_match(*arguments)


def test_regions_that_do_not_fit_are_refused() -> None:
    arguments = (torch.zeros(3, 4), torch.zeros(1, 2, 5), torch.tensor([1]))
    with pytest.raises(OperatorInputError, match="num_classes is a whole number, got 0.5"):
        ig_region_match(*arguments, 0.5, 2)
    with pytest.raises(OperatorInputError, match=r"5 or more\] second"):
        ig_region_match(torch.zeros(3, 4), torch.zeros(1, 2, 4), torch.tensor([1]), 2, 0.5)
