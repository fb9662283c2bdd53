"""The layers of a prepared model one by one, with what reaches them: for algorithms that mend one after another."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CalibrationError, QuantizationConfigError
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.module import real
from horizon_plugin_pytorch.quantization.batches import require_quantizers
from horizon_plugin_pytorch.quantization.calibration import run_batch
from horizon_plugin_pytorch.quantization.fake_quantize import (
    NO_LIMIT,
    FakeQuantize,
    FakeQuantState,
    set_fake_quantize,
)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Args:
        x: its input in the quantized model, as real values.
        residual: what a fused sum adds there.
        wanted: what the float layer gives in the float model, before its activation.
    """

    x: Tensor
    residual: Tensor | None
    wanted: Tensor


class _Reached(Exception):
    """The layer was called as often as it is: the rest of the model need not run."""


class LayerWalk:
    """The layers of a calibrated model with integer weights, in the order in which they run.

    A layer's calls are those of the model as it is when they are asked for: a layer sees what was changed before it.

    Args:
        model: calibrated; it is put into eval mode and the VALIDATION state.
        batches: what to run it on.
        caller: whom messages name.
        exclude: prefixes of paths to leave out.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any], caller: str, exclude: Sequence[str] = ()) -> None:
        require_quantizers(model, caller)
        self._model, self._batches = model, batches
        model.eval()
        self._float = copy.deepcopy(model)
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        set_fake_quantize(self._float, FakeQuantState._FLOAT)
        counts = self._count(self._float)
        exact = self._count(model)
        # Inside some modules (recurrent ones) layers run only as a part of the whole.
        self._counts = {path: n for path, n in counts.items() if exact[path] == n}
        prefixes = tuple(exclude)
        self.layers: dict[str, QATGemm] = {}
        for path in self._counts:
            layer: Any = model.get_submodule(path)
            if not isinstance(layer.weight_fake_quant, FakeQuantize) or (prefixes and path.startswith(prefixes)):
                continue
            if not layer.weight_fake_quant.has_statistics:
                raise CalibrationError(f"{caller}: `{path}` has no scale; calibrate the model before.")
            self.layers[path] = layer
        if not self.layers:
            raise QuantizationConfigError(f"{caller}: the model has no layer with integer weights to work on.")

    @torch.no_grad()
    def _count(self, model: nn.Module) -> Counter[str]:
        """How often each layer is called in the first batch, in the order of first calls."""
        counts: Counter[str] = Counter()

        def count(path: str) -> Any:
            return lambda *_: counts.update([path])

        layers = {path: m for path, m in model.named_modules() if isinstance(m, QATGemm)}
        hooks = [m.register_forward_hook(count(path)) for path, m in layers.items()]
        run_batch(model, self._batches[0])
        for hook in hooks:
            hook.remove()
        return counts

    @torch.no_grad()
    def calls(self, path: str) -> list[LayerCall]:
        """All calls of a layer on the batches."""
        reference = self._float.get_submodule(path)
        assert isinstance(reference, QATGemm)
        weight, bias, _ = reference.deployed()
        found = []
        for batch in self._batches:
            here, there = (list(self._inputs(model, path, batch)) for model in (self._model, self._float))
            for (x, residual), (float_x, float_residual) in zip(here, there, strict=True):
                wanted = reference.product(float_x, weight, bias)
                found.append(LayerCall(x, residual, wanted if float_residual is None else wanted + float_residual))
        return found

    def _inputs(self, model: nn.Module, path: str, batch: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
        found: list[tuple] = []
        layer, count = model.get_submodule(path), self._counts[path]

        def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            found.append((*args, *kwargs.values()))
            if len(found) == count:
                raise _Reached

        hook = layer.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            run_batch(model, batch)
        except _Reached:
            pass
        finally:
            hook.remove()
        for x, *residual in found:
            yield real(x), real(residual[0]) if residual else None


def output_of(layer: QATGemm, call: LayerCall, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the layer gives in the quantized model with other weights, before its activation."""
    out = layer.product(call.x, weight, bias)
    return out if call.residual is None else out + call.residual


def squared_error(layer: QATGemm, out: Tensor, wanted: Tensor) -> Tensor:
    """The squared error after the layer's activation, as a share of what is wanted."""
    if layer.limits != NO_LIMIT:
        out, wanted = out.clamp(*layer.limits), wanted.clamp(*layer.limits)
    return (out - wanted).square().mean() / wanted.square().mean().clamp(min=1e-30)


def relative_error(layer: QATGemm, calls: Sequence[LayerCall], weight: Tensor, bias: Tensor | None) -> float:
    """The relative error (L2) of the layer's output over all calls."""
    squares = [float(squared_error(layer, output_of(layer, call, weight, bias), call.wanted)) for call in calls]
    return math.sqrt(sum(squares) / len(squares))
