"""Post-processing that BERNOULLI2 runs beside the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.march import get_march
from horizon_plugin_pytorch.nn.boxes import clip, decode, require_real
from horizon_plugin_pytorch.nn.detection_post_process import as_rows
from horizon_plugin_pytorch.nn.nms import select
from horizon_plugin_pytorch.qtensor import QTensor

INPUT_SCALE = 2.0**-4
_PADDING = (None, "pad_zero", "rollover")


class DetectionPostProcessV1(nn.Module):
    """Filter, decode and suppress, with one box an anchor: that of its best class.

    On BERNOULLI2 it may follow the network's quantized outputs directly: their integers are rescaled to `qint8` of
    scale 1/16 if they are anything else (give the last layers that scale to spare the step), and the rest is the same.
    On float tensors it runs everywhere.

    Args:
        num_classes: classes that each level predicts.
        box_filter_threshold: an anchor needs a higher score. Scores are used as they are: logits remain logits.
        class_offsets: for each level, what is added to its class numbers.
        use_clippings: clip boxes to the image.
        image_size: height and width, unless `forward` gets `image_sizes`.
        nms_threshold: of suppression within a class (intersection over union).
        pre_nms_top_k, post_nms_top_k: boxes before and after suppression, by score.
        nms_padding_mode: None: as many boxes as are found. ``"pad_zero"``: zeros up to `post_nms_top_k`.
            ``"rollover"``: the boxes again from the first, up to `post_nms_top_k` (zeros if there is none).
        nms_margin: a box suppresses another only if its score is higher by more than this (0: always).
        use_stable_sort: accepted for compatibility; of equal scores the first always counts as higher.
        bbox_min_hw: smallest height and width of a box.

    `forward` takes for each level `data` ``[N, A * (4 + num_classes), H, W]`` (for each anchor ``dx, dy, dw, dh``, then
    the scores) and `anchors` ``[N or 1, A * 4, H, W]`` (left, top, right, bottom). It gives, for each image, boxes
    ``[m, 4]``, scores ``[m]`` and classes ``[m]``, highest score first.
    """

    def __init__(
        self,
        num_classes: int,
        box_filter_threshold: float,
        class_offsets: Sequence[int],
        use_clippings: bool,
        image_size: Sequence[int],
        nms_threshold: float,
        pre_nms_top_k: int,
        post_nms_top_k: int,
        nms_padding_mode: str | None = None,
        nms_margin: float = 0.0,
        use_stable_sort: bool | None = None,
        bbox_min_hw: Sequence[float] = (0, 0),
    ) -> None:
        super().__init__()
        if nms_padding_mode not in _PADDING:
            raise ValueError(
                f"DetectionPostProcessV1: nms_padding_mode must be one of {_PADDING}, got {nms_padding_mode!r}."
            )
        self.num_classes = num_classes
        self.box_filter_threshold = box_filter_threshold
        self.class_offsets = tuple(class_offsets)
        self.use_clippings = use_clippings
        self.image_size = image_size
        self.nms_threshold = nms_threshold
        self.pre_nms_top_k = pre_nms_top_k
        self.post_nms_top_k = post_nms_top_k
        self.nms_padding_mode = nms_padding_mode
        self.nms_margin = nms_margin
        self.use_stable_sort = use_stable_sort
        self.bbox_min_hw = tuple(bbox_min_hw)

    def forward(
        self, data: Sequence[Tensor], anchors: Sequence[Tensor], image_sizes: Any = None
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        require_real("DetectionPostProcessV1", anchors)
        if not len(data) == len(anchors) == len(self.class_offsets):
            raise ValueError(
                f"DetectionPostProcessV1: {len(data)} levels of data, {len(anchors)} of anchors and "
                f"{len(self.class_offsets)} class_offsets; there must be as many of each."
            )
        levels = [as_rows(_on_its_grid(x), 4 + self.num_classes, "DetectionPostProcessV1: data") for x in data]
        predictions = torch.cat(levels, dim=1)
        rows = [as_rows(x, 4, "DetectionPostProcessV1: anchors") for x in anchors]
        for level, (x, anchor) in enumerate(zip(data, anchors, strict=True)):
            is_same_map = x.dim() != 4 or anchor.dim() != 4 or x.shape[2:] == anchor.shape[2:]
            counts = levels[level].shape[1], rows[level].shape[1]
            if not is_same_map or counts[0] != counts[1] or rows[level].shape[0] not in (1, len(predictions)):
                raise ValueError(
                    f"DetectionPostProcessV1: on level {level} data of shape {tuple(x.shape)} have {counts[0]} anchors "
                    f"of {4 + self.num_classes} numbers, and anchors of shape {tuple(anchor.shape)} are {counts[1]}; "
                    "they must be the same anchors, of the same images or one set for all."
                )
        places = torch.cat([x.expand(len(predictions), -1, -1) for x in rows], dim=1)
        offsets = torch.cat(
            [
                torch.full((x.shape[1],), offset, device=x.device)
                for x, offset in zip(levels, self.class_offsets, strict=True)
            ]
        )
        sizes = [self.image_size] * len(predictions) if image_sizes is None else image_sizes
        return [self._image(p, a, offsets, s) for p, a, s in zip(predictions, places, sizes, strict=True)]

    def _image(self, predictions: Tensor, anchors: Tensor, offsets: Tensor, size: Any) -> tuple[Tensor, Tensor, Tensor]:
        scores, classes = predictions[:, 4:].max(1)
        chosen = (scores > self.box_filter_threshold).nonzero()[:, 0]
        boxes, scores = decode(anchors[chosen], predictions[chosen, :4]), scores[chosen]
        classes = classes[chosen] + offsets[chosen]
        if self.use_clippings:
            boxes = clip(boxes, size)
        height, width = self.bbox_min_hw
        sides = boxes[:, 2:] - boxes[:, :2]
        big = ((sides[:, 1] >= height) & (sides[:, 0] >= width)).nonzero()[:, 0]
        margin = self.nms_margin or None
        kept = select(
            boxes[big], scores[big], classes[big], self.nms_threshold, self.pre_nms_top_k, self.post_nms_top_k, margin
        )
        return self._padded(*(x[big[kept]] for x in (boxes, scores, classes)))

    def _padded(self, *found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.nms_padding_mode is not None:
            count, wanted = len(found[0]), self.post_nms_top_k
            if self.nms_padding_mode == "rollover" and count:
                again = torch.arange(wanted, device=found[0].device) % count
                found = tuple(x[again] for x in found)
            else:
                found = tuple(torch.cat([x, x.new_zeros(wanted - count, *x.shape[1:])]) for x in found)
        return found[0], found[1], found[2]


def _on_its_grid(x: Tensor) -> Tensor:
    """Real values; those of a QTensor on the grid of 1/16 that the chip computes with."""
    if not isinstance(x, QTensor):
        return x
    march = get_march()
    if march is not None and march.family != "bernoulli":
        raise UnsupportedOperatorError(
            "`DetectionPostProcessV1` takes quantized tensors on bernoulli and bernoulli2 only, and the march is "
            f"{march}. Put a DeQuantStub before it; it then runs in float."
        )
    if not x.is_rounded:  # while calibrating there are no integers yet
        return x.as_real()
    grid = x.as_grid()
    if x.dtype != qint8 or float(x.scale) != INPUT_SCALE:
        factor = fp.choose_factor(x.scale.double() / INPUT_SCALE, qint8.min, qint8.max, float(1 << (x.dtype.bits - 1)))
        grid = fp.requantize(grid, factor.to(x.device), -1, qint8.min, qint8.max)
    return grid * INPUT_SCALE
