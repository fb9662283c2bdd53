"""Float models that are rewritten in place, and must compute the same afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.calibration.batches import Process, run_batch, take_batches
from horizon_plugin_pytorch.calibration.called_modules import Modules
from horizon_plugin_pytorch.capture.plain_model import copy_model
from horizon_plugin_pytorch.capture.recording import record
from horizon_plugin_pytorch.errors import CalibrationError, QuantizationConfigError, TraceError, require_module
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nested import tensors_in
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.nn.transformer import plain_transformers
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.statistics.metrics import relative_error

_SAME = 1e-4  # relative change of the outputs that accelerators may give from run to run
_ROUNDING = 0.05  # relative change that rounding may give, in half precision too

CHANGES = "with it changed the outputs are not the same"

Outputs = list[list[Tensor]]  # by batch
G = TypeVar("G")


class FloatRewrite:
    """A float model, data for it, and what it must go on computing.

    Args:
        caller: whom messages name.

    Attributes:
        copied: to be run, which may change what a model keeps; torch's transformer layers call their parts in it.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], process: Process | None, caller: str) -> None:
        require_module(model, caller)
        for path, module in model.named_modules():
            if isinstance(module, (QATModule, QuantizedModule, FakeQuantize)):
                raise QuantizationConfigError(
                    f"{caller}: the model is prepared already or converted (`{path}` is a {type(module).__name__}); "
                    "give the float model, and prepare it afterwards."
                )
        self.model, self.caller = model, caller
        self.data = take_batches(model, batches, None, process, caller)
        self.copied = plain_transformers(copy_model(model, caller))

    @property
    def modules(self) -> Modules:
        """The modules that graphs call, by path: the model's own, and those that only the copy has."""
        every = *self.copied.named_modules(remove_duplicate=False), *self.model.named_modules(remove_duplicate=False)
        return dict(every)

    def graphs(self) -> list[fx.Graph]:
        """What the model does, batch by batch."""
        found = []
        for index, batch in enumerate(self.data):
            try:
                found.append(record(self.copied, *arguments_of(self.copied, batch)))
            except TraceError as error:
                raise TraceError(
                    f"{self.caller}: the model cannot run on batch {index}: {error.__cause__ or error}"
                ) from error
        return found

    def outputs(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """What a model gives in eval mode, batch by batch; where chance has a part, it is the same in every run."""
        model.eval()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for batch in self.data:
                yield [x.detach().clone() for x in tensors_in(run_batch(model, own_tensors(batch)))]

    def require_finite(self, x: Tensor, path: str) -> None:
        """Refuse data with which NaN or infinity reaches a module."""
        if not bool(x.isfinite().all()):
            raise CalibrationError(
                f"{self.caller}: NaN or infinity reaches `{path}`. Leave such data out, or look for a division by zero "
                "or an overflow in the model."
            )

    def unsound(
        self, groups: Sequence[G], change: Callable[[nn.Module, G, torch.Generator], None], wanted: Outputs
    ) -> list[G]:
        """Groups of modules that cannot be changed without changing the outputs.

        Args:
            change: changes one of them in a copy of the model, by chance.
        """

        def changes(among: Sequence[G]) -> bool:
            trial = copy_model(self.model, self.caller)
            generator = torch.Generator().manual_seed(0)
            for group in among:
                change(trial, group, generator)
            return _change(self.outputs(trial), wanted) > _SAME

        def culprits(among: Sequence[G]) -> list[G]:
            if not changes(among):
                return []
            middle = len(among) // 2
            return culprits(among[:middle]) + culprits(among[middle:]) if middle else list(among)

        if groups and not any(bool(x.isfinite().any()) for batch in wanted for x in batch):
            raise CalibrationError(
                f"{self.caller}: the model gives no tensor with finite numbers on these data, so that it cannot be seen"
                " whether it computes the same afterwards. Let it give its results, and leave out data that give NaN."
            )
        found = culprits(groups) if groups else []
        if found and changes([]):
            raise CalibrationError(
                f"{self.caller}: the model gives other outputs when it runs on the same data again, so that it cannot "
                "be seen whether it computes the same afterwards. Take chance out of its forward in eval mode."
            )
        return found

    def finish(self, rewritten: nn.Module, wanted: Outputs) -> float:
        """Give the model the parameters of a rewritten copy; the relative change of its outputs.

        Raises:
            CalibrationError: they change by more than rounding can explain; the model stays as it was.
        """
        change = _change(self.outputs(rewritten), wanted)
        if change > _ROUNDING:
            raise CalibrationError(
                f"{self.caller}: rounding alone changes the model's outputs by {change:.1%}: numbers leave the range of"
                " their format, or the outputs depend on a threshold, as after non-maximum suppression. The model is "
                "as it was. Do it in float32, or only to the part before the threshold."
            )
        new = dict(rewritten.named_parameters(remove_duplicate=False))
        for path, parameter in self.model.named_parameters():
            with torch.inference_mode() if parameter.is_inference() else nullcontext():
                parameter.copy_(new[path])
        return change


def told_left(left: Mapping[str, str]) -> str:
    """What a report says of what stays as it is."""
    return "".join(f"\n`{path}` stays as it is: {why}." for path, why in left.items())


def _change(found: Iterable[list[Tensor]], wanted: Outputs) -> float:
    """The largest relative error of an output."""
    largest = 0.0
    for mine, theirs in zip(found, wanted, strict=True):
        if len(mine) != len(theirs):
            return math.inf
        largest = max([largest, *map(relative_error, mine, theirs)])
    return largest
