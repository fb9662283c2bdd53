"""Ranges of int8 tensors by what they do to the outputs, rather than by what they do to the tensor.

Large values that hardly matter (a few channels of a transformer, which the next norm divides by their own size) stretch
the range of a tensor, and all others lose their digits. How much that matters is not seen in the tensor. The gradients
of a probe tell it for every range of every tensor at once, to first order; the ranges that promise something are then
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.tuning.outputs import (
    Wanted,
    first_batches,
    outside_inference,
    real_outputs,
    require_gradients,
    run,
)
from horizon_plugin_pytorch.analysis.tuning.probe import frozen, random_signs, tracked
from horizon_plugin_pytorch.analysis.tuning.sites import RoundingModel
from horizon_plugin_pytorch.calibration.batches import (
    Process,
    require_quantizers,
    run_batch,
    take_batches,
    undone_after_an_error,
)
from horizon_plugin_pytorch.compiled.passes import NO_LIMITS
from horizon_plugin_pytorch.errors import CalibrationWarning, require_module, require_whole, warn
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.fake_quant.rounding import clamped
from horizon_plugin_pytorch.fake_quant.route import written_route
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.tables import Table

_FACTORS = 2.0 ** (torch.arange(2, -25, -1) / 4)  # of the present scale, from 1.41 down to 1/64
_PRESENT = 2  # where the factor is 1
_OCTAVE = 4  # numbers from a factor to its half
_DRAWS = 2  # vectors of signs for each batch
_WORTH = 1e-4  # the gain, in squared relative error of the outputs, from which a tensor is measured
_TRUSTED = 1.5  # a measured error up to so many times the estimate is taken for what was promised
_NUMBERS = 1 << 22  # that are rounded at once


@dataclass(frozen=True)
class SearchedRange:
    """The range of one tensor.

    Args:
        path: of the module whose result it is.
        before, after: the largest magnitude.
        error_before, error_after: the squared relative error of the outputs with this rounding and no other.
    """

    path: str
    before: float
    after: float
    error_before: float
    error_after: float


@dataclass
class ScaleSearchResult:
    """What `search_scales` did; printing it gives a table.

    Args:
        ranges: of the tensors whose scale was changed.
        before, after: the relative error of the outputs of the whole model.
        forwards: over the data, of single tensors that were measured.
    """

    ranges: list[SearchedRange] = field(default_factory=list)
    before: float = 0.0
    after: float = 0.0
    forwards: int = 0

    def __str__(self) -> str:
        rows = [
            [r.path, f"{r.before:.4g}", f"{r.after:.4g}", f"{r.error_before:.3g}", f"{r.error_after:.3g}"]
            for r in self.ranges
        ]
        rows.append(["the model's outputs", "", "", f"{self.before**2:.3g}", f"{self.after**2:.3g}"])
        return Table(["result of", "range before", "after", "output error before", "after"], rows).text()


@outside_inference()
def search_scales(
    calib_model: nn.Module,
    batches: Iterable[Any],
    samples: int = 32,
    batch_process_func: Process | None = None,
) -> ScaleSearchResult:
    """Give the int8 results of a calibrated model the ranges that move its outputs least.

    Observers look at a tensor by itself. Here a range is judged by what its rounding and clipping do to the outputs: a
    few backwards estimate that for 27 ranges of every tensor at once, and those that promise something are measured,
    with the rounding of this one tensor alone. So the range of a tensor does not depend on the formats of the others.
    Weights, int16 results and scales that are fixed stay as they are, and powers of two stay powers of two. If the
    outputs of the whole model do not come closer to float, all stay, with a warning.

    Args:
        calib_model: calibrated; changed in place, and left in eval mode and in the VALIDATION state.
        batches: a list, tuple or generator of inputs, or a DataLoader.
        samples: how many of the first samples to use, at least.
        batch_process_func: makes the model's inputs of what a DataLoader gives.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, calibrate, get_qconfig, prepare
    >>> from horizon_plugin_pytorch.quantization.qconfig_setter import QconfigSetter
    >>> set_march(March.NASH_M)
    >>> net = QuantWrapper(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))).eval()
    >>> with torch.no_grad():  # a large channel that nobody reads
    ...     net.module[0].bias[0], net.module[1].weight[:, 0] = 300.0, 0.0
    >>> data = [torch.randn(16, 8)]
    >>> model = prepare(net, (data[0],), QconfigSetter(get_qconfig(), [], save_dir=None), out_dir=None)
    >>> _ = calibrate(model, data, progress=False)
    >>> result = search_scales(model, data)
    >>> result.ranges[0].path, result.ranges[0].after < 20, result.after < 0.1 * result.before
    ('module.0', True, True)
    """
    require_module(calib_model, "search_scales")
    require_whole("search_scales", "samples", samples, 1)
    require_quantizers(calib_model, "search_scales")
    require_gradients(calib_model, "search_scales")
    data = first_batches(take_batches(calib_model, batches, None, batch_process_func, "search_scales"), samples)
    rounding = RoundingModel(calib_model, {})
    with undone_after_an_error(calib_model):
        with rounding.in_float() as model:
            wanted = Wanted.of(run(model, data))
        before = wanted.error(run(calib_model, data)) ** 0.5
        restores = [quantizer.snapshot() for quantizer in _searched(calib_model, ()).values()]
        result = find_scales(calib_model, data, wanted)
        after = wanted.error(run(calib_model, data)) ** 0.5
    if result.ranges and not after < before:
        for restore in restores:
            restore()
        warn(
            f"search_scales: the ranges were better one by one, but not together (error {before:.4%}, then "
            f"{after:.4%}): all are as they were. Give more samples, or int16 to what has the largest errors.",
            CalibrationWarning,
        )
        return ScaleSearchResult([], before, before, result.forwards)
    result.before, result.after = before, after
    return result


def find_scales(
    model: nn.Module, batches: Sequence[Any], wanted: Wanted, known: Collection[str] = ()
) -> ScaleSearchResult:
    """As `search_scales`, without a look at the whole: what comes out does not depend on the formats of the others.

    Args:
        wanted: what the float model gives on the batches.
        known: paths of modules whose ranges are not to be searched.
    """
    quantizers = _searched(model, known)
    result = ScaleSearchResult()
    with RoundingModel(model, {}).in_float(), frozen(model):
        estimated = _estimated(model, quantizers, batches, wanted)
        if quantizers and not estimated:
            warn(
                "search_scales: no output of the model depends on a quantized result by a gradient, so that no range "
                "can be judged: all are as they were. Let the model give what it computes without `detach` or numpy.",
                CalibrationWarning,
            )
        errors = {path: _on_grid(found, quantizers[path]) for path, found in estimated.items()}
        gains = {path: float(found[_PRESENT] - found.min()) for path, found in errors.items()}
        for path in sorted(gains, key=lambda path: -gains[path]):
            if gains[path] <= _WORTH:
                break
            quantizer = quantizers[path]

            def measured(number: int, quantizer: FakeQuantize = quantizer) -> float:
                result.forwards += 1
                return _alone(model, quantizer, float(_FACTORS[number]), batches, wanted)

            tried = _tried(errors[path], measured, _step(quantizer))
            best = min(tried, key=lambda number: (tried[number], abs(number - _PRESENT)))
            if best != _PRESENT:
                end = float(quantizer.scale) * -quantizer.quant_min
                _scale_by(quantizer, float(_FACTORS[best]))
                after = float(quantizer.scale) * -quantizer.quant_min
                result.ranges.append(SearchedRange(path, end, after, tried[_PRESENT], tried[best]))
    return result


def _step(quantizer: FakeQuantize) -> int:
    """How many numbers of factors lie between two that may be taken: scales that are powers of two stay such."""
    return _OCTAVE if quantizer.activation_post_process.pow_quantization else 1


def _on_grid(estimated: Tensor, quantizer: FakeQuantize) -> Tensor:
    """Estimated errors, infinite for factors that may not be taken."""
    is_left_out = (torch.arange(len(estimated)) - _PRESENT) % _step(quantizer) != 0
    return estimated.masked_fill(is_left_out, torch.inf)


def _tried(estimated: Tensor, measured: Callable[[int], float], step: int = 1) -> dict[int, float]:
    """Measured errors by the number of the factor: the promised one, and nearer ones while it does not hold."""
    tried = {_PRESENT: measured(_PRESENT)}
    number = int(estimated.argmin())
    while number != _PRESENT:
        tried[number] = measured(number)
        is_past = len(tried) > 2 and tried[number] > min(tried.values())
        if is_past or tried[number] <= _TRUSTED * float(estimated[number]):
            break
        number = _PRESENT + max(number - _PRESENT, 0) // step // 2 * step
    return tried


def _searched(model: nn.Module, known: Collection[str]) -> dict[str, FakeQuantize]:
    """The fake quantizers of int8 results with one observed scale, by the path of the module whose result it is."""
    found = {}
    for path, module in model.named_modules():
        owner, _, name = path.rpartition(".")
        if not isinstance(module, FakeQuantize) or name == "weight_fake_quant" or owner in known:
            continue
        is_given = module.is_fixed or module._is_frozen
        if module.quant_max <= 127 and module.scale.numel() == 1 and module.has_statistics and not is_given:
            found[owner if name == "activation_post_process" else path] = module
    return found


@torch.no_grad()
def _scale_by(quantizer: FakeQuantize, factor: float) -> None:
    """Another range, which the observer knows, too: training goes on from it."""
    observer, scale = quantizer.activation_post_process, quantizer.scale.detach() * factor
    if observer.has_statistics:
        observer.set_range(observer.min_val * factor, observer.max_val * factor)
    quantizer.set_qparams(scale)
    quantizer.forget_scale()


def _alone(model: nn.Module, quantizer: FakeQuantize, factor: float, batches: Sequence[Any], wanted: Wanted) -> float:
    """The error of the outputs with the rounding of one tensor, by another scale."""
    scale = quantizer.scale.detach().clone()
    quantizer.set_qparams(scale * factor)
    quantizer.enable_fake_quant()
    try:
        with written_route():
            return wanted.error(run(model, batches))
    finally:
        quantizer.disable_fake_quant()
        quantizer.set_qparams(scale)


def _estimated(
    model: nn.Module, quantizers: dict[str, FakeQuantize], batches: Sequence[Any], wanted: Wanted
) -> dict[str, Tensor]:
    """To first order, the squared relative error of the outputs for each range of each tensor alone."""
    generator = torch.Generator().manual_seed(0)
    total: dict[str, Tensor] = {}
    for batch, outputs in zip(batches, wanted.outputs, strict=True):
        samples = max(1, *(x.shape[0] if x.dim() else 1 for x in outputs))
        products: dict[str, Tensor] = {}
        with ExitStack() as hooks, torch.enable_grad():
            for path, quantizer in quantizers.items():
                listen = partial(_listen, path, products, samples)
                hooks.callback(quantizer.register_forward_pre_hook(listen, with_kwargs=True).remove)
            given = real_outputs(run_batch(model, own_tensors(batch)))
        counted = [(x, w) for x, w in zip(given, wanted.weights, strict=True) if w and x.requires_grad]
        for draw in range(_DRAWS if counted else 0):
            products.clear()
            signs = [random_signs(x, generator) * w for x, w in counted]
            torch.autograd.backward([x for x, _ in counted], signs, retain_graph=draw < _DRAWS - 1)
            for path, found in products.items():
                total[path] = total.get(path, torch.zeros(len(_FACTORS))) + found.double().square().sum(0) / _DRAWS
    return total


def _listen(
    path: str, products: dict[str, Tensor], samples: int, quantizer: FakeQuantize, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Add the products of a gradient that will come with the rounding errors of all ranges, sample by sample."""
    x, *rest = args
    x = tracked(x)
    limits = rest[0] if rest else kwargs.get("limits", NO_LIMITS)
    values = x.detach() if limits == NO_LIMITS else clamped(x.detach(), limits, owned=False)

    def add(gradient: Tensor) -> None:
        is_split = values.dim() > 0 and values.shape[0] % samples == 0
        shape = (samples if is_split else 1, -1)
        flat, slope = values.reshape(shape), gradient.as_subclass(Tensor).reshape(shape)
        scales = (quantizer.scale.detach() * _FACTORS.to(values))[:, None]
        size = max(1, _NUMBERS // (len(_FACTORS) * shape[0]))
        sums = torch.zeros(shape[0], len(_FACTORS))
        for part, along in zip(flat.split(size, 1), slope.split(size, 1), strict=True):
            rounded = (part[:, None] / scales).round_().clamp_(quantizer.quant_min, quantizer.quant_max).mul_(scales)
            sums += (rounded.sub_(part[:, None]) @ along[:, :, None]).squeeze(-1).cpu()
        before = products.get(path)
        if before is not None and before.shape != sums.shape:
            before, sums = before.sum(0, keepdim=True), sums.sum(0, keepdim=True)
        products[path] = sums if before is None else before + sums

    x.register_hook(add)
    return (x, *rest), kwargs
