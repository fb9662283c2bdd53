"""Post-processing of the second stage of two-stage detectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.boxes import clip, decode, require_real
from horizon_plugin_pytorch.nn.nms import select


class RcnnPostProcess(nn.Module):
    """Boxes of a Faster R-CNN's second stage; it computes in float, after the DeQuantStub.

    Args:
        image_size: height and width to clip boxes to, unless `forward` gets `image_sizes`.
        nms_threshold: of suppression within a class (intersection over union).
        box_filter_threshold: a box needs a higher score.
        num_classes: classes without the background.
        post_nms_top_k: boxes of each image.
        delta_mean, delta_std: regressions are ``delta * delta_std + delta_mean``.

    `forward` takes `boxes` (proposals: for each image ``[n, 4]``, left, top, right, bottom), `scores`
    ``[sum of n, num_classes + 1, 1, 1]`` and `deltas` ``[sum of n, (num_classes + 1) * 4, 1, 1]``, the background
    first. Scores are used as they are: apply softmax before. It gives ``[N, post_nms_top_k, 6]``: left, top, right,
    bottom, score, and class counted from 0 without the background; highest score first, padded with -1.
    """

    def __init__(
        self,
        image_size: Sequence[int] = (1024, 1024),
        nms_threshold: float = 0.3,
        box_filter_threshold: float = 0.1,
        num_classes: int = 1,
        post_nms_top_k: int = 100,
        delta_mean: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
        delta_std: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self.nms_threshold = nms_threshold
        self.box_filter_threshold = box_filter_threshold
        self.num_classes = num_classes
        self.post_nms_top_k = post_nms_top_k
        self.delta_mean = tuple(delta_mean)
        self.delta_std = tuple(delta_std)

    def forward(self, boxes: Sequence[Tensor], scores: Tensor, deltas: Tensor, image_sizes: Any = None) -> Tensor:
        require_real("RcnnPostProcess", boxes, scores, deltas)
        proposals = [x.reshape(-1, 4) for x in boxes]
        counts = [len(x) for x in proposals]
        if scores.shape[0] != sum(counts) or scores[:1].numel() not in (0, self.num_classes + 1):
            raise ValueError(
                f"RcnnPostProcess: scores of {sum(counts)} boxes and {self.num_classes} + 1 classes are wanted, got "
                f"shape {tuple(scores.shape)}."
            )
        mean, std = deltas.new_tensor(self.delta_mean), deltas.new_tensor(self.delta_std)
        moves = (deltas.reshape(-1, self.num_classes + 1, 4) * std + mean)[:, 1:].split(counts)
        values = scores.reshape(-1, self.num_classes + 1)[:, 1:].split(counts)
        sizes = [self.image_size] * len(counts) if image_sizes is None else image_sizes
        found = [self._image(*x) for x in zip(proposals, values, moves, sizes, strict=True)]
        return torch.stack(found) if found else scores.new_zeros(0, self.post_nms_top_k, 6)

    def _image(self, proposals: Tensor, scores: Tensor, deltas: Tensor, size: Any) -> Tensor:
        rows, classes = (scores > self.box_filter_threshold).nonzero().unbind(1)
        boxes, values = clip(decode(proposals[rows], deltas[rows, classes]), size), scores[rows, classes]
        kept = select(boxes, values, classes, self.nms_threshold, None, self.post_nms_top_k)
        out = scores.new_full((self.post_nms_top_k, 6), -1.0)
        out[: len(kept)] = torch.cat([boxes, values[:, None], classes[:, None].to(values.dtype)], dim=1)[kept]
        return out
