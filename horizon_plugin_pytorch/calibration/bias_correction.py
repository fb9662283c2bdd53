"""Bias correction: what rounding moves on average, the bias takes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.calibration.batches import Process, take_batches
from horizon_plugin_pytorch.calibration.layers import (
    LayerCall,
    LayerGroup,
    LayerWalk,
    error_of_calls,
    skipped_lines,
)
from horizon_plugin_pytorch.errors import CalibrationWarning, require_module, warn
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.tables import Table

_HELD_BACK = 4  # every so many batches, one is held back
_STEPS = 40  # of the search for a shift, at most; most often five


@dataclass(frozen=True)
class CorrectedLayer:
    """What was done to one layer.

    Args:
        layer: its path; layers that share a bias are one, with all their paths.
        before, after: relative error of its output, on the data that were held back; the same if its bias stays.
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
        before, after: relative error of the model's outputs on all batches.
    """

    layers: list[CorrectedLayer] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    before: float = 0.0
    after: float = 0.0

    def __str__(self) -> str:
        rows = [[r.layer, f"{r.before:.4%}", f"{r.after:.4%}"] for r in self.layers]
        rows.append(["the model's outputs", f"{self.before:.4%}", f"{self.after:.4%}"])
        table = Table(["layer", "error before", "error after"], rows).text()
        return table + skipped_lines(self.left_out)


@torch.inference_mode(False)
@torch.no_grad()
def correct_bias(
    calib_model: nn.Module, batches: Iterable[Any], batch_process_func: Process | None = None
) -> BiasCorrectionResult:
    """Move the biases of a calibrated model so that the mean of what every layer gives is that of the float model.

    Layers are treated in the order in which they run, on the inputs that they get in the quantized model. The mean is
    that after the layer's activation, channel by channel: it is what the next layer reads. One batch of four (one of
    two or three) is held back, of a single batch a quarter of its samples; a layer whose error on these does not get
    less keeps its bias. So do all, with a warning, if the outputs of the model do not come closer to float. A layer
    without bias gets one. The float model is that before this call, an earlier one or `weight_reconstruction` changed
    it, unless it was trained or loaded since.

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
    require_module(calib_model, "correct_bias")
    data = take_batches(calib_model, batches, None, batch_process_func, "correct_bias")
    walk = LayerWalk(calib_model, data, "correct_bias", "bias")
    before = walk.output_error()
    layers: list[CorrectedLayer] = []
    undo: list[Callable[[], None]] = []
    for group, calls in walk:
        seen, held = _split(calls)
        if not held:
            walk.left_out[group.path] = "one sample reaches it, and none could be held back"
            continue
        kept = _kept_bias(group)
        layers.append(_correct(group, seen, held))
        undo.append(kept)
    after = walk.output_error()
    if layers and after > before:
        for restore in undo:
            restore()
        warn(
            f"correct_bias: the layers came closer to the float model, but the outputs did not (error {before:.4%}, "
            f"then {after:.4%}): all biases are as they were. Try `weight_reconstruction`, or more batches.",
            CalibrationWarning,
        )
        layers, after = [replace(layer, after=layer.before) for layer in layers], before
    return BiasCorrectionResult(layers, walk.left_out, before, after)


def _split(calls: Sequence[LayerCall]) -> tuple[list[LayerCall], list[LayerCall]]:
    """What a layer learns from, and what it is judged by."""
    batches = sorted({call.batch for call in calls})
    if len(batches) > 1:
        chosen = batches[_HELD_BACK - 1 :: _HELD_BACK] or batches[-1:]
        return [c for c in calls if c.batch not in chosen], [c for c in calls if c.batch in chosen]
    parted = [(call, max(len(call.x) // _HELD_BACK, 1)) for call in calls if call.has_rows]
    return [c.rows(slice(None, -n)) for c, n in parted], [c.rows(slice(-n, None)) for c, n in parted]


def _kept_bias(group: LayerGroup) -> Callable[[], None]:
    """What gives the layers of a group their bias back; one that was added is zero."""
    kept = [(layer, None if layer.moved_bias is None else layer.moved_bias.clone()) for layer in group.layers]
    originals = [layer.__dict__.get("_original") for layer in group.layers]

    def restore() -> None:
        for (layer, bias), before in zip(kept, originals, strict=True):
            if layer.moved_bias is not None:
                layer.moved_bias.copy_(torch.zeros(()) if bias is None else bias)
            layer.__dict__["_original"] = before
            layer.forget_twin()

    return restore


def _correct(group: LayerGroup, seen: Sequence[LayerCall], held: Sequence[LayerCall]) -> CorrectedLayer:
    rounded = {layer: layer.weight_fake_quant.round_weight(*layer.deployed()[::2]) for layer in group.layers}
    shift = _shift([(call, call.output(rounded[call.layer])) for call in seen])
    before = error_of_calls(held, lambda call: call.output(rounded[call.layer]))
    after = error_of_calls(held, lambda call: call.output(rounded[call.layer], shift))
    if not after < before:
        return CorrectedLayer(group.path, before, before)
    group.rewrite(lambda layer: layer.move_bias(shift))
    return CorrectedLayer(group.path, before, after)


def _shift(outputs: Sequence[tuple[LayerCall, Tensor]]) -> Tensor:
    """What to add to each channel so that its mean after the activation is the wanted one.

    Before the activation the means could be had at once. But with most values below zero, where a ReLU makes them all
    alike, that mends what nobody reads, and moves what the next layer gets. After it, the mean grows with the shift,
    and at the ends of what single values lack it is too small and too large: Newton's steps find the place, halving
    the interval where they would leave it, as in a channel of which nothing passes yet.
    """
    wanted, _ = _means([(call, call.wanted) for call, _ in outputs])
    lacking = [_channels_first(call.wanted - out, call.layer) for call, out in outputs]
    low = torch.stack([x.amin(1) for x in lacking]).amin(0)
    high = torch.stack([x.amax(1) for x in lacking]).amax(0)
    near = 1e-6 * wanted.abs().amax()
    shift = torch.zeros_like(wanted)
    for _ in range(_STEPS):
        found, share = _means([(call, out + _by_channel(shift, out, call.layer)) for call, out in outputs])
        missing = wanted - found
        low, high = torch.where(missing > 0, shift, low), torch.where(missing < 0, shift, high)
        step = missing / share.clamp(min=1e-12)
        is_far = step.abs() > near
        if not bool(is_far.any()):
            break
        moved = shift + step
        moved = torch.where((moved < low) | (moved > high), (low + high) / 2, moved)
        shift = torch.where(is_far, moved, shift)
    return shift


def _means(outputs: Sequence[tuple[LayerCall, Tensor]]) -> tuple[Tensor, Tensor]:
    """By channel: the mean after the activation, and the share of values that it lets pass as they are."""
    means, shares = [], []
    for call, out in outputs:
        found = call.activated(out)
        means.append(_channel_means(found, call.layer))
        shares.append(_channel_means((found == out).to(out.dtype), call.layer))
    return torch.stack(means).mean(0), torch.stack(shares).mean(0)


def _channel(x: Tensor, layer: QATGemm) -> int:
    """The axis of the output channels: the last of a Linear, the one before the positions of a convolution."""
    return x.dim() - layer.weight.dim() + 1


def _by_channel(values: Tensor, x: Tensor, layer: QATGemm) -> Tensor:
    return values.reshape([-1 if axis == _channel(x, layer) else 1 for axis in range(x.dim())])


def _channels_first(x: Tensor, layer: QATGemm) -> Tensor:
    """The values of each channel as a row."""
    return x.movedim(_channel(x, layer), 0).flatten(1) if x.dim() > 1 else x[:, None]


def _channel_means(x: Tensor, layer: QATGemm) -> Tensor:
    axes = [axis for axis in range(x.dim()) if axis != _channel(x, layer)]
    return x.mean(axes) if axes else x
