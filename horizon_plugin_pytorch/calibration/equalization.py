"""Cross-layer equalisation: channels of the same size, so that one scale fits them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.calibration.batches import Process, run_batch, take_batches
from horizon_plugin_pytorch.calibration.channel_pairs import find_pairs
from horizon_plugin_pytorch.capture.plain_model import copy_model
from horizon_plugin_pytorch.capture.recording import record
from horizon_plugin_pytorch.errors import (
    CalibrationError,
    CalibrationWarning,
    QuantizationConfigError,
    TraceError,
    require_module,
    warn,
)
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nested import tensors_in
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.statistics.metrics import relative_error
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch import ModuleWatch, OperatorCall

_ROUNDS = 10
_SAME = 1e-4  # relative change of the outputs that accelerators may give from run to run
_ROUNDING = 0.05  # relative change that rounding may give, in half precision too

Outputs = list[list[Tensor]]  # by batch


@dataclass(frozen=True)
class EqualizedPair:
    """Two layers, and the channels between them.

    Args:
        first, second: paths of the layers.
        before, after: the largest channel's range as a multiple of the median channel's.
    """

    first: str
    second: str
    before: float
    after: float


@dataclass
class EqualizationResult:
    """What `equalize` did; printing it gives a table.

    Args:
        pairs: the layers that were changed.
        change: relative change (L2) of the model's outputs, which comes from rounding.
    """

    pairs: list[EqualizedPair] = field(default_factory=list)
    change: float = 0.0

    def __str__(self) -> str:
        rows = [[p.first, p.second, f"{p.before:.2f}", f"{p.after:.2f}"] for p in self.pairs]
        headers = ["layer", "next layer", "largest / median channel", "after"]
        table = Table(headers, rows).text()
        return f"{table}\nThe outputs changed by {self.change:.2g} of their size."


@torch.no_grad()
def equalize(model: nn.Module, batches: Iterable[Any], batch_process_func: Process | None = None) -> EqualizationResult:
    """Make the channels between layers of a float model alike in size, without changing what the model computes.

    Where a layer (with its batch norm), activations such as ReLU, poolings and then another layer follow each other and
    nobody else reads what is between, a channel may be made smaller in the first and larger in the second. A tensor has
    one scale for all channels and a weight one for each output channel, so channel ``i`` is divided by
    ``sqrt(a[i] / w[i])``, with ``a`` the largest magnitudes of the channels in the data and ``w`` those of the second
    layer's weights for them; before a depthwise convolution, whose weights have a scale for each channel, by ``a[i]``.

    ReLU6 and other activations that are not linear for positive numbers end a chain. Before anything is changed, each
    pair is tried on all batches with factors that are powers of two, which change no rounding: a pair with which the
    outputs are not the same is left as it is, and a warning names it.

    Args:
        model: a float model, before `prepare`; changed in place.
        batches: a list, tuple or generator of inputs, or a DataLoader; all are used, and kept meanwhile.
        batch_process_func: makes the model's inputs of what a DataLoader gives.

    Raises:
        CalibrationError: data or outputs are not finite, or the outputs hang on rounding; the model stays as it was.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 1, 1)).eval()
    >>> _ = net[0].weight.data[1].mul_(100)
    >>> x = torch.rand(4, 1, 8, 8)
    >>> before = net(x)
    >>> len(equalize(net, [x]).pairs), torch.allclose(net(x), before, atol=1e-4)
    (1, True)
    """
    return rewrite(model, batches, batch_process_func, find_pairs, "equalize", _ROUNDS)


class Group(Protocol):
    """Modules between which a channel can be made smaller in the first and larger in those that read it."""

    @property
    def first(self) -> str:
        """The path of the first."""

    @property
    def second(self) -> str:
        """The path of one that reads it."""

    def channels(self, model: nn.Module) -> int:
        """How many channels there are."""

    def measured(self, model: nn.Module) -> tuple[nn.Module, bool]:
        """The module at which the channels can be seen, and whether they are in its result."""

    def factors(self, model: nn.Module, ranges: Tensor) -> Tensor:
        """What each channel is to be divided by."""

    def divide(self, model: nn.Module, factors: Tensor) -> None:
        """Make the channels smaller in the first and larger in the others."""


G = TypeVar("G", bound=Group)


@torch.no_grad()
def rewrite(
    model: nn.Module,
    batches: Iterable[Any],
    process: Process | None,
    find: Callable[[nn.Module, Sequence[fx.Graph]], list[G]],
    caller: str,
    rounds: int,
) -> EqualizationResult:
    """Change the sizes of channels in place, where that does not change what the model computes.

    Args:
        find: the groups of modules in the graphs of a model.
        caller: whom messages name.
        rounds: how often all groups are gone through, as one can change the channels of another.
    """
    require_module(model, caller)
    for path, module in model.named_modules():
        if isinstance(module, (QATModule, QuantizedModule, FakeQuantize)):
            raise QuantizationConfigError(
                f"{caller}: the model is prepared already or converted (`{path}` is a {type(module).__name__}); give "
                "the float model, and prepare it afterwards."
            )
    data = take_batches(model, batches, None, process, caller)
    copied = copy_model(model, caller)  # a run may change what a model keeps
    groups = find(model, list(_graphs(copied, data, caller)))
    ranges, wanted = _measured(copied, groups, data, caller)
    for group in _unsound(model, groups, data, wanted, caller):
        ranges.pop(group)
        warn(
            f"{caller}: `{group.first}` and `{group.second}` stay as they are: with other channels between them the "
            "model does not compute the same. Something else reads their weights, or what is between them.",
            CalibrationWarning,
        )
    before = {group: _spread(channels) for group, channels in ranges.items()}
    equalized = copy_model(model, caller)
    _equalize(equalized, ranges, rounds)
    change = _change(_outputs(equalized, data), wanted)
    if change > _ROUNDING:
        raise CalibrationError(
            f"{caller}: rounding alone changes the model's outputs by {change:.1%}: numbers leave the range of their "
            "format, or the outputs hang on a threshold, as after non-maximum suppression. The model is as it was. "
            "Do it in float32, or only to the part before the threshold."
        )
    for path, parameter in model.named_parameters():
        parameter.copy_(equalized.get_parameter(path))
    return EqualizationResult(
        [EqualizedPair(g.first, g.second, before[g], _spread(channels)) for g, channels in ranges.items()], change
    )


def _graphs(model: nn.Module, data: Sequence[Any], caller: str) -> Iterator[fx.Graph]:
    for index, batch in enumerate(data):
        try:
            yield record(model, *arguments_of(model, batch))
        except TraceError as error:
            raise TraceError(f"{caller}: the model cannot run on batch {index}: {error.__cause__ or error}") from error


def _measured(
    model: nn.Module, groups: Sequence[G], data: Sequence[Any], caller: str
) -> tuple[dict[G, Tensor], Outputs]:
    """The largest magnitude of each channel of the groups, and the model's outputs."""
    found: dict[G, Tensor] = {}
    paths = {module: path for path, module in model.named_modules()}
    at = {group: group.measured(model) for group in groups}

    def measure(call: OperatorCall, is_result: bool) -> None:
        values = call.output if is_result else (*call.args, *call.kwargs.values())[0]
        x, weight = values.detach().abs(), call.module.weight  # type: ignore[union-attr]
        axis = x.dim() - (1 if is_result else weight.dim() - 1)  # type: ignore[operator]
        by_channel = x.transpose(0, axis).flatten(1).amax(1)
        if not bool(by_channel.isfinite().all()):
            raise CalibrationError(
                f"{caller}: NaN or infinity reaches `{call.path}`. Leave such data out, or look for a division by zero "
                "or an overflow in the model."
            )
        for group, (module, gives) in at.items():
            if module is call.module and gives == is_result:
                found[group] = torch.maximum(found[group], by_channel) if group in found else by_channel

    with ModuleWatch(
        {paths[module]: module for module, _ in at.values()},
        before=lambda call: measure(call, False) if (call.module, False) in at.values() else None,
        after=lambda call: measure(call, True) if (call.module, True) in at.values() else None,
    ):
        outputs = list(_outputs(model, data))
    return {group: found[group] for group in groups if group in found}, outputs


def _outputs(model: nn.Module, data: Sequence[Any]) -> Iterator[list[Tensor]]:
    """What a model gives in eval mode, batch by batch; where chance has a part, it is the same in every run."""
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for batch in data:
            yield [x.detach().clone() for x in tensors_in(run_batch(model, own_tensors(batch)))]


def _change(found: Iterable[list[Tensor]], wanted: Outputs) -> float:
    """The largest relative error of an output."""
    largest = 0.0
    for mine, theirs in zip(found, wanted, strict=True):
        if len(mine) != len(theirs):
            return math.inf
        largest = max([largest, *map(relative_error, mine, theirs)])
    return largest


def _unsound(model: nn.Module, groups: Sequence[G], data: Sequence[Any], wanted: Outputs, caller: str) -> list[G]:
    """Groups that cannot have other channels between them without changing the outputs."""

    def changes(among: Sequence[G]) -> bool:
        trial = copy_model(model, caller)
        generator = torch.Generator().manual_seed(0)
        for pair in among:
            powers = torch.randint(-2, 3, (pair.channels(model),), generator=generator)
            weight = next(trial.get_submodule(pair.first).parameters())
            pair.divide(trial, torch.exp2(powers).to(weight))
        return _change(_outputs(trial, data), wanted) > _SAME

    def culprits(among: Sequence[G]) -> list[G]:
        if not changes(among):
            return []
        middle = len(among) // 2
        return culprits(among[:middle]) + culprits(among[middle:]) if middle else list(among)

    found = culprits(groups) if groups else []
    if found and changes([]):
        raise CalibrationError(
            f"{caller}: the model gives other outputs when it runs on the same data again, so that it cannot be seen "
            "whether it computes the same afterwards. Take chance out of its forward in eval mode."
        )
    return found


def _equalize(model: nn.Module, ranges: dict[G, Tensor], rounds: int) -> None:
    """Bring channels and weights to one size, pair by pair until nothing moves; `ranges` follow."""
    for _ in range(rounds):
        largest_change = 0.0
        for pair, channels in ranges.items():
            factors = pair.factors(model, channels)
            pair.divide(model, factors)
            channels.div_(factors)
            largest_change = max(largest_change, float(factors.log().abs().max()))
        if largest_change < 0.01:
            break


def _spread(channels: Tensor) -> float:
    return float(channels.max() / channels.median().clamp(min=1e-30))
