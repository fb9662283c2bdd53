"""AdaRound: learn for every weight whether to round it up or down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.quantization.batches import Process, take_batches
from horizon_plugin_pytorch.quantization.fake_quantize import grid_edges
from horizon_plugin_pytorch.quantization.layers import LayerCall, LayerWalk, output_of, relative_error, squared_error

_LOW, _HIGH = -0.1, 1.1  # the sigmoid is stretched over these and clipped, so that it reaches 0 and 1
_RATE = 0.1  # of Adam; the documented hundred steps must be enough to turn a choice around
_UNIT = 300.0  # with the documented weight, unclear choices count about as much as the layer's error


@dataclass(frozen=True)
class _Config:
    """The documented settings.

    Args:
        num_batches: how many batches of a DataLoader to use.
        num_steps: steps of learning for each layer.
        exclude_prefix: paths of modules to leave out begin so.
        warm_up: share of the steps that look at the layer's error only, not at whether the choices are clear.
        weight: how much unclear choices count.
        b_range: exponent of what they count, falling linearly from the first to the second.
    """

    num_batches: int = 10
    num_steps: int = 100
    exclude_prefix: Sequence[str] = ()
    warm_up: float = 0.2
    weight: float = 0.01
    b_range: Sequence[float] = (20.0, 2.0)

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> _Config:
        known = [f.name for f in fields(cls)]
        for name in given or {}:
            if name not in known:
                raise QuantizationConfigError(
                    f"weight_reconstruction: custom_config_dict has no {name!r}; it has {', '.join(known)}."
                )
        config = cls(**(given or {}))
        if config.num_steps < 1 or not 0 <= config.warm_up <= 1 or len(config.b_range) != 2:
            raise QuantizationConfigError(
                "weight_reconstruction: need num_steps >= 1, 0 <= warm_up <= 1 and two numbers in b_range."
            )
        return config


@dataclass(frozen=True)
class ReconstructedLayer:
    """What was done to one layer.

    Args:
        layer: its path.
        before: relative error of its output with weights rounded to the nearest.
        after: the same with the learned rounding.
        changed: share of the weights that are rounded the other way.
    """

    layer: str
    before: float
    after: float
    changed: float


@dataclass
class ReconstructionResult:
    """What `weight_reconstruction` did, in the order in which the layers run; printing it gives a table."""

    layers: list[ReconstructedLayer] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [[r.layer, f"{r.before:.4%}", f"{r.after:.4%}", f"{r.changed:.1%}"] for r in self.layers]
        return tabulate(rows, headers=["layer", "error, nearest", "error, learned", "changed"], disable_numparse=True)


def weight_reconstruction(
    calib_model: nn.Module,
    batches: Iterable[Any],
    batch_process_func: Process | None = None,
    custom_config_dict: Mapping[str, Any] | None = None,
) -> ReconstructionResult:
    """Learn how to round the weights of a calibrated model (AdaRound), and write them into it, already rounded.

    Layers (convolutions, transposed ones, Linear) are treated in the order in which they run. Each learns, for every
    weight, to round up or down, so that its output on the inputs that it gets in the quantized model comes closest to
    what the float layer gives in the float model. Where rounding to the nearest is better, it stays. Scales stay.

    Args:
        calib_model: calibrated; changed in place, and left in eval mode and in the VALIDATION state.
        batches: a list or tuple of inputs, all of which are used, or a DataLoader.
        batch_process_func: makes the model's inputs of what a DataLoader gives.
        custom_config_dict: ``num_batches`` (10, of a DataLoader), ``num_steps`` (100), ``exclude_prefix`` ([]),
            ``warm_up`` (0.2), ``weight`` (0.01), ``b_range`` ([20, 2]).

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, calibrate, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.NASH_E)
    >>> net = prepare_qat_fx(QuantWrapper(nn.Linear(16, 4)), {"": get_default_qconfig()})
    >>> data = [torch.randn(32, 16) for _ in range(4)]
    >>> _ = calibrate(net, data)
    >>> row = weight_reconstruction(net, data).layers[0]
    >>> row.after <= row.before
    True
    """
    config = _Config.of(custom_config_dict)
    count = config.num_batches if isinstance(batches, DataLoader) else None
    data = take_batches(calib_model, batches, count, batch_process_func, "weight_reconstruction")
    walk = LayerWalk(calib_model, data, "weight_reconstruction", config.exclude_prefix)
    result = ReconstructionResult()
    for path, layer in tqdm(walk.layers.items(), desc="weight_reconstruction", disable=None):
        result.layers.append(_reconstruct(path, layer, walk.calls(path), config))
    return result


def _reconstruct(path: str, layer: QATGemm, calls: Sequence[LayerCall], config: _Config) -> ReconstructedLayer:
    quantizer = layer.weight_fake_quant
    with torch.no_grad():
        weight, bias, scale = (None if t is None else t.detach().clone() for t in layer.deployed())
        assert weight is not None and scale is not None
        step = grid_edges(weight, scale, quantizer.ch_axis, quantizer.quant_min, quantizer.quant_max)[0]
        ends = (quantizer.quant_min, quantizer.quant_max)
        nearest = (weight / step).round().clamp(*ends)
        before = relative_error(layer, calls, nearest * step, bias)
    learned = _learn(layer, calls, weight / step, step, ends, bias, before, config)
    with torch.no_grad():
        after = relative_error(layer, calls, learned * step, bias)
        if after >= before:
            learned, after = nearest, before
        layer.set_deployed(learned * step, bias)
        changed = float((learned != nearest).float().mean())
    return ReconstructedLayer(path, before, after, changed)


def _learn(
    layer: QATGemm,
    calls: Sequence[LayerCall],
    exact: Tensor,
    step: Any,
    ends: tuple[int, int],
    bias: Tensor | None,
    before: float,
    config: _Config,
) -> Tensor:
    """The integers that the weights are rounded to."""
    floor = exact.floor()
    share = ((exact - floor).clamp(0.01, 0.99) - _LOW) / (_HIGH - _LOW)
    chance = torch.logit(share).requires_grad_()
    optimizer = torch.optim.Adam([chance], _RATE)
    generator = torch.Generator().manual_seed(0)
    warm = int(config.warm_up * config.num_steps)
    # The error of rounding to the nearest is 1, so that `weight` means the same for every layer.
    unit = before**2 or 1.0
    with torch.enable_grad():
        for number in range(config.num_steps):
            call = calls[int(torch.randint(len(calls), (1,), generator=generator))]
            up = _soft(chance)
            out = output_of(layer, call, (floor + up).clamp(*ends) * step, bias)
            loss = squared_error(layer, out, call.wanted) / unit
            if number >= warm:
                done = (number - warm) / max(config.num_steps - warm - 1, 1)
                exponent = config.b_range[0] + (config.b_range[1] - config.b_range[0]) * done
                unclear = 1 - (2 * up - 1).abs().pow(exponent)
                loss = loss + _UNIT * config.weight * unclear.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return (floor + (_soft(chance.detach()) >= 0.5)).clamp(*ends)


def _soft(chance: Tensor) -> Tensor:
    return (torch.sigmoid(chance) * (_HIGH - _LOW) + _LOW).clamp(0, 1)
