"""Non-maximum suppression: of boxes that overlap, the one with the highest score stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.nn.boxes import overlap, require_real, top
from horizon_plugin_pytorch.nn.input_checks import is_count, refused_input
from horizon_plugin_pytorch.runtime.leaf import own_leaf

_BLOCK = 512


def suppress(count: int, removes: Callable[[Tensor, Tensor], Tensor], most: int | None, device: torch.device) -> Tensor:
    """Positions that survive when candidates are taken in order and each survivor removes later ones.

    Args:
        count: number of candidates, the best first.
        removes: for two tensors of positions, whether each of the first would remove each of the second.
        most: stop at this number of survivors.

    Candidates are taken in blocks: what earlier survivors remove goes first, and the rest of a block settles among
    itself.
    """
    kept: list[Tensor] = []
    found = 0
    for start in range(0, count, _BLOCK):
        block = torch.arange(start, min(start + _BLOCK, count), device=device)
        for survivors in kept:
            block = block[~removes(survivors, block).any(0)]
        block = block[_settle(removes(block, block).triu(1))]
        kept.append(block)
        found += len(block)
        if most is not None and found >= most:
            break
    return torch.cat(kept)[:most] if kept else torch.arange(0, device=device)


def _settle(removes: Tensor) -> Tensor:
    """Which candidates survive, for a strictly upper triangular matrix of who removes whom.

    Each round lets the survivors of the last one remove. After k rounds the first k candidates are right, so what no
    longer changes is the answer; a round is one product, and few are needed.
    """
    matrix = removes.float()
    alive = removes.new_ones(len(removes))
    while True:
        after = (alive.float() @ matrix) == 0
        if torch.equal(after, alive):
            return alive
        alive = after


def select(
    boxes: Tensor,
    scores: Tensor,
    groups: Tensor | None,
    iou_threshold: float,
    pre_top_n: int | None = None,
    post_top_n: int | None = None,
    margin: float | None = None,
) -> Tensor:
    """Positions of the boxes that stay, highest score first; boxes of different groups leave each other alone.

    Args:
        margin: a box removes another only if its score is higher by more than this; None: whatever the scores.
    """
    order = top(scores, pre_top_n)
    best, values = boxes[order], scores[order]
    kinds = None if groups is None else groups[order]

    def removes(first: Tensor, second: Tensor) -> Tensor:
        out = overlap(best[first], best[second]) > iou_threshold
        if kinds is not None:
            out &= kinds[first, None] == kinds[None, second]
        if margin is not None:
            out &= values[first, None] - values[None, second] > margin
        return out

    return order[suppress(len(order), removes, post_top_n, boxes.device)]


def _nms(
    what: str,
    boxes: Tensor,
    scores: Tensor,
    groups: Tensor | None,
    iou_threshold: float,
    score_threshold: float | None,
    pre_nms_top_n: int | None,
    output_num: int | None,
) -> Tensor:
    require_real(what, boxes, scores)
    if not isinstance(boxes, Tensor) or not isinstance(scores, Tensor):
        raise refused_input(what, "tensors of boxes [n, 4] and of scores [n]", boxes=boxes, scores=scores)
    if not isinstance(iou_threshold, (int, float, Tensor)):
        raise refused_input(what, "a number as iou_threshold", iou_threshold=iou_threshold)
    for name, count in (("pre_nms_top_n", pre_nms_top_n), ("output_num", output_num)):
        if count is not None and not is_count(count):
            raise refused_input(what, f"None or a whole number as {name}", "None is all of them.", **{name: count})
    if boxes.dim() != 2 or boxes.shape[1] != 4 or scores.shape != boxes.shape[:1]:
        raise ValueError(
            f"`{what}` takes boxes of shape [n, 4] and scores of shape [n], got {tuple(boxes.shape)} and "
            f"{tuple(scores.shape)}."
        )
    if groups is not None and groups.shape != scores.shape:
        raise ValueError(
            f"`{what}` takes one category for each box, got idxs of shape {tuple(groups.shape)} for {len(boxes)} boxes."
        )
    boxes, scores = (x.detach() if x.is_floating_point() else x.float() for x in (boxes, scores))
    if score_threshold is None:
        return select(boxes, scores, groups, iou_threshold, pre_nms_top_n, output_num)
    chosen = (scores > score_threshold).nonzero()[:, 0]
    kinds = None if groups is None else groups[chosen]
    return chosen[select(boxes[chosen], scores[chosen], kinds, iou_threshold, pre_nms_top_n, output_num)]


@own_leaf
def nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    score_threshold: float | None = None,
    pre_nms_top_n: int | None = None,
    output_num: int | None = None,
) -> Tensor:
    """Positions of the boxes that stay, highest score first; of equal scores the lower position counts as higher.

    Args:
        boxes: ``[n, 4]``, left, top, right, bottom.
        scores: ``[n]``.
        iou_threshold: a box goes if it overlaps a better one that stays by more than this (intersection over union).
        score_threshold: only boxes with a higher score count.
        pre_nms_top_n: only this many of the best boxes count.
        output_num: at most this many stay.

    >>> boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [8, 8, 9, 9]])
    >>> nms(boxes, torch.tensor([0.5, 0.9, 0.3]), 0.5)
    tensor([1, 2])
    """
    return _nms("nms", boxes, scores, None, iou_threshold, score_threshold, pre_nms_top_n, output_num)


@own_leaf
def batched_nms(
    boxes: Tensor,
    scores: Tensor,
    idxs: Tensor,
    iou_threshold: float,
    score_threshold: float | None = None,
    pre_nms_top_n: int | None = None,
    output_num: int | None = None,
) -> Tensor:
    """As `nms`, for boxes of several categories, which leave each other alone.

    Args:
        idxs: ``[n]``, the category of each box.

    >>> boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5]])
    >>> batched_nms(boxes, torch.tensor([0.5, 0.9]), torch.tensor([0, 1]), 0.5)
    tensor([1, 0])
    """
    return _nms("batched_nms", boxes, scores, idxs, iou_threshold, score_threshold, pre_nms_top_n, output_num)


def batched_nms_with_padding(*args: Any, **kwargs: Any) -> Any:
    """The vendor's suppression with a fixed number of results; refused when it is called.

    No document says what its arguments are, and what it pads with.

    Raises:
        NotImplementedError: always; it says what there is instead.
    """
    raise NotImplementedError(
        "batched_nms_with_padding: no document says what its arguments mean and what it pads with, so it is not "
        "guessed. Call `batched_nms(boxes, scores, idxs, iou_threshold, output_num=n)` and pad its positions as your "
        "code expects; `DetectionPostProcessV1` has `nms_padding_mode`."
    )
