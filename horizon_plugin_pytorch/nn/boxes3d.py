"""Boxes in space that stand upright: overlap from above and in space, and non-maximum suppression.

No document defines these functions. Names are those of public code; meaning and format are those of other toolkits'
functions for lidar: a box is ``(x, y, z, dx, dy, dz, yaw)``, its center, its sizes along its own axes, and the angle
about the vertical axis in radians. Further numbers, such as velocities, are not looked at. All compute in float64
inside and give no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn.boxes import require_real, top
from horizon_plugin_pytorch.nn.nms import suppress
from horizon_plugin_pytorch.nn.rotated_boxes import rotated_overlap, shared_areas
from horizon_plugin_pytorch.runtime.leaf import own_leaf

_SEEN_FROM_ABOVE = [0, 1, 3, 4, 6]


def _from_above(who: str, boxes: Tensor) -> Tensor:
    """``(x, y, dx, dy, yaw)``."""
    require_real(who, boxes)
    if boxes.dim() != 2 or boxes.shape[1] < 7:
        raise OperatorInputError(
            f"`{who}` takes boxes [n, 7]: x, y, z, dx, dy, dz, yaw; got shape {tuple(boxes.shape)}."
        )
    return boxes.detach()[:, _SEEN_FROM_ABOVE].double()


def _common_type(a: Tensor, b: Tensor) -> torch.dtype:
    found = torch.promote_types(a.dtype, b.dtype)
    return found if found.is_floating_point else torch.float32


@own_leaf
def box3d_overlap_bev(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """Area that every box of `boxes_a` shares with every box of `boxes_b`, seen from above: ``[n, m]``.

    >>> a, b = torch.tensor([[0.0, 0, 0, 4, 2, 1, 0]]), torch.tensor([[1.0, 0, 9, 4, 2, 1, 0], [9, 9, 0, 4, 2, 1, 1]])
    >>> box3d_overlap_bev(a, b)
    tensor([[6., 0.]])
    """
    who = "box3d_overlap_bev"
    return shared_areas(_from_above(who, boxes_a), _from_above(who, boxes_b)).to(_common_type(boxes_a, boxes_b))


@own_leaf
def box3d_iou_bev(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """Intersection over union of every box of `boxes_a` with every box of `boxes_b`, seen from above: ``[n, m]``.

    >>> a, b = torch.tensor([[0.0, 0, 0, 4, 2, 1, 0]]), torch.tensor([[1.0, 0, 9, 4, 2, 1, 0], [9, 9, 0, 4, 2, 1, 1]])
    >>> box3d_iou_bev(a, b)
    tensor([[0.6000, 0.0000]])
    """
    who = "box3d_iou_bev"
    return rotated_overlap(_from_above(who, boxes_a), _from_above(who, boxes_b)).to(_common_type(boxes_a, boxes_b))


@own_leaf
def box3d_iou(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """Intersection over union of volumes, of every box of `boxes_a` with every box of `boxes_b`: ``[n, m]``.

    >>> a, b = torch.tensor([[0.0, 0, 0, 4, 2, 2, 0]]), torch.tensor([[0.0, 0, 1, 4, 2, 2, 0], [0, 0, 9, 4, 2, 2, 0]])
    >>> box3d_iou(a, b)
    tensor([[0.3333, 0.0000]])
    """
    flat = shared_areas(_from_above("box3d_iou", boxes_a), _from_above("box3d_iou", boxes_b))
    first, second = boxes_a.detach().double(), boxes_b.detach().double()
    low = [box[:, 2] - box[:, 5] / 2 for box in (first, second)]
    high = [box[:, 2] + box[:, 5] / 2 for box in (first, second)]
    height = torch.minimum(high[0][:, None], high[1][None]) - torch.maximum(low[0][:, None], low[1][None])
    shared = flat.mul_(height.clamp_(min=0))
    volumes = [box[:, 3:6].prod(1) for box in (first, second)]
    union = volumes[0][:, None] + volumes[1][None] - shared
    return torch.where(union > 0, shared / union, 0.0).to(_common_type(boxes_a, boxes_b))


@own_leaf
def nms3d(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Positions of the boxes that stay, highest score first; of equal scores the lower position is higher.

    Args:
        boxes: ``[n, 7]``.
        scores: ``[n]``.
        iou_threshold: a box goes if it overlaps a better one that stays by more than this, seen from above
            (`box3d_iou_bev`).

    >>> boxes = torch.tensor([[0.0, 0, 0, 4, 2, 1, 0.0], [0, 0, 9, 4, 2, 1, 0.1], [0, 0, 0, 4, 2, 1, 1.5]])
    >>> nms3d(boxes, torch.tensor([0.5, 0.9, 0.3]), 0.5)
    tensor([1, 2])
    """
    flat = _from_above("nms3d", boxes)
    require_real("nms3d", scores)
    if scores.shape != boxes.shape[:1]:
        raise OperatorInputError(
            f"`nms3d` takes one score for each box, got {tuple(scores.shape)} for {len(boxes)} boxes."
        )
    order = top(scores.detach() if scores.is_floating_point() else scores.float(), None)
    best = flat[order]

    def removes(first: Tensor, second: Tensor) -> Tensor:
        return rotated_overlap(best[first], best[second]) > iou_threshold

    return order[suppress(len(order), removes, None, boxes.device)]
