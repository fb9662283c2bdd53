"""Boxes that are turned, as seen from above: overlap and non-maximum suppression."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.nn.boxes import require_real, top
from horizon_plugin_pytorch.nn.nms import suppress
from horizon_plugin_pytorch.runtime.leaf import own_leaf

_PAIRS_AT_ONCE = 1 << 15  # a pair takes about four kilobytes
_TOLERANCE = 1e-9  # a corner this close to an edge lies on it, edges this close in direction are parallel


def _corners(boxes: Tensor) -> Tensor:
    """The four corners ``[..., 4, 2]`` of ``(x, y, width, height, angle)``, in order around the box."""
    center, size, angle = boxes[..., :2], boxes[..., 2:4], boxes[..., 4]
    signs = boxes.new_tensor([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])
    x, y = (size.unsqueeze(-2) * signs).unbind(-1)
    cos, sin = angle.cos().unsqueeze(-1), angle.sin().unsqueeze(-1)
    return center.unsqueeze(-2) + torch.stack([x * cos - y * sin, x * sin + y * cos], dim=-1)


def _cross(a: Tensor, b: Tensor) -> Tensor:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def _inside(points: Tensor, corners: Tensor) -> Tensor:
    """Which points ``[P, m, 2]`` lie in the boxes with these corners ``[P, 4, 2]``, edges included."""
    origin, sides = corners[:, None, 0], (corners[:, 1] - corners[:, 0], corners[:, 3] - corners[:, 0])
    inside = torch.ones(points.shape[:2], dtype=torch.bool, device=points.device)
    for side in sides:
        along, length = ((points - origin) * side[:, None]).sum(-1), side.square().sum(-1, keepdim=True)
        inside &= (along >= -_TOLERANCE * length) & (along <= (1 + _TOLERANCE) * length)
    return inside


def _shared_area(a: Tensor, b: Tensor) -> Tensor:
    """Area of the intersection of each of P pairs of boxes, given by their corners ``[P, 4, 2]``.

    It is convex, and its corners are among the corners of both and the crossings of their edges: those that are real,
    in order around their middle, span it.
    """
    edges_a, edges_b = a.roll(-1, 1) - a, b.roll(-1, 1) - b
    between = b[:, None] - a[:, :, None]
    turn = _cross(edges_a[:, :, None], edges_b[:, None])
    # Of edges that are all but parallel, the corners say enough; a crossing would be computed from rounding errors.
    lengths = edges_a.norm(dim=-1)[:, :, None] * edges_b.norm(dim=-1)[:, None]
    turn = turn.masked_fill(turn.abs() <= _TOLERANCE * lengths, 0.0)
    t, u = _cross(between, edges_b[:, None]) / turn, _cross(between, edges_a[:, :, None]) / turn
    crosses = (turn != 0) & (t >= 0) & (t <= 1) & (u >= 0) & (u <= 1)
    crossings = a[:, :, None] + t.nan_to_num(0.0, 0.0, 0.0)[..., None] * edges_a[:, :, None]
    points = torch.cat([crossings.flatten(1, 2), a, b], dim=1)
    is_real = torch.cat([crosses.flatten(1), _inside(a, b), _inside(b, a)], dim=1)
    count = is_real.sum(1, keepdim=True)
    middle = (points * is_real[..., None]).sum(1, keepdim=True) / count.clamp(min=1)[..., None]
    spokes = torch.where(is_real[..., None], points - middle, 0.0)
    angles = torch.atan2(spokes[..., 1], spokes[..., 0]).masked_fill(~is_real, torch.inf)
    order = angles.argsort(dim=1)
    # Spokes that are none come last; the first one stands for each of them, which closes the ring.
    ring = spokes.gather(1, order[..., None].expand_as(spokes))
    is_last = torch.arange(ring.shape[1], device=ring.device) >= count
    ring = torch.where(is_last[..., None], ring[:, :1], ring)
    return _cross(ring, ring.roll(-1, 1)).sum(1).clamp(min=0) / 2


def shared_areas(a: Tensor, b: Tensor) -> Tensor:
    """Area of the intersection of every box of `a` with every box of `b`: ``(x, y, width, height, angle)``, float64."""
    first, second = a.double(), b.double()
    corners_a, corners_b = _corners(first), _corners(second)
    # Only pairs whose bounding rectangles meet are looked at.
    low = torch.maximum(corners_a.amin(1)[:, None], corners_b.amin(1)[None])
    high = torch.minimum(corners_a.amax(1)[:, None], corners_b.amax(1)[None])
    i, j = (high > low).all(-1).nonzero().unbind(1)
    shared = first.new_zeros(len(a), len(b))
    for rows, columns in zip(i.split(_PAIRS_AT_ONCE), j.split(_PAIRS_AT_ONCE), strict=True):
        shared[rows, columns] = _shared_area(corners_a[rows], corners_b[columns])
    return shared


def rotated_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of every box of `a` with every box of `b`: ``(x, y, width, height, angle)``, radians.

    >>> import math
    >>> square = torch.tensor([[0.0, 0, 2, 2, 0]])
    >>> turned = torch.tensor([[0.0, 0, 2, 2, math.pi / 2], [1, 0, 2, 2, 0], [9, 9, 2, 2, 1]])
    >>> rotated_overlap(square, turned).mul(3).round()
    tensor([[3., 1., 0.]])
    """
    shared = shared_areas(a, b)
    areas = [box[:, 2].double() * box[:, 3].double() for box in (a, b)]
    union = areas[0][:, None] + areas[1][None] - shared
    return torch.where(union > 0, shared / union, 0.0).to(a.dtype)


@own_leaf
def nms_rotated(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Positions of the turned boxes that stay, highest score first; of equal scores the lower position is higher.

    Args:
        boxes: ``[n, 5]``: x and y of the center, width, height, angle in radians.
        scores: ``[n]``.
        iou_threshold: a box goes if it overlaps a better one that stays by more than this (intersection over union).

    >>> boxes = torch.tensor([[0.0, 0, 4, 2, 0.0], [0, 0, 4, 2, 0.1], [0, 0, 4, 2, 1.5]])
    >>> nms_rotated(boxes, torch.tensor([0.5, 0.9, 0.3]), 0.5)
    tensor([1, 2])
    """
    require_real("nms_rotated", boxes, scores)
    if boxes.dim() != 2 or boxes.shape[1] != 5 or scores.shape != boxes.shape[:1]:
        raise ValueError(
            f"`nms_rotated` takes boxes of shape [n, 5] and scores of shape [n], got {tuple(boxes.shape)} and "
            f"{tuple(scores.shape)}."
        )
    order = top(scores.detach(), None)
    best = boxes.detach()[order]

    def removes(first: Tensor, second: Tensor) -> Tensor:
        return rotated_overlap(best[first], best[second]) > iou_threshold

    return order[suppress(len(order), removes, None, boxes.device)]
