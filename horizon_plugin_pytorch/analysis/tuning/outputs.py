"""What a model gives on the data of a measurement, and how far that is from what it should give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.calibration.batches import run_batch
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.nested import tensors_in
from horizon_plugin_pytorch.nn.qat.module import real
from horizon_plugin_pytorch.runtime.results import own_tensors

_LEAST_REST = 1e-6  # of the squares: what is less, no target tells


def real_outputs(tree: Any) -> list[Tensor]:
    """The real tensors of what a model gives, in order; positions, counts and masks are left out."""
    found = (real(x) for x in tensors_in(tree))
    return [x for x in found if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


@dataclass(frozen=True)
class Wanted:
    """What the float model gives on each batch, and how each output counts.

    Every output counts the same, whatever its size: differences are divided by the norm of the output over all data.
    Infinity, as masks give it, is no difference where both have it.

    Args:
        outputs: by batch.
        weights: for each output.
    """

    outputs: tuple[tuple[Tensor, ...], ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, outputs: Sequence[Sequence[Tensor]]) -> Wanted:
        """Of the outputs of the float model by batch.

        Raises:
            QuantizationConfigError: there is nothing to compare, or it is NaN.
        """
        counts = {len(batch) for batch in outputs}
        if counts == {0} or not counts:
            raise QuantizationConfigError(
                "the model gives no real tensor, so that there is no output error to measure: let it end before what "
                "makes positions, booleans or text of its outputs (argmax, a threshold), and do that in `evaluate`."
            )
        if len(counts) > 1:
            raise QuantizationConfigError(
                f"the model gives {' or '.join(map(str, sorted(counts)))} real tensors, as the data go: outputs cannot "
                "be compared. Give data for which it gives the same ones; a batch without samples gives none."
            )
        if any(bool(x.isnan().any()) for batch in outputs for x in batch):
            raise QuantizationConfigError("the float model gives NaN on these data; leave such data out.")
        squares = [sum(_square(batch[i]) for batch in outputs) for i in range(counts.pop())]
        known = sum(total > 0 for total in squares)
        if not known:
            raise QuantizationConfigError("all outputs of the float model are 0 or infinite on these data.")
        weights = tuple((total * known) ** -0.5 if total else 0.0 for total in squares)
        return cls(tuple(tuple(x.detach() for x in batch) for batch in outputs), weights)

    def difference(self, outputs: Sequence[Sequence[Tensor]]) -> Tensor:
        """How far outputs are off, as one vector; the square of its length is the relative error, squared.

        Raises:
            QuantizationConfigError: they have other shapes.
        """
        parts: list[Tensor] = []
        for found, wanted in zip(outputs, self.outputs, strict=True):
            if [x.shape for x in found] != [y.shape for y in wanted]:
                raise QuantizationConfigError(
                    "the quantized model gives outputs of other shapes than the float model, which cannot be compared: "
                    "let the model end before what depends on values (NMS, boolean masks, `nonzero`)."
                )
            parts += [(apart(x, y) * w).flatten() for x, y, w in zip(found, wanted, self.weights, strict=True) if w]
        return torch.cat(parts)

    def error(self, outputs: Sequence[Sequence[Tensor]]) -> float:
        """The squared relative error of outputs; infinite where they are NaN."""
        value = float(self.difference(outputs).double().square().sum())
        return value if value == value else float("inf")

    def fills(self) -> dict[int, float]:
        """Outputs of which one number, written many times as masks do it, is nearly all; with that number.

        A comparison of such outputs sees little else.

        >>> logits = torch.tensor([[0.5, -1e9, -1e9, 2.0]])
        >>> Wanted.of([[logits, torch.ones(3)]]).fills()
        {0: -1000000000.0}
        """
        found = {}
        for number in range(len(self.weights)):
            values = torch.cat([batch[number].flatten() for batch in self.outputs]).double()
            values = values[values.isfinite()]
            if not len(values):
                continue
            largest = values[values.abs().argmax()]
            is_fill = values == largest
            rest = float(values[~is_fill].square().sum())
            count = int(is_fill.sum())
            if count > 1 and 0 < rest < _LEAST_REST * count * float(largest) ** 2:
                found[number] = float(largest)
        return found


@contextmanager
def outside_inference() -> Iterator[None]:
    """In here tensors can have gradients and be written to, under `torch.inference_mode` too; nothing else changes."""
    is_tracked = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_tracked):
        yield


def require_gradients(model: nn.Module, who: str) -> None:
    """Refuse a model whose tensors were made under `torch.inference_mode`: gradients need others."""
    if any(x.is_inference() for x in (*model.parameters(), *model.buffers())):
        raise QuantizationConfigError(
            f"{who}: the model was made under torch.inference_mode(), and there are no gradients for it; prepare and "
            "calibrate it outside."
        )


def _square(x: Tensor) -> float:
    """The sum of the squares of what is finite."""
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).square().sum())


def apart(found: Tensor, wanted: Tensor) -> Tensor:
    """The differences of two tensors; 0 where both are the same infinity.

    >>> apart(torch.tensor([3.0, -torch.inf, 1.0]), torch.tensor([1.0, -torch.inf, torch.inf]))
    tensor([2., 0., -inf])
    """
    difference = found - wanted
    return difference if bool(wanted.isfinite().all()) else torch.where(found == wanted, 0.0, difference)


@torch.no_grad()
def run(model: nn.Module, batches: Sequence[Any]) -> list[list[Tensor]]:
    """What a model gives, batch by batch; where chance has a part, it is the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [[x.detach().clone() for x in real_outputs(run_batch(model, own_tensors(b)))] for b in batches]


def first_batches(batches: Sequence[Any], samples: int) -> list[Any]:
    """The first batches that have so many samples together."""
    count = 0
    for number, batch in enumerate(batches, 1):
        first = next((x for x in tensors_in(batch) if x.dim()), None)
        count += 1 if first is None else first.shape[0]
        if count >= samples:
            return list(batches[:number])
    return list(batches)
