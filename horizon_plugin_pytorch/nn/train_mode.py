"""Modules that compute something else in train mode, and a word where a converted model is in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.errors import QuantizationWarning, at, warn
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.hooks import keep


def depends_on_mode(module: nn.Module) -> bool:
    """Does a module compute something else in train mode?

    >>> [depends_on_mode(m) for m in (nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(2), nn.ReLU())]
    [True, False, True, False]
    """
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats


class ModeHook:
    """Says that a float part of a converted model runs in train mode, without gradients.

    On integers a Dropout does nothing, whatever the mode.

    Args:
        path: the part's.
        said: the paths of the model for which it was said; once is enough.
    """

    def __init__(self, path: str, said: list[str]) -> None:
        self.path, self.said = path, said

    def __call__(self, module: nn.Module, args: Any) -> None:
        is_wrong = module.training and not torch.is_grad_enabled() and not any(isinstance(x, QTensor) for x in args)
        if is_wrong and not self.said:
            self.said.append(self.path)
            warn(
                f"`{type(module).__name__}` {at(self.path)} of a converted model is run without gradients in train "
                "mode: a batch norm takes the statistics of these data, and dropout drops values. Call `model.eval()` "
                "before you evaluate.",
                QuantizationWarning,
            )


class TrainingHook:
    """Says that a converted model without float parts is about to be trained: it has nothing that could be."""

    def __init__(self) -> None:
        self.was_said = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        is_trained = module.training and torch.is_grad_enabled() and not self.was_said
        if is_trained and not any(p.requires_grad for p in module.parameters()):
            self.was_said = True
            warn(
                f"`{type(module).__name__}` is a converted model and runs in train mode with gradients: integers have "
                "none, and nothing of it trains. Train the QAT model and convert it again; to evaluate, call "
                "`model.eval()`.",
                QuantizationWarning,
            )


def watch_training(model: nn.Module) -> None:
    """Let a converted model say that it does not train."""
    keep(model.register_forward_pre_hook, TrainingHook())


def watch_mode(model: nn.Module) -> None:
    """Let the float parts of a converted model say that they are in train mode."""
    said: list[str] = []
    for path, module in model.named_modules():
        if depends_on_mode(module):
            keep(module.register_forward_pre_hook, ModeHook(path, said))
