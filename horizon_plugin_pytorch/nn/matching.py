"""Boxes matched to ground truth, which says what each is trained for.

No document defines these functions. Names are those of public code; meaning and arguments are those of matchers in
detection training.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn.boxes import require_real
from horizon_plugin_pytorch.nn.input_checks import refused_input
from horizon_plugin_pytorch.runtime.leaf import own_leaf


def _shares(boxes: Tensor, others: Tensor, legacy_bbox: bool, of_box: bool) -> Tensor:
    """Intersection over union ``[n, m]``, or over the first box's area; 0 where there is no area.

    Args:
        legacy_bbox: right and bottom are the last pixels inside, so that a side is one longer.
    """
    one = float(legacy_bbox)
    (left_a, top_a, right_a, bottom_a), (left_b, top_b, right_b, bottom_b) = boxes.T[..., None], others.T[:, None]
    shared = torch.minimum(right_a, right_b).sub_(torch.maximum(left_a, left_b)).add_(one).clamp_(min=0)
    shared.mul_(torch.minimum(bottom_a, bottom_b).sub_(torch.maximum(top_a, top_b)).add_(one).clamp_(min=0))
    own = (right_a - left_a + one).clamp(min=0) * (bottom_a - top_a + one).clamp(min=0)
    if of_box:
        whole = own.expand_as(shared)
    else:
        whole = (own + (right_b - left_b + one).clamp(min=0) * (bottom_b - top_b + one).clamp(min=0)).sub_(shared)
    return shared.div_(whole).nan_to_num_(0.0)  # 0 / 0 where there is no area


def _checked(who: str, boxes: Any, others: Any, counts: Any, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes ``[B, n, 4]``, others ``[B, m, columns or more]``, and how many of these are real; in float32 at least."""
    require_real(who, boxes, others)
    tensors = [x for x in (boxes, others, counts) if isinstance(x, Tensor)]
    if len(tensors) < 3 or boxes.dim() not in (2, 3) or boxes.shape[-1] != 4:
        raise OperatorInputError(f"`{who}` takes boxes [n, 4] or [B, n, 4] first, and tensors second and third.")
    if others.dim() != 3 or others.shape[2] < columns or counts.shape != others.shape[:1]:
        raise OperatorInputError(
            f"`{who}` takes boxes [B, m, {columns} or more] second and their numbers [B] third, got "
            f"{tuple(others.shape)} and {tuple(counts.shape)}."
        )
    if boxes.dim() == 3 and len(boxes) != len(others):
        raise OperatorInputError(
            f"`{who}`: boxes of {len(boxes)} images and ground truth of {len(others)}; boxes [n, 4] are for all images."
        )
    if counts.is_floating_point() and not torch.equal(counts, counts.round()):
        raise refused_input(
            who, "whole numbers of boxes", "Count the boxes of each image.", numbers=str(counts.tolist())
        )
    if counts.numel() and not 0 <= int(counts.min()) <= int(counts.max()) <= others.shape[1]:
        raise OperatorInputError(f"`{who}`: {counts.tolist()} of {others.shape[1]} boxes are said to be real.")
    dtype = torch.promote_types(torch.promote_types(boxes.dtype, others.dtype), torch.float32)  # half has few digits
    boxes, others = boxes.detach().to(dtype), others.detach().to(dtype)
    return boxes.expand(len(others), *boxes.shape[-2:]), others, counts.to(boxes.device).long()


def _require(who: str, **settings: tuple[Any, type]) -> None:
    for name, (value, kind) in settings.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not (isinstance(value, bool) if kind is bool else is_number and (kind is float or isinstance(value, int))):
            meaning = {bool: "True or False", float: "a number", int: "a whole number"}[kind]
            raise OperatorInputError(f"`{who}`: {name} is {meaning}, got {value!r}.")


@own_leaf
def max_iou_match(
    boxes: Tensor,
    gt_boxes: Tensor,
    gt_boxes_num: Tensor,
    pos_iou: float,
    neg_iou: float,
    allow_low_quality_match: bool = True,
    low_quality_match_iou: float = 0.3,
    legacy_bbox: bool = False,
) -> tuple[Tensor, Tensor]:
    """Match each box to the ground truth with which it overlaps most.

    Args:
        boxes: ``[B, n, 4]``, or ``[n, 4]`` for all images: left, top, right, bottom.
        gt_boxes: ground truth ``[B, m, 4 or more]``, padded with anything.
        gt_boxes_num: ``[B]``, how many of an image's are real; the first ones.
        pos_iou: from this intersection over union on, a box is positive.
        neg_iou: below this it is negative, as are all boxes of an image without ground truth; between the two it is
            ignored.
        allow_low_quality_match: a ground truth that no box is matched to takes its best box, or several if equal.
        low_quality_match_iou: with at least this intersection over union.
        legacy_bbox: right and bottom are the last pixels inside: sides are one longer.

    Returns:
        flags: ``[B, n]`` (int64): 1 positive, 0 negative, -1 ignored.
        matched: ``[B, n]`` (int64), the position of its ground truth for each positive box, -1 for the others.

    >>> boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 6], [0, 0, 4, 9], [9, 9, 10, 10]])
    >>> truth = torch.tensor([[[0.0, 0, 4, 4, 1], [0, 0, 0, 0, 0]]])
    >>> max_iou_match(boxes, truth, torch.tensor([1]), 0.7, 0.5)
    (tensor([[ 1, -1,  0,  0]]), tensor([[ 0, -1, -1, -1]]))
    """
    _require(
        "max_iou_match", pos_iou=(pos_iou, float), neg_iou=(neg_iou, float), legacy_bbox=(legacy_bbox, bool),
        allow_low_quality_match=(allow_low_quality_match, bool), low_quality_match_iou=(low_quality_match_iou, float),
    )  # fmt: skip
    if neg_iou > pos_iou:
        raise OperatorInputError(f"`max_iou_match`: neg_iou {neg_iou} is greater than pos_iou {pos_iou}.")
    boxes, gt_boxes, counts = _checked("max_iou_match", boxes, gt_boxes, gt_boxes_num, 4)
    low = low_quality_match_iou if allow_low_quality_match else None
    flags = counts.new_zeros(boxes.shape[:2])
    matched = torch.full_like(flags, -1)
    for image, count in enumerate(counts.tolist()):
        if count and boxes.shape[1]:
            truth = gt_boxes[image, :count, :4]
            flags[image], matched[image] = _match(boxes[image], truth, pos_iou, neg_iou, low, legacy_bbox)
    return flags, matched


def _match(
    boxes: Tensor, truth: Tensor, pos_iou: float, neg_iou: float, low: float | None, legacy_bbox: bool
) -> tuple[Tensor, Tensor]:
    """Flags and matches of the boxes of one image; `low` is None without matches of low quality."""
    shares = _shares(boxes, truth, legacy_bbox, of_box=False)
    best, which = shares.max(1)
    flags = torch.where(best >= pos_iou, 1, torch.where(best < neg_iou, 0, -1))
    if low is not None:
        is_left = torch.ones(len(truth), dtype=torch.bool, device=boxes.device)
        is_left[which[flags == 1]] = False
        most = shares.amax(0)
        is_left &= (most >= low) & (most > 0)
        claims = torch.where(is_left & (shares == most), shares, -1.0)
        claimed, by = claims.max(1)
        flags, which = torch.where(claimed >= 0, 1, flags), torch.where(claimed >= 0, by, which)
    return flags, torch.where(flags == 1, which, -1)


@own_leaf
def ig_region_match(
    boxes: Tensor,
    ig_regions: Tensor,
    ig_regions_num: Tensor,
    num_classes: int,
    ig_region_overlap: float,
    legacy_bbox: bool = False,
) -> Tensor:
    """Find the boxes that lie in regions in which a class is to be ignored.

    Args:
        boxes: ``[B, n, 4]``, or ``[n, 4]`` for all images: left, top, right, bottom.
        ig_regions: ``[B, m, 5 or more]``: left, top, right, bottom, class; padded with anything.
        ig_regions_num: ``[B]``, how many of an image's are real; the first ones.
        num_classes: classes, the background included; a region of another class ignores nothing.
        ig_region_overlap: a box is ignored if more than this share of its area lies in a region.
        legacy_bbox: right and bottom are the last pixels inside: sides are one longer.

    Returns:
        ``[B, num_classes, n]`` (int64): 1 where a box is ignored for a class, else 0.

    >>> boxes, region = torch.tensor([[0.0, 0, 4, 4], [8, 8, 9, 9]]), torch.tensor([[[0.0, 0, 3, 4, 1]]])
    >>> ig_region_match(boxes, region, torch.tensor([1]), 2, 0.5)
    tensor([[[0, 0],
             [1, 0]]])
    """
    _require(
        "ig_region_match", num_classes=(num_classes, int), ig_region_overlap=(ig_region_overlap, float),
        legacy_bbox=(legacy_bbox, bool),
    )  # fmt: skip
    boxes, ig_regions, counts = _checked("ig_region_match", boxes, ig_regions, ig_regions_num, 5)
    flags = counts.new_zeros(len(ig_regions), num_classes, boxes.shape[1])
    if not boxes.shape[1]:
        return flags
    classes = torch.arange(num_classes, device=boxes.device)
    for flag, own, regions, count in zip(flags, boxes, ig_regions, counts.tolist(), strict=True):
        real = regions[:count]
        is_inside = _shares(own, real[:, :4], legacy_bbox, of_box=True) > ig_region_overlap
        is_class = (real[:, 4:5] == classes).to(own.dtype)  # a row for each region
        flag.copy_((is_inside.to(own.dtype) @ is_class > 0).T)
    return flags
