"""The batches that algorithms run a calibrated model on, again and again."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.quantization.fake_quantize import DynamicFakeQuantize, FakeQuantize

Process = Callable[[Any], Any]


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first tensor is."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def take_batches(
    model: nn.Module, batches: Iterable[Any], count: int | None, process: Process | None, caller: str
) -> list[Any]:
    """The first batches, on the model's device: read once, so that a shuffling loader gives the same ones in each pass.

    Args:
        count: how many; None takes all.
        process: makes what the model takes of what the loader gives.
        caller: whom messages name.
    """
    if isinstance(batches, (Tensor, str)) or not isinstance(batches, Iterable):
        raise QuantizationConfigError(
            f"{caller}: batches must be a list, tuple or DataLoader, got a {type(batches).__name__}; give [batch]."
        )
    if count is not None and (not isinstance(count, int) or count < 1):
        raise QuantizationConfigError(f"{caller}: the number of batches must be a whole number from 1 on, got {count}.")
    device = device_of(model)

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    taken = itertools.islice(batches, count)
    found = [pytree.tree_map(moved, batch if process is None else process(batch)) for batch in taken]
    if not found:
        raise QuantizationConfigError(f"{caller}: the data have no batches; a generator can be used only once.")
    return found


def require_quantizers(model: nn.Module, caller: str) -> dict[str, FakeQuantize]:
    """The fake quantizers of a prepared model, by path."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, FakeQuantize)}
    if not found:
        raise QuantizationConfigError(f"{caller}: the model has no fake quantizers; call `prepare` first.")
    return found


@contextmanager
def undone_after_an_error(model: nn.Module) -> Iterator[None]:
    """Modes, states, ranges and scales are as before if anything fails; weights are the caller's matter."""
    modes = [(m, m.training) for m in model.modules()]
    quantizers = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    before = [(q, copy.deepcopy(q.state_dict()), q._was_set) for q in quantizers]
    dynamic = [(m, m.is_quantizing) for m in model.modules() if isinstance(m, DynamicFakeQuantize)]
    try:
        yield
    except BaseException:
        for module, mode in modes:
            module.training = mode
        for quantizer, state, was_set in before:
            quantizer.load_state_dict(state)
            quantizer._was_set = was_set
        for other, quantizes in dynamic:
            other.enable_fake_quant(quantizes)
        raise
