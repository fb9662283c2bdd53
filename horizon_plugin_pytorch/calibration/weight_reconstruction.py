"""AdaRound: learn for every weight whether to round it up or down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from horizon_plugin_pytorch.calibration.batches import Process, take_batches
from horizon_plugin_pytorch.calibration.layers import (
    LayerCall,
    LayerGroup,
    LayerWalk,
    error_of_calls,
    skipped_lines,
)
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import QuantizationConfigError, require_module
from horizon_plugin_pytorch.fake_quant.rounding import grid_edges
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.tables import Table

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
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise QuantizationConfigError(f"weight_reconstruction: custom_config_dict must be a dict, got {given!r}.")
        for name, value in given.items():
            if name not in _EXPECTED:
                raise QuantizationConfigError(
                    f"weight_reconstruction: custom_config_dict has no {name!r}; it has {', '.join(_EXPECTED)}."
                )
            expected, is_so = _EXPECTED[name]
            if not is_so(value):
                raise QuantizationConfigError(
                    f"weight_reconstruction: custom_config_dict[{name!r}] must be {expected}, got {value!r}."
                )
        return cls(**given)


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_number(value: Any, low: float, high: float = math.inf) -> bool:
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and low <= value <= high


def _is_sequence(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_item, value))


_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "num_batches": ("an integer from 1", _is_count),
    "num_steps": ("an integer from 1", _is_count),
    "exclude_prefix": ("a list of strings", lambda v: _is_sequence(v, lambda prefix: isinstance(prefix, str))),
    "warm_up": ("a number from 0 to 1", lambda v: _is_number(v, 0, 1)),
    "weight": ("a number from 0", lambda v: _is_number(v, 0)),
    "b_range": ("two numbers from 1", lambda v: _is_sequence(v, lambda end: _is_number(end, 1)) and len(v) == 2),
}


@dataclass(frozen=True)
class ReconstructedLayer:
    """What was done to one layer.

    Args:
        layer: its path; layers that share a weight are one, with all their paths.
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
    """What `weight_reconstruction` did, in the order in which the layers run; printing it gives a table.

    Args:
        layers: what was done to each.
        left_out: by path, why a layer was not treated; not those that `exclude_prefix` names.
    """

    layers: list[ReconstructedLayer] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [[r.layer, f"{r.before:.4%}", f"{r.after:.4%}", f"{r.changed:.1%}"] for r in self.layers]
        headers = ["layer", "error, nearest", "error, learned", "changed"]
        return Table(headers, rows).text() + skipped_lines(self.left_out)


@torch.inference_mode(False)
@torch.no_grad()
def weight_reconstruction(
    calib_model: nn.Module,
    batches: Iterable[Any],
    batch_process_func: Process | None = None,
    custom_config_dict: Mapping[str, Any] | None = None,
) -> ReconstructionResult:
    """Learn how to round the weights of a calibrated model (AdaRound), and write them into it, already rounded.

    Layers (convolutions, transposed ones, Linear) are treated in the order in which they run. Each learns, for every
    weight, to round up or down, so that its output on the inputs that it gets in the quantized model comes closest to
    what the float layer gives in the float model. Where rounding to the nearest, or that of an earlier call, is better,
    it stays. Scales stay. The float model is that before this call, an earlier one or `correct_bias` changed it, unless
    it was trained or loaded since.

    Args:
        calib_model: calibrated; changed in place, and left in eval mode and in the VALIDATION state.
        batches: a list, tuple or generator of inputs, all of which are used, or a DataLoader; they are kept meanwhile.
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
    require_module(calib_model, "weight_reconstruction")
    config = _Config.of(custom_config_dict)
    count = config.num_batches if isinstance(batches, DataLoader) else None
    data = take_batches(calib_model, batches, count, batch_process_func, "weight_reconstruction")
    walk = LayerWalk(calib_model, data, "weight_reconstruction", "weight", config.exclude_prefix)
    result = ReconstructionResult(left_out=walk.left_out)
    for group, calls in walk:
        if _have_one_grid(group.layers):
            result.layers.append(_reconstruct(group, calls, walk.float_weight(group), config))
        else:
            walk.left_out[group.path] = "they share a weight, and each has another scale for it"
    return result


def mix_calibration(
    calib_model: nn.Module,
    batches: Any,
    batch_process_func: Callable[[Any], Any] | None = None,
    custom_config_dict: dict[str, Any] | None = None,
) -> Any:
    """`weight_reconstruction`, by the name that the documents' example of it with a DataLoader calls."""
    return weight_reconstruction(calib_model, batches, batch_process_func, custom_config_dict)


def _have_one_grid(layers: Sequence[QATGemm]) -> bool:
    (weight, _, scale), *others = [layer.deployed() for layer in layers]
    ends = {(layer.weight_fake_quant.quant_min, layer.weight_fake_quant.quant_max) for layer in layers}
    return len(ends) == 1 and all(torch.equal(weight, w) and torch.equal(scale, s) for w, _, s in others)


def _reconstruct(group: LayerGroup, calls: Sequence[LayerCall], weight: Tensor, config: _Config) -> ReconstructedLayer:
    layer = group.layers[0]
    quantizer = layer.weight_fake_quant
    ends = (quantizer.quant_min, quantizer.quant_max)
    now, _, scale = layer.deployed()
    step = grid_edges(now, scale.detach().clone(), quantizer.ch_axis, *ends)[0]

    def error(integers: Tensor) -> float:
        return error_of_calls(calls, lambda call: call.output(integers * step))

    nearest = (weight / step).round().clamp(*ends)
    before = error(nearest)
    best, after = nearest, before
    for integers in ((now / step).round().clamp(*ends), _learn(calls, weight / step, step, ends, before, config)):
        found = error(integers)
        if found < after:
            best, after = integers, found
    group.rewrite(lambda layer: layer.set_weight(best * step))
    return ReconstructedLayer(group.path, before, after, float((best != nearest).float().mean()))


def _learn(
    calls: Sequence[LayerCall], exact: Tensor, step: Any, ends: tuple[int, int], before: float, config: _Config
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
            loss = call.squared_error(call.output((floor + up).clamp(*ends) * step)) / unit
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


show_at(
    "quantization.weight_reconstruction",
    ReconstructedLayer,
    ReconstructionResult,
    weight_reconstruction,
    mix_calibration,
)
