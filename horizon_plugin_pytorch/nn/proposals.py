"""Steps of detection by themselves, for post-processing that networks write of their own: the best, decoding.

No document defines these functions. Names and arguments are those of public code; what they mean is taken from
`DetectionPostProcess`, whose documented arguments have the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn import boxes as geometry
from horizon_plugin_pytorch.nn.boxes import require_real, top
from horizon_plugin_pytorch.nn.input_checks import refused_input
from horizon_plugin_pytorch.runtime.leaf import own_leaf


def _require_rows(who: str, **tensors: Any) -> None:
    """Insist on tensors with a row for each box, the boxes first."""
    shapes = {name: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for name, x in tensors.items()}
    is_sound = all(isinstance(x, Tensor) and x.dim() > 0 for x in tensors.values())
    if is_sound:
        boxes = next(iter(tensors.values()))
        is_sound = boxes.dim() == 2 and boxes.shape[1] == 4 and len({len(x) for x in tensors.values()}) == 1
    if not is_sound:
        raise OperatorInputError(
            f"`{who}` takes tensors of one image with a row for each box, the boxes [n, 4] first; got "
            f"{', '.join(f'{name} {shape}' for name, shape in shapes.items())}."
        )


def _by_class(who: str, scores: Tensor) -> Tensor:
    """Scores as ``[n, classes]``."""
    by_class = scores.unsqueeze(1) if scores.dim() == 1 else scores
    if by_class.dim() != 2 or not by_class.shape[1]:
        raise OperatorInputError(f"`{who}` takes scores [n] or [n, classes], got {tuple(scores.shape)}.")
    return by_class


@own_leaf
def get_top_n(boxes: Tensor, scores: Tensor, others: Tensor, n: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The boxes with the highest scores, highest first; of equal scores the lower position counts as higher.

    Its meaning is taken from its name and from ``pre_decode_top_n`` of `DetectionPostProcess`: no document defines it.

    Args:
        boxes: ``[m, 4]``: anchors, or boxes.
        scores: ``[m]``, or ``[m, classes]``, of which the best class counts.
        others: ``[m, ...]``, what else belongs to the boxes: regressions, or classes.
        n: how many; None: all, in order.

    >>> boxes, regressions = torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)
    >>> get_top_n(boxes, torch.tensor([[0.1, 0.5], [0.2, 0.1], [0.9, 0.3]]), regressions, 2)[1]
    tensor([[0.9000, 0.3000],
            [0.1000, 0.5000]])
    """
    require_real("get_top_n", boxes, scores, others)
    _require_rows("get_top_n", boxes=boxes, scores=scores, others=others)
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
        raise OperatorInputError(f"`get_top_n` takes the number of boxes last, get_top_n(..., n), got {n!r}.")
    order = top(_by_class("get_top_n", scores.detach()).amax(1), n)
    return boxes[order], scores[order], others[order]


@own_leaf
def decode(
    boxes: Tensor,
    scores: Tensor,
    regressions: Tensor,
    *,
    regression_scale: float | Sequence[float] | Tensor | None = None,
    background_class_idx: int | None = None,
    clip_size: Sequence[float] | Tensor | None = None,
    size_threshold: float | None = None,
    abs_offset: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes of one image from anchors, scores and regressions: one box an anchor, that of its best class.

    Its meaning is taken from the documented arguments of `DetectionPostProcess`: no document defines it.

    Args:
        boxes: anchors ``[n, 4]``: left, top, right, bottom.
        scores: ``[n, classes]``, or ``[n]`` of one class; used as they are.
        regressions: ``dx, dy, dw, dh``: ``[n, 4]``, or ``[n, classes * 4]``, of which those of the best class count.
        regression_scale: what regressions are multiplied with: a number, or four of them.
        background_class_idx: a class that is not taken.
        clip_size: height and width to clip boxes to.
        size_threshold: a box needs at least this width and height.
        abs_offset: ``dx`` and ``dy`` are pixels, not shares of the anchor's size.

    Returns:
        boxes ``[m, 4]``, scores ``[m]`` and classes ``[m]`` (int64), in the order of the anchors.

    >>> anchors = torch.tensor([[0.0, 0, 4, 2], [0, 0, 2, 2]])
    >>> scores, moves = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([[0.5, 0, 0, 0], [0.0, 0, 0, 0]])
    >>> decode(anchors, scores, moves, clip_size=(2, 5))
    (tensor([[2., 0., 5., 2.],
            [0., 0., 2., 2.]]), tensor([0.9000, 0.8000]), tensor([0, 1]))
    """
    require_real("decode", boxes, scores, regressions)
    _require_rows("decode", boxes=boxes, scores=scores, regressions=regressions)
    by_class = _by_class("decode", scores)
    count = by_class.shape[1]
    if regressions.shape[1:] not in ((4,), (4 * count,)):
        raise OperatorInputError(
            f"`decode` takes regressions [n, 4] or, of {count} classes, [n, {4 * count}], got "
            f"{tuple(regressions.shape)}."
        )
    if background_class_idx is not None:
        if not -count <= background_class_idx < count or count == 1:
            raise OperatorInputError(f"`decode`: background_class_idx={background_class_idx} of {count} classes.")
        is_background = torch.arange(count, device=scores.device) == background_class_idx % count
        by_class = by_class.masked_fill(is_background, -torch.inf)
    best, classes = by_class.max(1)
    moves = regressions.unflatten(1, (-1, 4))
    moves = moves[:, 0] if moves.shape[1] == 1 else moves[torch.arange(len(boxes), device=moves.device), classes]
    if regression_scale is not None:
        factor = torch.as_tensor(regression_scale, dtype=moves.dtype, device=moves.device)
        if factor.numel() not in (1, 4):
            raise refused_input("decode", "a regression_scale of one or four numbers", regression_scale=factor)
        moves = moves * factor
    found = geometry.decode(boxes, moves, is_absolute=abs_offset)
    if clip_size is not None:
        found = geometry.clip(found, clip_size)
    if size_threshold is not None:
        large = ((found[:, 2:] - found[:, :2]) >= size_threshold).all(1).nonzero()[:, 0]
        found, best, classes = found[large], best[large], classes[large]
    return found, best, classes
