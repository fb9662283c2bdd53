"""What is known, and was said, of a prepared model as a whole; its modules share it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.errors import QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nn.train_mode import depends_on_mode
from horizon_plugin_pytorch.runtime.located import PlacedModule
from horizon_plugin_pytorch.statistics.clipping import CLIPPED


class ModelNotes:
    """Warnings of a prepared model, each of which is said once.

    Args:
        depends_on_mode: does the model compute something else in train mode: batch norms, dropout?
    """

    def __init__(self, depends_on_mode: bool = False) -> None:
        self.depends_on_mode = depends_on_mode
        self._has_trained = False
        self._said: set[str] = set()

    def say(self, kind: str, message: str, category: type[Warning] = QuantizationWarning) -> None:
        """Warn, if nothing of this kind was said before."""
        if kind not in self._said:
            self._said.add(kind)
            warn(message, category)

    def watch(self, stub: Any, quantizer: FakeQuantize) -> None:
        """A stub runs: does the state of the model fit what is done with it?"""
        is_learning = quantizer.is_observing and quantizer.is_quantizing and not quantizer._keeps_range
        if torch.is_grad_enabled():
            self._has_trained = self._has_trained or (stub.training and is_learning)
        elif stub.training:
            if self.depends_on_mode and (quantizer.is_observing or quantizer.is_quantizing):  # not if it is looked at
                self.say(
                    "train mode",
                    f"the model of `{stub.path}` is run without gradients in train mode: its batch norms take the "
                    "statistics of these data, and dropout drops values. Call `model.eval()` before you calibrate or "
                    "evaluate.",
                )
        elif self._has_trained and is_learning:
            self.say(
                "QAT",
                f"the model of `{stub.path}` was trained and is evaluated in the QAT state: its scales go on following "
                "the data, and the numbers are near those of deployment, not equal. Call `set_fake_quantize(model, "
                "FakeQuantState.VALIDATION)` before you evaluate, and FakeQuantState.QAT before you train on.",
            )
        elif quantizer.state_is_loaded and quantizer.is_observing and not quantizer.is_quantizing:
            self.say(
                "loaded",
                f"the model of `{stub.path}` is in the CALIBRATION state, which the checkpoint that it has loaded was "
                "saved in: it computes in float, and its ranges follow the data. Call `set_fake_quantize(model, "
                "FakeQuantState.VALIDATION)` to evaluate it; `load_calib_state_dict` leaves the state as it is.",
            )


def share_notes(model: nn.Module) -> None:
    """Give all QAT modules of a prepared model one set of notes."""
    notes = ModelNotes(any(map(depends_on_mode, model.modules())))
    for module in model.modules():
        if hasattr(type(module), "notes"):
            module.notes = notes  # type: ignore[assignment]
    _set_limits(model, is_part=False)


def _set_limits(module: nn.Module, is_part: bool) -> None:
    """Tell observers from what clipping on there is a warning.

    Parts of an operator, such as the variance inside a layer norm, vary as they may; what enters the model should not.
    """
    limit = math.inf if is_part else getattr(module, "clipped_from", CLIPPED)
    is_operator = isinstance(module, PlacedModule)
    for child in module.children():
        if isinstance(child, FakeQuantize):
            child.activation_post_process.clipped_from = limit
        else:
            _set_limits(child, is_part or is_operator)
