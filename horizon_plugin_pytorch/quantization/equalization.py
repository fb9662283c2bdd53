"""Cross-layer equalisation: channels of the same size, so that one scale fits them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fx.recording import record
from horizon_plugin_pytorch.nn.intrinsic.folding import by_output
from horizon_plugin_pytorch.quantization.batches import Process, take_batches
from horizon_plugin_pytorch.quantization.calibration import arguments_of, run_batch
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize

# f(x / s) = f(x) / s for any positive s of a channel.
_MODULES = (
    nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.Upsample, nn.Flatten,
)  # fmt: skip
_FUNCTIONS = {
    "relu", "relu_", "leaky_relu", "dropout", "contiguous", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate",
    "flatten",
}  # fmt: skip
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
_ROUNDS = 10
_LIMIT = 1e4  # no channel is made larger or smaller than so many times


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
    """What `equalize` did; printing it gives a table."""

    pairs: list[EqualizedPair] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [[p.first, p.second, f"{p.before:.2f}", f"{p.after:.2f}"] for p in self.pairs]
        headers = ["layer", "next layer", "largest / median channel", "after"]
        return tabulate(rows, headers=headers, disable_numparse=True)


@torch.no_grad()
def equalize(model: nn.Module, batches: Iterable[Any], batch_process_func: Process | None = None) -> EqualizationResult:
    """Make the channels between layers of a float model alike in size, without changing what the model computes.

    Where a layer (with its batch norm), activations such as ReLU, poolings and then another layer follow each other and
    nobody else reads what is between, a channel may be made smaller in the first and larger in the second. A tensor has
    one scale for all channels and a weight one for each output channel, so channel ``i`` is divided by
    ``sqrt(a[i] / w[i])``, with ``a`` the largest magnitudes of the channels in the data and ``w`` those of the second
    layer's weights for them; before a depthwise convolution, whose weights have a scale for each channel, by ``a[i]``.

    ReLU6 and other activations that are not linear for positive numbers end a chain.

    Args:
        model: a float model, before `prepare`; changed in place.
        batches: a list or tuple of inputs, or a DataLoader; all are used.
        batch_process_func: makes the model's inputs of what a DataLoader gives.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 1, 1)).eval()
    >>> _ = net[0].weight.data[1].mul_(100)
    >>> x = torch.rand(4, 1, 8, 8)
    >>> before = net(x)
    >>> len(equalize(net, [x]).pairs), torch.allclose(net(x), before, atol=1e-4)
    (1, True)
    """
    if any(isinstance(m, FakeQuantize) for m in model.modules()):
        raise QuantizationConfigError("equalize: the model is prepared already; equalize the float model before.")
    data = take_batches(model, batches, None, batch_process_func, "equalize")
    args, kwargs = arguments_of(model, data[0])
    pairs = list(_pairs(model, record(model, args, kwargs)))
    ranges = _channel_ranges(model, pairs, data)
    before = [_spread(r) for r in ranges]
    for _ in range(_ROUNDS):
        largest_change = 0.0
        for pair, channels in zip(pairs, ranges, strict=True):
            factors = pair.factors(channels)
            pair.divide_by(factors)
            channels.div_(factors)
            largest_change = max(largest_change, float(factors.log().abs().max()))
        if largest_change < 0.01:
            break
    after = [_spread(r) for r in ranges]
    return EqualizationResult(
        [EqualizedPair(p.first_path, p.second_path, a, b) for p, a, b in zip(pairs, before, after, strict=True)]
    )


def _spread(channels: Tensor) -> float:
    return float(channels.max() / channels.median().clamp(min=1e-30))


@dataclass(frozen=True)
class _Pair:
    first_path: str
    first: Any
    bn: Any
    second_path: str
    second: Any

    def factors(self, channels: Tensor) -> Tensor:
        """What each channel is to be divided by."""
        weights = self._input_ranges()
        is_depthwise = getattr(self.second, "groups", 1) == channels.numel()
        wanted = channels if is_depthwise else (channels / weights).sqrt()
        is_used = (channels > 0) & (weights > 0)
        if not bool(is_used.any()):
            return torch.ones_like(channels)
        middle = wanted[is_used].log().mean().exp()  # sizes stay as they are on the whole
        return torch.where(is_used, (wanted / middle).clamp(1 / _LIMIT, _LIMIT), 1.0)

    def _input_ranges(self) -> Tensor:
        """The largest weight for each input channel of the second layer."""
        weight = self.second.weight.abs()
        if isinstance(self.second, _ConvTransposeNd):
            return weight.flatten(1).amax(1)
        if isinstance(self.second, nn.Linear):
            return weight.amax(0)
        return weight.flatten(2).amax(2).unflatten(0, (self.second.groups, -1)).amax(1).flatten()

    def divide_by(self, factors: Tensor) -> None:
        """Make the channels smaller in the first layer and larger in the second."""
        if self.bn is None:
            self.first.weight.div_(by_output(factors, self.first))
            if self.first.bias is not None:
                self.first.bias.div_(factors)
        else:
            self.bn.weight.div_(factors)
            self.bn.bias.div_(factors)
        weight = self.second.weight
        if isinstance(self.second, _ConvTransposeNd):
            weight.mul_(factors.reshape(-1, *[1] * (weight.dim() - 1)))
        elif isinstance(self.second, nn.Linear):
            weight.mul_(factors)
        else:
            groups = self.second.groups
            by_group = factors.reshape(groups, -1).repeat_interleave(weight.shape[0] // groups, 0)
            weight.mul_(by_group.reshape(*by_group.shape, *[1] * (weight.dim() - 2)))


def _pairs(model: nn.Module, graph: fx.Graph) -> Iterator[_Pair]:
    """Layers that follow each other with nothing between but what passes factors on."""
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    calls = Counter(id(modules[str(n.target)]) for n in graph.nodes if n.op == "call_module")
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)

    def called(node: fx.Node, kinds: tuple[type, ...]) -> Any:
        """The module that a node calls, if it is one of these and serves this place only."""
        module = modules[str(node.target)] if node.op == "call_module" else None
        if not isinstance(module, nn.Module) or not isinstance(module, kinds) or calls[id(module)] != 1:
            return None
        tensors: dict[str, Any] = dict(module.named_parameters(recurse=False))
        is_plain = tensors.keys() <= {"weight", "bias"}
        return module if is_plain and all(owners[id(p)] == 1 for p in tensors.values()) else None

    for start in graph.nodes:
        first = called(start, _LAYERS)
        if first is None or type(first) not in _LAYERS:
            continue
        node, bn = _only_user(start), None
        if node is not None and called(node, (_BatchNorm,)) is not None:
            bn = called(node, (_BatchNorm,))
            node = _only_user(node)
            if bn.weight is None or isinstance(first, nn.Linear):  # a Linear's channels may be another axis than bn's
                continue
        is_flat = isinstance(first, nn.Linear)
        while node is not None and _passes(node, modules):
            is_flat = is_flat or _is_flatten(node, modules)
            node = _only_user(node)
        second = None if node is None else called(node, _LAYERS)
        if node is None or type(second) not in _LAYERS or isinstance(second, nn.Linear) != is_flat:
            continue
        if _channels(first, True) == _channels(second, False):
            yield _Pair(str(start.target), first, bn, str(node.target), second)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_flatten(node: fx.Node, modules: dict[str, Any]) -> bool:
    return isinstance(modules[str(node.target)], nn.Flatten) if node.op == "call_module" else _name(node) == "flatten"


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _passes(node: fx.Node, modules: dict[str, Any]) -> bool:
    """Does a factor of a channel pass through the call unchanged?"""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return module.start_dim == 1 if isinstance(module, nn.Flatten) else type(module) in _MODULES
    if node.op not in ("call_function", "call_method") or _name(node) not in _FUNCTIONS:
        return False
    start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
    return _name(node) != "flatten" or bool(start == 1)


def _channels(layer: Any, is_output: bool) -> int:
    if isinstance(layer, _ConvNd):
        return layer.out_channels if is_output else layer.in_channels
    return layer.out_features if is_output else layer.in_features


def _channel_ranges(model: nn.Module, pairs: list[_Pair], batches: list[Any]) -> list[Tensor]:
    """The largest magnitude of each channel that enters the second layer of each pair."""
    found: list[Tensor] = [torch.zeros(_channels(p.second, False), device=p.second.weight.device) for p in pairs]

    def keep(index: int, layer: nn.Module) -> Any:
        def hook(module: Any, args: tuple) -> None:
            x = args[0].detach().abs()
            channel = x.dim() - module.weight.dim() + 1
            by_channel = x.transpose(0, channel).flatten(1).amax(1)
            found[index] = torch.maximum(found[index], by_channel.to(found[index].dtype))

        return layer.register_forward_pre_hook(hook)

    hooks = [keep(index, pair.second) for index, pair in enumerate(pairs)]
    is_training = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        for batch in batches:
            run_batch(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in is_training:
            module.training = mode
    return found
