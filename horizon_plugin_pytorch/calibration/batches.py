"""The batches that a model runs on, as calibration and its methods take them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.errors import QuantizationConfigError, require_whole
from horizon_plugin_pytorch.fake_quant.dynamic import DynamicFakeQuantize
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nested import fresh
from horizon_plugin_pytorch.passes.swap import is_inside, paths_left_float
from horizon_plugin_pytorch.runtime.arguments import arguments_of

Process = Callable[[Any], Any]


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Call a model on what a data loader gives: see `arguments_of`.

    >>> run_batch(nn.ReLU(), (torch.tensor([-1.0]), "label"))
    tensor([0.])
    """
    args, kwargs = fresh(arguments_of(model, batch))
    return model(*args, **kwargs)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first tensor is."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def require_batches(batches: Any, caller: str, name: str = "batches") -> None:
    """Refuse what is one batch, or nothing that can be gone through."""
    if isinstance(batches, (Tensor, str, Mapping)) or not isinstance(batches, Iterable):
        raise QuantizationConfigError(
            f"{caller}: {name} must be a list, tuple, generator or DataLoader of batches, got a "
            f"{type(batches).__name__}; give [batch]."
        )


def no_batches(caller: str) -> QuantizationConfigError:
    """What to say of data without any batch."""
    return QuantizationConfigError(f"{caller}: the data have no batches; a generator can be used only once.")


def length_of(batches: Iterable[Any]) -> int | None:
    """How many batches there are, if that can be known; a DataLoader has `__len__` even where its data have none."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def stream_batches(
    model: nn.Module, batches: Iterable[Any], count: int | None, process: Process | None, caller: str
) -> Iterator[Any]:
    """The first batches, on the model's device, each when it is asked for: for a method of one pass.

    Args:
        batches: a list, a tuple, a generator, a DataLoader.
        count: how many; None takes all.
        process: makes what the model takes of what the loader gives.
        caller: whom messages name.
    """
    require_batches(batches, caller)
    if count is not None:
        require_whole(caller, "the number of batches", count, 1)
    device = device_of(model)

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    def stream() -> Iterator[Any]:
        is_empty = True
        for batch in itertools.islice(batches, count):
            is_empty = False
            yield pytree.tree_map(moved, batch if process is None else process(batch))
        if is_empty:
            raise no_batches(caller)

    return stream()


def take_batches(
    model: nn.Module, batches: Iterable[Any], count: int | None, process: Process | None, caller: str
) -> list[Any]:
    """`stream_batches` as a list, for a method of several passes: a shuffling loader gives the same ones in each."""
    return list(stream_batches(model, batches, count, process, caller))


def place_of(name: str) -> str:
    """The module's path rather than that of its fake quantizer; its weight is called so."""
    owner, _, last = name.rpartition(".")
    return owner if last == "activation_post_process" else name


def unseen_lines(unseen: Sequence[str], left_float: Sequence[str] = ()) -> list[str]:
    """What a table says of modules that no batch reached.

    Args:
        left_float: those that need no scale, as they are float after conversion.
    """
    lines = []
    if unseen:
        lines.append(
            f"No finite value reached: {', '.join(unseen)}. Their scales stay as they were; where there was none it "
            "is 1, and convert warns of it."
        )
    if left_float:
        lines.append(
            f"Nothing with a scale reached: {', '.join(left_float)}. They compute in float, as with parameters alone, "
            "and stay float when the model is converted."
        )
    return lines


def split_unseen(model: nn.Module, unseen: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of the fake quantizers that saw nothing, the places of those that need a scale; the modules that need none."""
    left_float = paths_left_float(model)
    return [place_of(name) for name in unseen if not is_inside(name, left_float)], list(left_float)


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
    undo = [m.snapshot() for m in model.modules() if isinstance(m, FakeQuantize)]
    dynamic = [(m, m.is_quantizing) for m in model.modules() if isinstance(m, DynamicFakeQuantize)]
    try:
        yield
    except BaseException:
        for module, mode in modes:
            module.training = mode
        for restore in undo:
            restore()
        for other, quantizes in dynamic:
            other.enable_fake_quant(quantizes)
        raise
