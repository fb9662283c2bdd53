"""Bias correction: what rounding moves on average, the bias takes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.quantization.batches import Process, take_batches
from horizon_plugin_pytorch.quantization.layers import (
    LayerCall,
    LayerGroup,
    LayerWalk,
    error_of_calls,
    left_out_lines,
)


@dataclass(frozen=True)
class CorrectedLayer:
    """What was done to one layer.

    Args:
        layer: its path; layers that share a bias are one, with all their paths.
        before, after: relative error of its output.
    """

    layer: str
    before: float
    after: float


@dataclass
class BiasCorrectionResult:
    """What `correct_bias` did, in the order in which the layers run; printing it gives a table.

    Args:
        layers: what was done to each.
        left_out: by path, why a layer was not treated.
    """

    layers: list[CorrectedLayer] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [[r.layer, f"{r.before:.4%}", f"{r.after:.4%}"] for r in self.layers]
        table = tabulate(rows, headers=["layer", "error before", "error after"], disable_numparse=True)
        return table + left_out_lines(self.left_out)


@torch.inference_mode(False)
@torch.no_grad()
def correct_bias(
    calib_model: nn.Module, batches: Iterable[Any], batch_process_func: Process | None = None
) -> BiasCorrectionResult:
    """Move the biases of a calibrated model so that every layer's mean output is that of the float model.

    Layers are treated in the order in which they run, on the inputs that they get in the quantized model; a layer whose
    error this does not lessen keeps its bias. A layer without bias gets one. The float model is that before this call,
    an earlier one or `weight_reconstruction` changed it, unless it was trained or loaded since.

    Args:
        calib_model: calibrated; changed in place, and left in eval mode and in the VALIDATION state.
        batches: a list, tuple or generator of inputs, or a DataLoader; all are used, and kept meanwhile.
        batch_process_func: makes the model's inputs of what a DataLoader gives.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, calibrate, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.NASH_E)
    >>> net = prepare_qat_fx(QuantWrapper(nn.Linear(16, 4)), {"": get_default_qconfig()})
    >>> data = [torch.rand(32, 16) for _ in range(4)]
    >>> _ = calibrate(net, data)
    >>> row = correct_bias(net, data).layers[0]
    >>> row.after <= row.before
    True
    """
    data = take_batches(calib_model, batches, None, batch_process_func, "correct_bias")
    walk = LayerWalk(calib_model, data, "correct_bias", "bias")
    layers = [_correct(group, calls) for group, calls in walk]
    return BiasCorrectionResult(layers, walk.left_out)


def _correct(group: LayerGroup, calls: Sequence[LayerCall]) -> CorrectedLayer:
    rounded = {layer: layer.weight_fake_quant.round_weight(*layer.deployed()[::2]) for layer in group.layers}
    missing = [_channel_means(call.wanted - call.output(rounded[call.layer]), call.layer) for call in calls]
    shift = torch.stack(missing).mean(0)
    before = error_of_calls(calls, lambda call: call.output(rounded[call.layer]))
    after = error_of_calls(calls, lambda call: call.output(rounded[call.layer], shift))
    if not after < before:
        return CorrectedLayer(group.path, before, before)
    group.rewrite(lambda layer: layer.move_bias(shift))
    return CorrectedLayer(group.path, before, after)


def _channel_means(x: Tensor, layer: QATGemm) -> Tensor:
    """The mean of each output channel, the last axis of a Linear, the one before the positions of a convolution."""
    channel = x.dim() - layer.weight.dim() + 1
    return x.mean([axis for axis in range(x.dim()) if axis != channel])
