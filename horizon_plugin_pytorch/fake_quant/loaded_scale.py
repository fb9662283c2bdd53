"""The scale in a checkpoint, which may be for another number format than that of the model that loads it."""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase

_HALF_RANGES = tuple((dtype.max - dtype.min) / 2 for dtype in (qint8, qint16))
_OBSERVED = 1e-4  # how far the steps of an observed scale are from those of its format, as a share: rounding


class LoadedScale(Enum):
    """What became of a checkpoint's scale.

    AS_IT_IS: it was taken. CONVERTED: it was for another number format, and its range was taken. DOUBTFUL: it was
    taken, and may be for another format, which the checkpoint does not say. IGNORED: the model has a given one.
    """

    AS_IT_IS = "as it is"
    CONVERTED = "converted"
    DOUBTFUL = "doubtful"
    IGNORED = "ignored"


def end_of_range(state_dict: dict, prefix: str, scale: Tensor) -> Tensor | None:
    """The largest magnitudes that a state dict has beside a scale, if they can be its range."""
    ends = [state_dict.get(f"{prefix}activation_post_process.{name}") for name in ("min_val", "max_val")]
    if any(not isinstance(end, Tensor) or end.shape != scale.shape or not bool(end.isfinite().all()) for end in ends):
        return None
    return torch.maximum(ends[0].abs(), ends[1].abs()).to(scale.device)  # type: ignore[union-attr, arg-type]


def fitted_scale(
    scale: Tensor, largest: Tensor | None, quant_range: Tensor | None, observer: ObserverBase, finest: float
) -> tuple[LoadedScale, Tensor | None]:
    """What becomes of a checkpoint's scale in the format of a model, and the scale that takes its place, if one does.

    Args:
        largest: the end of its range, if the checkpoint has one.
        quant_range: the smallest and largest integer that it was for; older checkpoints do not say it, and then it is
            guessed from the range.
        observer: of the model.
        finest: the smallest scale that the model takes from a range.
    """
    if isinstance(quant_range, Tensor) and quant_range.shape == (2,):
        low, high = quant_range.tolist()
        return _in_format(scale, (high - low) / 2, largest, observer, finest)
    return (LoadedScale.AS_IT_IS, None) if largest is None else _guessed(scale, largest, observer, finest)


def _in_format(
    scale: Tensor, half_range: float, largest: Tensor | None, observer: ObserverBase, finest: float
) -> tuple[LoadedScale, Tensor | None]:
    """The scale of a format with so many steps to its largest magnitude, in that of the model; the range stays.

    A scale that was observed follows from the range, by the model's rule; one that was given covers the same.
    """
    mine = (observer.quant_max - observer.quant_min) / 2
    if 0.5 < half_range / mine < 2:
        return LoadedScale.AS_IT_IS, None
    fitting = scale * (half_range / mine)
    if largest is not None:
        rules = half_range, math.floor(half_range)  # the second is that of `unclipped`
        is_observed = torch.stack([(largest / scale / half - 1).abs() < _OBSERVED for half in rules]).any(0)
        fitting = torch.where(is_observed, largest / observer.half_range, fitting)
    return LoadedScale.CONVERTED, fitting.clamp(min=finest)


def _guessed(
    scale: Tensor, largest: Tensor, observer: ObserverBase, finest: float
) -> tuple[LoadedScale, Tensor | None]:
    """Find the format by the range: an observed scale has exactly as many steps as its format says.

    A scale that was given is not that of its range, and stays as it is.
    """
    known = (largest > 0) & (scale > finest)
    if not bool(known.any()):
        return LoadedScale.AS_IT_IS, None
    steps = largest[known] / scale[known]
    mine = observer.half_range
    nearest = min((mine, *_HALF_RANGES), key=lambda half: abs(float(steps.log().median()) - math.log(half)))
    if bool(((steps / nearest - 1).abs() < _OBSERVED).all()):
        return _in_format(scale, nearest, largest, observer, finest)
    return LoadedScale.AS_IT_IS if 0.5 < nearest / mine < 2 else LoadedScale.DOUBTFUL, None


show_at("quantization.fake_quantize", LoadedScale)
