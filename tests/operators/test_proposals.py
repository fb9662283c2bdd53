"""The best boxes, and decoding by itself: values, options, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn import boxes as geometry
from horizon_plugin_pytorch.nn.functional import decode, get_top_n
from horizon_plugin_pytorch.qtensor import QTensor


def _data(count: int = 12, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    corner = torch.rand(count, 2, generator=generator) * 20
    anchors = torch.cat([corner, corner + torch.rand(count, 2, generator=generator) * 9 + 1], 1)
    scores = torch.rand(count, classes, generator=generator)
    return anchors, scores, torch.randn(count, 4, generator=generator) * 0.3


def test_the_best_are_found_with_all_that_belongs_to_them() -> None:
    anchors, scores, moves = _data()
    found = get_top_n(anchors, scores, moves, 5)
    order = scores.amax(1).argsort(descending=True)[:5]
    for mine, of in zip(found, (anchors, scores, moves), strict=True):
        assert torch.equal(mine, of[order])
    classes = torch.arange(12)
    assert get_top_n(anchors, scores[:, 0], classes, None)[2].tolist() == scores[:, 0].argsort(descending=True).tolist()
    ties = get_top_n(anchors, torch.tensor([1.0, 2.0, 2.0] * 4), classes, 3)[2]
    assert ties.tolist() == [1, 2, 4]
    assert get_top_n(anchors, torch.full((12,), torch.nan), classes, 2)[2].tolist() == [0, 1]
    assert [len(x) for x in get_top_n(anchors, scores, moves, 99)] == [12] * 3
    assert [len(x) for x in get_top_n(anchors, scores, moves, 0)] == [0] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_no_boxes(dtype: torch.dtype) -> None:
    anchors, scores, moves = (
        torch.zeros(0, 4, dtype=dtype),
        torch.zeros(0, 3, dtype=dtype),
        torch.zeros(0, 4, dtype=dtype),
    )
    assert [x.shape for x in get_top_n(anchors, scores, moves, 5)] == [(0, 4), (0, 3), (0, 4)]
    found = decode(anchors, scores, moves, clip_size=(4, 4), size_threshold=1, background_class_idx=0)
    assert [x.shape for x in found] == [(0, 4), (0,), (0,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("background", [None, 0, 2, -1])
@pytest.mark.parametrize("scale", [None, 0.5, (0.1, 0.1, 0.2, 0.2)])
@pytest.mark.parametrize("absolute", [False, True])
def test_decoding_is_that_of_a_plain_loop(dtype: torch.dtype, background: Any, scale: Any, absolute: bool) -> None:
    anchors, scores, moves = (x.to(dtype) for x in _data())
    found = decode(
        anchors, scores, moves, regression_scale=scale, background_class_idx=background, clip_size=(15, 18),
        size_threshold=2, abs_offset=absolute,
    )  # fmt: skip
    expected = []
    for anchor, score, move in zip(anchors, scores, moves, strict=True):
        classes = [k for k in range(3) if background is None or k != background % 3]
        best = max(classes, key=lambda k: float(score[k]))
        scaled = move if scale is None else move * torch.as_tensor(scale, dtype=dtype)
        box = geometry.clip(geometry.decode(anchor, scaled, absolute), (15, 18))
        if min(box[2] - box[0], box[3] - box[1]) >= 2:
            expected.append((box, score[best], best))
    assert torch.allclose(found[0], torch.stack([box for box, _, _ in expected])) and found[0].dtype is dtype
    assert torch.equal(found[1], torch.stack([score for _, score, _ in expected]))
    assert found[2].tolist() == [k for _, _, k in expected]


def test_regressions_of_each_class_are_those_of_the_best() -> None:
    anchors, scores, _ = _data()
    moves = torch.randn(12, 12, generator=torch.Generator().manual_seed(3)) * 0.2
    found, _, classes = decode(anchors, scores, moves)
    own = torch.stack([moves[i, 4 * k : 4 * k + 4] for i, k in enumerate(classes.tolist())])
    assert torch.equal(found, geometry.decode(anchors, own))


def test_scores_of_one_class() -> None:
    anchors, scores, moves = _data(classes=1)
    for given in (scores, scores[:, 0]):
        _, best, classes = decode(anchors, given, moves)
        assert torch.equal(best, scores[:, 0]) and classes.tolist() == [0] * 12


def test_the_steps_are_those_of_the_module() -> None:
    anchors, scores, moves = _data(30, 1)
    module = hnn.DetectionPostProcess(image_size=(20, 20), pre_decode_top_n=10, size_threshold=3, score_threshold=-1)
    boxes, values, _ = (x[0] for x in module([anchors], [scores[None]], [moves[None]]))
    found = decode(*get_top_n(anchors, scores, moves, 10), clip_size=(20, 20), size_threshold=3)
    assert torch.allclose(boxes, found[0]) and torch.equal(values, found[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, s, m: get_top_n(5, s, m, a), "boxes int"),
        (lambda a, s, m: get_top_n(s, a, m, 5), r"boxes \[n, 4\] first; got boxes \(12, 3\)"),
        (lambda a, s, m: get_top_n(a, s, m, 5.0), "number of boxes last.*5.0"),
        (lambda a, s, m: get_top_n(a, s, m, -1), "number of boxes last"),
        (lambda a, s, m: get_top_n(a, s[:5], m, 5), "a row for each box"),
        (lambda a, s, m: decode(a[None], s[None], m[None]), "of one image"),
        (lambda a, s, m: decode(a, s[:, :0], m), r"classes\], got \(12, 0\)"),
        (lambda a, s, m: decode(a, s, s), r"\[n, 12\], got \(12, 3\)"),
        (lambda a, s, m: decode(a, s, m, background_class_idx=3), "background_class_idx=3 of 3"),
        (lambda a, s, m: decode(a, s[:, :1], m, background_class_idx=0), "background_class_idx=0 of 1"),
        (lambda a, s, m: decode(QTensor(a, 1.0, "qint8"), s, m), "DeQuantStub"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Any, message: str) -> None:
    with pytest.raises(OperatorInputError, match=message):
        call(*_data())
