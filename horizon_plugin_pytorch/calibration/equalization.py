"""Cross-layer equalisation: channels of the same size, so that one scale fits them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.calibration.batches import Process
from horizon_plugin_pytorch.calibration.called_modules import Modules
from horizon_plugin_pytorch.calibration.channel_pairs import find_pairs
from horizon_plugin_pytorch.calibration.float_rewrite import CHANGES, FloatRewrite, Outputs, told_left
from horizon_plugin_pytorch.capture.plain_model import copy_model
from horizon_plugin_pytorch.errors import CalibrationWarning, warn
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch import ModuleWatch, OperatorCall

_ROUNDS = 10


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
        left: why others stay as they are, by the path of the first layer or of the norm: pairs that were tried and
            change the outputs, and of `smooth_norms` the norms that something else reads.
    """

    pairs: list[EqualizedPair] = field(default_factory=list)
    change: float = 0.0
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [[p.first, p.second, f"{p.before:.2f}", f"{p.after:.2f}"] for p in self.pairs]
        headers = ["layer", "next layer", "largest / median channel", "after"]
        table = Table(headers, rows).text()
        return f"{table}\nThe outputs changed by {self.change:.2g} of their size.{told_left(self.left)}"


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
        CalibrationError: data or outputs are not finite, or rounding alone changes the outputs much; the model stays
            as it was.

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
    find: Callable[[nn.Module, Sequence[fx.Graph], Modules], list[G]],
    caller: str,
    rounds: int,
) -> EqualizationResult:
    """Change the sizes of channels in place, where that does not change what the model computes.

    Args:
        find: the groups of modules in the graphs of a model, which call these modules.
        caller: whom messages name.
        rounds: how often all groups are gone through, as one can change the channels of another.
    """
    same = FloatRewrite(model, batches, process, caller)
    groups = find(model, same.graphs(), same.modules)
    ranges, wanted = _measured(same, groups)

    def divide(trial: nn.Module, group: G, generator: torch.Generator) -> None:
        powers = torch.randint(-2, 3, (group.channels(model),), generator=generator)
        group.divide(trial, torch.exp2(powers).to(next(trial.get_submodule(group.first).parameters())))

    left: dict[str, str] = {}
    for group in same.unsound(list(ranges), divide, wanted):
        ranges.pop(group)
        left[group.first] = CHANGES
        warn(
            f"{caller}: `{group.first}` and `{group.second}` stay as they are: with other channels between them the "
            "model does not compute the same. Something else reads their weights, or what is between them.",
            CalibrationWarning,
        )
    before = {group: _spread(channels) for group, channels in ranges.items()}
    equalized = copy_model(model, caller)
    _equalize(equalized, ranges, rounds)
    change = same.finish(equalized, wanted)
    return EqualizationResult(
        [EqualizedPair(g.first, g.second, before[g], _spread(channels)) for g, channels in ranges.items()], change, left
    )


def _measured(same: FloatRewrite, groups: Sequence[G]) -> tuple[dict[G, Tensor], Outputs]:
    """The largest magnitude of each channel of the groups, and the model's outputs."""
    model = same.copied
    found: dict[G, Tensor] = {}
    paths = {module: path for path, module in model.named_modules()}
    at = {group: group.measured(model) for group in groups}

    def measure(call: OperatorCall, is_result: bool) -> None:
        values = call.output if is_result else (*call.args, *call.kwargs.values())[0]
        x, weight = values.detach().abs(), call.module.weight  # type: ignore[union-attr]
        axis = x.dim() - (1 if is_result else weight.dim() - 1)  # type: ignore[operator]
        if not x.numel():  # a batch without samples
            return
        by_channel = x.movedim(axis, 0).reshape(x.shape[axis], -1).amax(1)
        same.require_finite(by_channel, call.path)
        for group, (module, gives) in at.items():
            if module is call.module and gives == is_result:
                found[group] = torch.maximum(found[group], by_channel) if group in found else by_channel

    with ModuleWatch(
        {paths[module]: module for module, _ in at.values()},
        before=lambda call: measure(call, False) if (call.module, False) in at.values() else None,
        after=lambda call: measure(call, True) if (call.module, True) in at.values() else None,
    ):
        outputs = list(same.outputs(model))
    return {group: found[group] for group in groups if group in found}, outputs


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
