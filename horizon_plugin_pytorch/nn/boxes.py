"""Boxes as ``(left, top, right, bottom)``: decoding, clipping, overlap, the best by score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.function_handlers import calling_line
from horizon_plugin_pytorch.nn.input_checks import refused_input
from horizon_plugin_pytorch.qtensor import QTensor

# exp of a predicted size is limited to this factor, as detection networks do, so that it cannot overflow.
_MOST_GROWTH = math.log(1000 / 16)


def require_real(what: str, *values: Any) -> None:
    """Refuse QTensors where real numbers are computed with."""
    if any(isinstance(x, QTensor) for x in pytree.tree_leaves(values)):
        raise OperatorInputError(
            f"`{what}`{calling_line()} computes in float and got a QTensor: put a DeQuantStub before it, on each "
            "tensor that it gets."
        )


def top(scores: Tensor, count: int | None) -> Tensor:
    """Positions of the highest scores, highest first; of equal ones the first. NaN is lowest.

    >>> top(torch.tensor([0.5, 0.9, 0.5]), 2)
    tensor([1, 0])
    """
    ordered = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    return ordered.sort(descending=True, stable=True).indices[:count]


def area(boxes: Tensor) -> Tensor:
    """Width times height."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of every box of `a` with every box of `b`.

    >>> overlap(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[0.0, 0, 2, 1], [5, 5, 6, 6]]))
    tensor([[0.5000, 0.0000]])
    """
    (left_a, top_a, right_a, bottom_a), (left_b, top_b, right_b, bottom_b) = a.T[..., None], b.T[:, None]
    width = torch.minimum(right_a, right_b).sub_(torch.maximum(left_a, left_b)).clamp_(min=0)
    height = torch.minimum(bottom_a, bottom_b).sub_(torch.maximum(top_a, top_b)).clamp_(min=0)
    shared = width.mul_(height)
    return shared / (area(a)[:, None] + area(b)[None, :]).sub_(shared)


def decode(anchors: Tensor, deltas: Tensor, is_absolute: bool = False) -> Tensor:
    """Boxes from anchors and predicted ``(dx, dy, dw, dh)``.

    Centers move by ``dx`` and ``dy`` anchor sizes (pixels if `is_absolute`), sizes grow by ``exp(dw)`` and ``exp(dh)``.

    >>> decode(torch.tensor([[0.0, 0, 4, 2]]), torch.tensor([[0.5, 0.0, 0.0, 0.0]]))
    tensor([[2., 0., 6., 2.]])
    """
    size = anchors[..., 2:] - anchors[..., :2]
    center = anchors[..., :2] + size / 2
    move = deltas[..., :2] if is_absolute else deltas[..., :2] * size
    half = size * deltas[..., 2:].clamp(max=_MOST_GROWTH).exp() / 2
    return torch.cat([center + move - half, center + move + half], dim=-1)


def clip(boxes: Tensor, image_size: Sequence[float] | Tensor) -> Tensor:
    """Limit boxes to an image of this height and width."""
    if len(image_size) != 2:
        raise refused_input("clip_size", "height and width of an image", clip_size=str(image_size))
    height, width = (float(v) for v in image_size)
    limit = boxes.new_tensor([width, height, width, height])
    return torch.minimum(boxes.clamp(min=0), limit)
