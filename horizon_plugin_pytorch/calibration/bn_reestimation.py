"""New statistics for batch normalisation, measured on data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm import tqdm

from horizon_plugin_pytorch.calibration.batches import Process, length_of, run_batch, stream_batches
from horizon_plugin_pytorch.errors import (
    CalibrationError,
    CalibrationWarning,
    QuantizationConfigError,
    require_module,
    warn,
)
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize


@torch.no_grad()
def reestimate_bn(model: nn.Module, batches: Iterable[Any], batch_process_func: Process | None = None) -> list[str]:
    """Replace the running statistics of all batch norms by the means over batches, each of which counts the same.

    In a float model, before it is prepared: statistics of the data as they are in deployment, without augmentation and
    without the lag of a moving average. In a prepared model whose batch norms are kept (`QATMode.WithBN`,
    `QATMode.WithBNReverseFold`), after calibration or training: statistics of what the rounded weights and inputs give.
    Scales, modes and states stay as they are.

    Args:
        model: changed in place.
        batches: a list, tuple or generator of inputs, or a DataLoader; all are used, one by one: none is kept.
            Statistics need batches of some size.
        batch_process_func: makes the model's inputs of what a DataLoader gives.

    Returns:
        paths of the batch norms that were measured. One that no batch reaches keeps its statistics, with a warning.

    Raises:
        CalibrationError: a batch does not run, or gives no finite statistics; all statistics stay as they were.

    >>> net = nn.Sequential(nn.BatchNorm1d(1))
    >>> reestimate_bn(net, [torch.tensor([[2.0], [4.0]]), torch.tensor([[4.0], [6.0]])])
    ['0']
    >>> net[0].running_mean
    tensor([4.])
    """
    require_module(model, "reestimate_bn")
    norms = {path: m for path, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}
    quantizers = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    if not norms:
        raise QuantizationConfigError(
            "reestimate_bn: the model has no batch norm with running statistics"
            + (
                "; prepare folds them away unless `set_qat_mode(QATMode.WithBN)` is called before."
                if quantizers
                else "."
            )
        )
    if any(q.is_quantizing and not q.has_statistics for q in quantizers):
        raise CalibrationError("reestimate_bn: some modules have no scale; calibrate the model before.")
    data = stream_batches(model, batches, None, batch_process_func, "reestimate_bn")
    with _measuring(model, list(norms.values()), quantizers):
        for index, batch in enumerate(tqdm(data, total=length_of(batches), desc="reestimate_bn", disable=None)):
            try:
                run_batch(model, batch)
            except Exception as error:
                raise CalibrationError(
                    f"reestimate_bn: the model does not run on batch {index}: {error}. The statistics are as they were."
                ) from error
            _require_finite(norms, index)
        reached = [path for path, norm in norms.items() if norm.num_batches_tracked]
    unseen = [f"`{path}`" for path in norms if path not in reached]
    if unseen:
        warn(
            f"reestimate_bn: no batch reached {', '.join(unseen)}; the statistics stay as they were.",
            CalibrationWarning,
        )
    return reached


def _require_finite(norms: dict[str, _BatchNorm], batch: int) -> None:
    for path, norm in norms.items():
        if not all(bool(b.isfinite().all()) for b in (norm.running_mean, norm.running_var) if b is not None):
            raise CalibrationError(
                f"reestimate_bn: batch {batch} gives `{path}` no finite statistics. Leave it out, or look for a "
                "division by zero or an overflow in the model. The statistics are as they were."
            )


@contextmanager
def _measuring(model: nn.Module, norms: list[_BatchNorm], quantizers: list[FakeQuantize]) -> Iterator[None]:
    """Only batch norms train; the rest rounds, with its scales as they are.

    After an error all have the statistics of before, else those that nothing has reached.
    """
    modes = [(m, m.training) for m in model.modules()]
    momenta = [norm.momentum for norm in norms]
    statistics = [{name: b.clone() for name, b in norm.named_buffers()} for norm in norms]
    switches = [(q, q.is_observing, q.is_quantizing, q.activation_post_process.averaging_constant) for q in quantizers]
    model.eval()
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # type: ignore[assignment] # the mean of all batches
    # Exact integers need fixed statistics, so this is the training route; nothing new is averaged into a range.
    set_fake_quantize(model, FakeQuantState.QAT)
    for quantizer in quantizers:
        quantizer.activation_post_process.averaging_constant = 0.0
    is_done = False
    try:
        yield
        is_done = True
    finally:
        for norm, before in zip(norms, statistics, strict=True):
            if not (is_done and norm.num_batches_tracked):
                norm.load_state_dict(before, strict=False)
        for module, mode in modes:
            module.training = mode
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for quantizer, observes, quantizes, constant in switches:
            quantizer.enable_observer(observes)
            quantizer.enable_fake_quant(quantizes)
            quantizer.activation_post_process.averaging_constant = constant
        for module, _ in modes:
            forget = getattr(module, "forget_twin", None)
            if forget is not None:
                forget()
