"""From the outputs of a detection network to boxes: filter, decode, clip, suppress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.boxes import clip, decode, require_real, top
from horizon_plugin_pytorch.nn.nms import select


class _Found(NamedTuple):
    boxes: Tensor
    scores: Tensor
    classes: Tensor

    def at(self, positions: Tensor) -> _Found:
        return _Found(*(x[positions] for x in self))


def as_rows(x: Tensor, width: int, what: str) -> Tensor:
    """Predictions as ``[N, number of anchors, width]``, from maps ``[N, A * width, H, W]`` or rows of that width.

    Anchors are in the order of rows, columns, anchors of a position.

    Args:
        what: whose predictions, for the message.
    """
    channels = x.shape[1] if x.dim() == 4 else x.shape[-1] if 0 < x.dim() < 4 else 0
    if channels < width or (channels % width if x.dim() == 4 else channels != width):
        raise ValueError(
            f"{what} of shape {tuple(x.shape)}: an anchor has {width} numbers, so they must be maps "
            f"[N, A * {width}, H, W] or rows [N, n, {width}]."
        )
    if x.dim() == 4:
        n, _, h, w = x.shape
        count = channels // width
        return x.reshape(n, count, width, h, w).permute(0, 3, 4, 1, 2).reshape(n, h * w * count, width)
    return x if x.dim() == 3 else x.reshape(1, -1, width)


class DetectionPostProcess(nn.Module):
    """Post-processing of detection networks (RPN, RetinaNet, SSD, YOLO); it computes in float, after the DeQuantStub.

    Steps, each left out where its argument is None: best anchors of each level (`pre_decode_top_n`), filter by score,
    decode, clip to the image, filter by size, best boxes of each level (`post_decode_top_n`), best boxes
    (`pre_nms_top_n`), suppression within each class, best boxes (`post_nms_top_n`).

    Args:
        score_threshold: a box needs a higher score.
        regression_scale: what regressions are multiplied with: a number, or four of them.
        background_class_idx: a class to leave out.
        size_threshold: a box needs at least this width and height.
        image_size: height and width to clip boxes to, unless `forward` gets `image_shapes`.
        pre_decode_top_n: anchors of each level that go on, by their best score (``yolo``: by objectness).
        post_decode_top_n: boxes of each level that go on, by score.
        iou_threshold: of suppression; None: no suppression.
        pre_nms_top_n, post_nms_top_n: boxes before and after suppression, by score.
        nms_on_each_level: suppress, and count for `pre_nms_top_n`, in each level by itself.
        mode: ``"normal"``: an anchor gives a box for each class that passes. ``"yolo"``: the first score is the
            objectness. It is what `score_threshold` looks at; the class is the one with the best score, and the
            result's score is the product of both. ``dx`` and ``dy`` are pixels.

    `forward` takes lists with one tensor a level: `boxes` (anchors: left, top, right, bottom), `scores` and
    `regressions` (``dx, dy, dw, dh``), as maps ``[N, A * 4, H, W]`` or rows ``[N, n, 4]``, anchors also as ``[n, 4]``
    for all images; or `boxes` with one tensor ``[sum of n, 4]`` an image, as `AnchorGenerator` gives them. Scores are
    used as they are: apply sigmoid or softmax before. Results are three tuples, boxes ``[m, 4]``, scores ``[m]`` and
    classes ``[m]`` (positions among the scores; in ``yolo`` among those after the objectness), an element for each
    image, highest score first.
    """

    def __init__(
        self,
        score_threshold: float = 0,
        regression_scale: float | Sequence[float] | None = None,
        background_class_idx: int | None = None,
        size_threshold: float | None = None,
        image_size: Sequence[int] | None = None,
        pre_decode_top_n: int | None = None,
        post_decode_top_n: int | None = None,
        iou_threshold: float | None = None,
        pre_nms_top_n: int | None = None,
        post_nms_top_n: int | None = None,
        nms_on_each_level: bool = False,
        mode: str = "normal",
    ) -> None:
        super().__init__()
        if mode not in ("normal", "yolo"):
            raise ValueError(f"DetectionPostProcess: mode must be 'normal' or 'yolo', got {mode!r}.")
        self.score_threshold = score_threshold
        self.regression_scale = regression_scale
        self.background_class_idx = background_class_idx
        self.size_threshold = size_threshold
        self.image_size = image_size
        self.pre_decode_top_n = pre_decode_top_n
        self.post_decode_top_n = post_decode_top_n
        self.iou_threshold = iou_threshold
        self.pre_nms_top_n = pre_nms_top_n
        self.post_nms_top_n = post_nms_top_n
        self.nms_on_each_level = nms_on_each_level
        self.mode = mode

    def forward(
        self,
        boxes: Sequence[Tensor],
        scores: Sequence[Tensor],
        regressions: Sequence[Tensor],
        image_shapes: Any = None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        require_real("DetectionPostProcess", boxes, scores, regressions)
        if not len(scores) == len(regressions) > 0:
            raise ValueError(
                f"DetectionPostProcess: scores of {len(scores)} levels and regressions of {len(regressions)}; there "
                "must be as many of both, and at least one."
            )
        deltas = [as_rows(x, 4, "DetectionPostProcess: regressions") for x in regressions]
        if self.regression_scale is not None:
            deltas = [x * torch.as_tensor(self.regression_scale, dtype=x.dtype, device=x.device) for x in deltas]
        counts = [x.shape[1] for x in deltas]
        anchors = _by_level(boxes, counts)
        values = [self._scores(s, r, n) for s, r, n in zip(scores, regressions, counts, strict=True)]
        images = []
        for n in range(deltas[0].shape[0]):
            size = self.image_size if image_shapes is None else image_shapes[n]
            levels = [
                self._level(a[n if len(a) > 1 else 0], s[n], d[n], size)
                for a, s, d in zip(anchors, values, deltas, strict=True)
            ]
            images.append(self._suppress(levels))
        found = [tuple(parts) for parts in zip(*images, strict=True)] or [(), (), ()]
        return found[0], found[1], found[2]

    def _scores(self, scores: Tensor, regressions: Tensor, count: int) -> Tensor:
        """The scores of a level as rows, for so many anchors."""
        is_map = scores.dim() == 4
        width = scores.shape[1] * scores.shape[2] * scores.shape[3] // count if is_map and count else scores.shape[-1]
        is_alike = not is_map or regressions.dim() != 4 or scores.shape[2:] == regressions.shape[2:]
        rows = as_rows(scores, max(width, 1), "DetectionPostProcess: scores") if is_alike else None
        if rows is None or rows.shape[1] != count:
            raise ValueError(
                f"DetectionPostProcess: scores of shape {tuple(scores.shape)} and regressions of shape "
                f"{tuple(regressions.shape)} on one level; both must have the same anchors."
            )
        classes = rows.shape[2] - (self.mode == "yolo")
        if self.background_class_idx is not None and not -classes <= self.background_class_idx < classes:
            raise ValueError(
                f"DetectionPostProcess: background_class_idx={self.background_class_idx}, and the scores have "
                f"{classes} classes."
            )
        return rows

    def _level(self, anchors: Tensor, scores: Tensor, deltas: Tensor, size: Any) -> _Found:
        """The boxes of one level of one image."""
        is_yolo = self.mode == "yolo"
        objectness, classes = (scores[:, 0], scores[:, 1:]) if is_yolo else (scores.amax(1), scores)
        if self.background_class_idx is not None:
            classes = classes.clone()
            classes[:, self.background_class_idx] = -torch.inf
            objectness = objectness if is_yolo else classes.amax(1)
        if self.pre_decode_top_n is not None:
            best = top(objectness, self.pre_decode_top_n)
            anchors, deltas, classes, objectness = anchors[best], deltas[best], classes[best], objectness[best]
        if is_yolo:
            rows = (objectness > self.score_threshold).nonzero()[:, 0]
            values, columns = classes[rows].max(1)
            values = values * objectness[rows]
        else:
            rows, columns = (classes > self.score_threshold).nonzero().unbind(1)
            values = classes[rows, columns]
        decoded = decode(anchors[rows], deltas[rows], is_absolute=is_yolo)
        found = _Found(decoded if size is None else clip(decoded, size), values, columns)
        if self.size_threshold is not None:
            sides = found.boxes[:, 2:] - found.boxes[:, :2]
            found = found.at((sides >= self.size_threshold).all(1).nonzero()[:, 0])
        return found if self.post_decode_top_n is None else found.at(top(found.scores, self.post_decode_top_n))

    def _suppress(self, levels: list[_Found]) -> _Found:
        if not self.nms_on_each_level:
            return self._best(_join(levels), self.post_nms_top_n)
        found = _join([self._best(level) for level in levels])
        return found.at(top(found.scores, self.post_nms_top_n))

    def _best(self, found: _Found, most: int | None = None) -> _Found:
        if self.iou_threshold is None:
            return found.at(top(found.scores, self.pre_nms_top_n)[:most])
        return found.at(select(found.boxes, found.scores, found.classes, self.iou_threshold, self.pre_nms_top_n, most))


def _by_level(boxes: Sequence[Tensor], counts: list[int]) -> list[Tensor]:
    """Anchors as ``[N or 1, n, 4]`` for each level, also from one tensor of all levels for each image."""
    rows = [as_rows(x, 4, "DetectionPostProcess: boxes") for x in boxes]
    if [x.shape[1] for x in rows] == counts:
        return rows
    if all(x.shape[0] == 1 and x.shape[1] == sum(counts) for x in rows):
        return list(torch.cat(rows).split(counts, dim=1))
    raise ValueError(
        f"DetectionPostProcess: regressions have {counts} anchors on their levels, boxes have "
        f"{[x.shape[1] for x in rows]}; give anchors for each level, or all of them for each image."
    )


def _join(levels: list[_Found]) -> _Found:
    return _Found(*(torch.cat(parts) for parts in zip(*levels, strict=True)))
