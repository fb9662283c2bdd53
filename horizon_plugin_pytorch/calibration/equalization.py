"""Cross-layer equalisation: channels of the same size, so that one scale fits them all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.calibration.batches import Process, run_batch, take_batches
from horizon_plugin_pytorch.calibration.channel_pairs import ChannelPair, find_pairs
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
    require_module(model, "equalize")
    for path, module in model.named_modules():
        if isinstance(module, (QATModule, QuantizedModule, FakeQuantize)):
            raise QuantizationConfigError(
                f"equalize: the model is prepared already or converted (`{path}` is a {type(module).__name__}); give "
                "the float model, and prepare it afterwards."
            )
    data = take_batches(model, batches, None, batch_process_func, "equalize")
    copied = copy_model(model, "equalize")  # a run may change what a model keeps
    pairs = find_pairs(model, list(_graphs(copied, data)))
    ranges, wanted = _measured(copied, pairs, data)
    for pair in _unsound(model, pairs, data, wanted):
        ranges.pop(pair)
        warn(
            f"equalize: `{pair.first}` and `{pair.second}` stay as they are: with other channels between them the "
            "model does not compute the same. Something else reads their weights, or what is between them.",
            CalibrationWarning,
        )
    before = {pair: _spread(channels) for pair, channels in ranges.items()}
    equalized = copy_model(model, "equalize")
    _equalize(equalized, ranges)
    change = _change(_outputs(equalized, data), wanted)
    if change > _ROUNDING:
        raise CalibrationError(
            f"equalize: rounding alone changes the model's outputs by {change:.1%}: numbers leave the range of their "
            "format, or the outputs hang on a threshold, as after non-maximum suppression. The model is as it was. "
            "Equalize it in float32, or only the part before the threshold."
        )
    for path, parameter in model.named_parameters():
        parameter.copy_(equalized.get_parameter(path))
    return EqualizationResult(
        [EqualizedPair(p.first, p.second, before[p], _spread(channels)) for p, channels in ranges.items()], change
    )


def _graphs(model: nn.Module, data: Sequence[Any]) -> Iterator[fx.Graph]:
    for index, batch in enumerate(data):
        try:
            yield record(model, *arguments_of(model, batch))
        except TraceError as error:
            raise TraceError(f"equalize: the model cannot run on batch {index}: {error.__cause__ or error}") from error


def _measured(
    model: nn.Module, pairs: Sequence[ChannelPair], data: Sequence[Any]
) -> tuple[dict[ChannelPair, Tensor], Outputs]:
    """The largest magnitude of each channel that enters the second layers, and the model's outputs."""
    found: dict[ChannelPair, Tensor] = {}
    by_layer: dict[str, list[ChannelPair]] = {}
    for pair in pairs:
        by_layer.setdefault(pair.second, []).append(pair)

    def measure(call: OperatorCall) -> None:
        x, weight = (*call.args, *call.kwargs.values())[0].detach().abs(), call.module.weight  # type: ignore[union-attr]
        by_channel = x.transpose(0, x.dim() - weight.dim() + 1).flatten(1).amax(1)  # type: ignore[operator]
        if not bool(by_channel.isfinite().all()):
            raise CalibrationError(
                f"equalize: NaN or infinity reaches `{call.path}`. Leave such data out, or look for a division by zero "
                "or an overflow in the model."
            )
        for pair in by_layer[call.path]:
            found[pair] = torch.maximum(found[pair], by_channel) if pair in found else by_channel

    with ModuleWatch({path: model.get_submodule(path) for path in by_layer}, before=measure):
        outputs = list(_outputs(model, data))
    return {pair: found[pair] for pair in pairs if pair in found}, outputs


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


def _unsound(model: nn.Module, pairs: Sequence[ChannelPair], data: Sequence[Any], wanted: Outputs) -> list[ChannelPair]:
    """Pairs that cannot have other channels between them without changing the outputs."""

    def changes(among: Sequence[ChannelPair]) -> bool:
        trial = copy_model(model, "equalize")
        generator = torch.Generator().manual_seed(0)
        for pair in among:
            powers = torch.randint(-2, 3, (pair.channels(model),), generator=generator)
            weight = trial.get_submodule(pair.second).weight
            pair.divide(trial, torch.exp2(powers).to(weight))  # type: ignore[arg-type]
        return _change(_outputs(trial, data), wanted) > _SAME

    def culprits(among: Sequence[ChannelPair]) -> list[ChannelPair]:
        if not changes(among):
            return []
        middle = len(among) // 2
        return culprits(among[:middle]) + culprits(among[middle:]) if middle else list(among)

    found = culprits(pairs) if pairs else []
    if found and changes([]):
        raise CalibrationError(
            "equalize: the model gives other outputs when it runs on the same data again, so that it cannot be seen "
            "whether it computes the same afterwards. Take chance out of its forward in eval mode."
        )
    return found


def _equalize(model: nn.Module, ranges: dict[ChannelPair, Tensor]) -> None:
    """Bring channels and weights to one size, pair by pair until nothing moves; `ranges` follow."""
    for _ in range(_ROUNDS):
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
