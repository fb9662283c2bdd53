"""Rungs of `tune` beside number formats: the float model rewritten first; rounding learned and training afterwards."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.tuning.outputs import Wanted, apart, real_outputs, run
from horizon_plugin_pytorch.calibration.batches import run_batch
from horizon_plugin_pytorch.calibration.centering import center_norms
from horizon_plugin_pytorch.calibration.equalization import equalize
from horizon_plugin_pytorch.calibration.smoothing import smooth_norms
from horizon_plugin_pytorch.calibration.weight_reconstruction import weight_reconstruction
from horizon_plugin_pytorch.capture.plain_model import copy_model
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import frozen_scales, set_fake_quantize
from horizon_plugin_pytorch.runtime.results import own_tensors

REWRITES: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "equalize": equalize,
    "center_norms": center_norms,
    "smooth_norms": smooth_norms,
}
_RATE = 3e-3  # the first step, as a share of a parameter's size
_LEAST = 1e-3  # the size that counts where a parameter is about zero


Rung = Callable[[nn.Module, nn.Module], Any]


@dataclass(frozen=True)
class Learning:
    """What the answer learns at last, and from which batches."""

    adaround: bool = False
    train_steps: int = 0
    batches: Sequence[Any] = ()

    @classmethod
    def of(cls, adaround: bool, train_steps: int, batches: Sequence[Any]) -> Learning:
        """Check the arguments.

        Raises:
            QuantizationConfigError: says what is wrong.
        """
        if isinstance(train_steps, bool) or not isinstance(train_steps, int) or train_steps < 0:
            raise QuantizationConfigError(f"tune: train_steps must be a whole number from 0, got {train_steps!r}.")
        if (adaround or train_steps) and not batches:
            raise QuantizationConfigError(
                "tune: adaround and train_steps learn from batches that nothing is measured on, and all are measured "
                "on. Give more batches, fewer `samples`, or a function `evaluate` with data of its own."
            )
        return cls(bool(adaround), train_steps, tuple(batches) if adaround or train_steps else ())

    @property
    def key(self) -> str:
        """What the result depends on, beside model and data."""
        return f"{self.train_steps} {len(self.batches)}"

    @property
    def rungs(self) -> dict[str, Rung]:
        """What to do, by name: functions of the prepared model and the float model."""
        found: dict[str, Rung] = {}
        if self.adaround:
            found["AdaRound"] = lambda model, _: weight_reconstruction(model, list(self.batches))
        if self.train_steps:
            found["training"] = lambda model, net: train_towards_float(model, net, self.batches, self.train_steps)
        return found


def rewritten(
    model: nn.Module, batches: list[Any], rewrites: Sequence[str]
) -> tuple[list[nn.Module], dict[str, dict[str, str]]]:
    """Copies of a model after each of the functions that rewrite it, the last one after all; what each has left."""
    found: list[nn.Module] = []
    left: dict[str, dict[str, str]] = {}
    for name in rewrites:
        copied = copy_model(found[-1] if found else model, "tune").eval()
        left[name] = REWRITES[name](copied, batches).left
        found.append(copied)
    return found, left


def train_towards_float(model: nn.Module, float_model: nn.Module, batches: Sequence[Any], steps: int) -> None:
    """Train a calibrated model so that its outputs come closer to those of the float model; scales stay.

    Batches are taken in their order, again and again; nothing is drawn by chance, and Dropout and batch norms are as
    when the model is deployed. The steps of each parameter are a share of its size, and fall to zero.

    Raises:
        QuantizationConfigError: there is nothing to learn, or nothing to learn from; or what was learned is NaN.
    """
    wanted = Wanted.of(run(float_model.eval(), batches))
    learned = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    if not learned:
        raise QuantizationConfigError("no parameter of the model is to be trained: requires_grad of all is False.")
    set_fake_quantize(model.eval(), FakeQuantState.QAT)
    sizes = [max(float(p.detach().square().mean().sqrt()), _LEAST) for p in learned]
    optimizer = torch.optim.Adam([{"params": [p], "lr": _RATE * size} for p, size in zip(learned, sizes, strict=True)])
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 + 0.5 * math.cos(math.pi * n / steps))
    with frozen_scales(model), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for step in range(steps):
            number = step % len(batches)
            outputs = real_outputs(run_batch(model, own_tensors(batches[number])))
            loss = _loss(outputs, wanted, number)
            if not loss.requires_grad:
                raise QuantizationConfigError("no output of the model has a gradient, so that nothing can be learned.")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
    for parameter in learned:
        parameter.grad = None
        if not bool(parameter.isfinite().all()):
            raise QuantizationConfigError("parameters became NaN or infinite: a gradient of the model does not exist.")
    set_fake_quantize(model, FakeQuantState.VALIDATION)


def _loss(outputs: Sequence[Tensor], wanted: Wanted, number: int) -> Tensor:
    """The squared relative error of the outputs on one batch."""
    total = torch.zeros(())
    for found, expected, weight in zip(outputs, wanted.outputs[number], wanted.weights, strict=True):
        if weight and found.requires_grad:
            total = total + (apart(found, expected) * weight).square().sum()
    return total


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """What a model has learned, to be kept."""
    return copy.deepcopy(model.state_dict())
