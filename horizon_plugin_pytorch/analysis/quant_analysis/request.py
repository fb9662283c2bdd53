"""What `QuantAnalysis` is asked to analyse, checked: the type of the model, and the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.analysis.profile.stages import PREPARED, stage_of
from horizon_plugin_pytorch.errors import CheckError, QuantizationConfigError, QuantizationWarning, warn

TYPES = {
    "fake_quant": "a calibration or QAT model",
    "pre_export": "what `hbdk4.pre_export` gives",
    "export": "the integer graph that `hbdk4.export` gives",
    "convert": "a converted model, or its integer graph",
}
_OF_TYPE = {"fake_quant": PREPARED, "pre_export": PREPARED, "convert": ("quantized",)}


def type_of(given: str, model: Any, who: str) -> str:
    """The type of an analysed model, under its present name.

    Raises:
        QuantizationConfigError: there is none such, or the model is of another.
    """
    if given == "pt_lut":
        warn(f'{who}: "pt_lut" is the old name of "pre_export".', QuantizationWarning)
        given = "pre_export"
    if given not in TYPES:
        raise QuantizationConfigError(f"{who}: analysis_model_type is one of {', '.join(TYPES)}; got {given!r}.")
    if not isinstance(model, nn.Module):
        return given
    stage = stage_of(model)
    if given in _OF_TYPE and stage not in _OF_TYPE[given]:
        fitting = next((name for name, stages in _OF_TYPE.items() if stage in stages), None)
        advice = f"give {fitting!r}" if fitting else "prepare and calibrate it first"
        raise QuantizationConfigError(
            f"{who}: {given!r} analyses {TYPES[given]}; this is a {stage} model: {advice}. Preparation may work in "
            "place: keep `copy.deepcopy(model)` of the float model from before as the baseline."
        )
    return given


def devices_of(ids: int | Sequence[int] | None, who: str) -> tuple[str | None, str | None]:
    """The devices of both models; None leaves them where they are.

    Raises:
        TypeError: these are no numbers of GPUs.
        CheckError: the machine has no such GPU.
    """
    if ids is None:
        return None, None
    several = [ids] if isinstance(ids, int) else list(ids)
    if not 1 <= len(several) <= 2 or not all(isinstance(i, int) and i >= 0 for i in several):
        raise TypeError(f"{who}: device_ids is the number of a GPU, or a list of one or two; got {ids!r}.")
    if max(several) >= torch.cuda.device_count():
        raise CheckError(
            f"{who}: device_ids is {ids!r} and this machine has {torch.cuda.device_count()} GPUs; leave it out to run "
            "where the models are."
        )
    return f"cuda:{several[0]}", f"cuda:{several[-1]}"
