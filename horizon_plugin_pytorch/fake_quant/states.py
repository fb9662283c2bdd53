"""Switching the fake quantizers of a model: what they observe, and whether they round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import QuantizationWarning, require_module, warn_once
from horizon_plugin_pytorch.fake_quant.dynamic import DynamicFakeQuantize
from horizon_plugin_pytorch.fake_quant.fake_quantize import SWITCHES, FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.statistics.clipping import tell_clipped


@contextmanager
def observe_together(quantizers: Sequence[FakeQuantize]) -> Iterator[None]:
    """Let all that is seen inside, such as the steps of a sequence, count as one batch; nothing is rounded inside."""
    observing = [q for q in quantizers if q.is_observing]
    for quantizer in observing:
        quantizer._gathered = []
    try:
        yield
        for quantizer in observing:
            if quantizer._gathered:
                quantizer.observe(torch.cat([x.flatten() for x in quantizer._gathered]))
    finally:
        for quantizer in observing:
            quantizer._gathered = None


@contextmanager
def keep_ranges(quantizers: Sequence[FakeQuantize]) -> Iterator[None]:
    """Round, or not, as the state says, but let ranges and scales stay as they are."""
    for quantizer in quantizers:
        quantizer._keeps_range = True
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer._keeps_range = False


@contextmanager
def frozen_scales(model: nn.Module) -> Iterator[None]:
    """In here scales of activations and weights do not follow what a model in the QAT state is shown.

    Those that come from no data yet do.

    >>> fq = FakeQuantize()
    >>> fq.set_qparams(0.5)
    >>> with frozen_scales(fq):
    ...     fq(torch.ones(2)).scale
    tensor([0.5000])
    """
    learnt = [m for m in model.modules() if isinstance(m, FakeQuantize) and m.is_quantizing and m.has_statistics]
    for quantizer in learnt:
        quantizer._is_frozen = True
    try:
        yield
    finally:
        for quantizer in learnt:
            quantizer._is_frozen = False


def set_fake_quantize(model: nn.Module, state: FakeQuantState) -> None:
    """Put a model, or a part of it, into a fake-quantization state.

    >>> set_fake_quantize(FakeQuantize(), FakeQuantState.VALIDATION)
    """
    require_module(model, "set_fake_quantize")
    if not isinstance(state, FakeQuantState):
        names = ", ".join(f"FakeQuantState.{s.name}" for s in FakeQuantState)
        raise TypeError(f"set_fake_quantize: state must be one of {names}, got {state!r}.")
    clipped: dict[str, float] = {}
    for module in model.modules():
        if isinstance(module, FakeQuantize) and state is FakeQuantState.VALIDATION and module.is_calibrating:
            observer = module.activation_post_process
            if observer.clipping > observer.clipped_from:
                clipped[observer.owner] = observer.clipping
        if isinstance(module, (FakeQuantize, DynamicFakeQuantize)):
            module.set_state(state)
        if hasattr(type(module), "forget_twin"):  # a module takes long to say that it has no such attribute
            module.forget_twin()  # type: ignore[operator]
    tell_clipped(clipped, "calibration")
    # The tools ask for the float state of any model.
    if state is not FakeQuantState._FLOAT and not any(_has_state(module) for module in model.modules()):
        warn_once(
            f"set_fake_quantize: `{type(model).__name__}` is a float model and has no states: nothing has changed. "
            "Give it the result of `prepare`, `prepare_qat_fx` or `prepare_qat`, which is another model.",
            QuantizationWarning,
        )


def _has_state(module: nn.Module) -> bool:
    """Is it a fake quantizer, or a module of a prepared or converted model? The latter have one state."""
    is_quantizer = isinstance(module, (FakeQuantize, DynamicFakeQuantize))
    return is_quantizer or hasattr(type(module), "forget_twin") or hasattr(type(module), "from_qat")


def get_fake_quantize(model: nn.Module) -> FakeQuantState | None:
    """The fake-quantization state of a model, or of a part of it; None if its parts differ, or have none.

    A run of calibration and an evaluation look the same to the model: nothing warns of an accuracy that was measured
    in the CALIBRATION state, which is that of float. Scales that are fixed have no state of their own.

    >>> quantizer = FakeQuantize()
    >>> set_fake_quantize(quantizer, FakeQuantState.VALIDATION)
    >>> get_fake_quantize(quantizer).name
    'VALIDATION'
    """
    require_module(model, "get_fake_quantize")
    quantizers = [module for module in model.modules() if isinstance(module, FakeQuantize)]
    learning = [module for module in quantizers if not module.is_fixed] or quantizers
    found = {(module._flag("observer_enabled"), module._flag("fake_quant_enabled")) for module in learning}
    return next((state for state, switches in SWITCHES.items() if found == {switches}), None)


def freeze_qat_module(model: nn.Module) -> None:
    """Keep a model, or a part of it, as it is while the rest trains: weights, scales and batch-norm statistics.

    It is put into eval mode and the VALIDATION state, and its parameters want no gradient any more. Call it after
    ``model.train()`` and ``set_fake_quantize(model, FakeQuantState.QAT)``, which would undo a part of it, and before
    the model goes into DistributedDataParallel or an optimizer.

    >>> backbone = FakeQuantize()
    >>> freeze_qat_module(backbone)
    >>> backbone.is_observing, backbone.training
    (False, False)
    """
    require_module(model, "freeze_qat_module")
    model.eval().requires_grad_(False)
    set_fake_quantize(model, FakeQuantState.VALIDATION)


show_at(
    "quantization.fake_quantize", observe_together, keep_ranges, set_fake_quantize, get_fake_quantize, freeze_qat_module
)
