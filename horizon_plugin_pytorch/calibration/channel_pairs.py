"""Layers that follow each other so that a channel can be made smaller in one and larger in the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd

from horizon_plugin_pytorch.calibration.called_modules import CalledModules, Modules, found_in_all
from horizon_plugin_pytorch.nn.intrinsic.folding import by_output
from horizon_plugin_pytorch.runtime.node_notes import notes

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
# f(x / s) = f(x) / s for any positive s of an element.
_ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_ELEMENTWISE_FUNCTIONS = {"relu", "relu_", "leaky_relu", "dropout", "contiguous"}
# The same for any positive s of what lies along the last axes, of which there are so many.
_SPATIAL: dict[type, int] = {
    nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3,
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3,
    nn.ZeroPad1d: 1, nn.ZeroPad2d: 2, nn.ZeroPad3d: 3,
}  # fmt: skip
_SPATIAL_FUNCTIONS = {
    "max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3, "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3,
    "adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3,
}  # fmt: skip
_LIMIT = 1e4  # the largest factor by which a channel is made larger or smaller


@dataclass(frozen=True)
class ChannelPair:
    """Two layers of a model, and the batch norm after the first, by their paths."""

    first: str
    bn: str | None
    second: str

    @property
    def modules(self) -> set[str]:
        """The paths of all of them."""
        return {self.first, self.second} | ({self.bn} if self.bn is not None else set())

    def channels(self, model: nn.Module) -> int:
        """How many channels there are between the layers."""
        second: Any = model.get_submodule(self.second)
        return second.in_features if isinstance(second, nn.Linear) else second.in_channels

    def measured(self, model: nn.Module) -> tuple[nn.Module, bool]:
        """The module at which the channels can be seen, and whether they are in its result."""
        return model.get_submodule(self.second), False

    def factors(self, model: nn.Module, ranges: Tensor) -> Tensor:
        """What each channel is to be divided by, given its largest magnitude."""
        second: Any = model.get_submodule(self.second)
        weights = _input_ranges(second)
        is_depthwise = getattr(second, "groups", 1) == ranges.numel()
        wanted = ranges if is_depthwise else (ranges / weights).sqrt()
        return balanced(wanted, (ranges > 0) & (weights > 0))

    def divide(self, model: nn.Module, factors: Tensor) -> None:
        """Make the channels smaller in the first layer and larger in the second."""
        first: Any = model.get_submodule(self.first if self.bn is None else self.bn)
        first.weight.div_(by_output(factors, first) if self.bn is None else factors)
        if first.bias is not None:
            first.bias.div_(factors)
        second: Any = model.get_submodule(self.second)
        weight = second.weight
        if isinstance(second, _ConvTransposeNd):
            weight.mul_(factors.reshape(-1, *[1] * (weight.dim() - 1)))
        elif isinstance(second, nn.Linear):
            weight.mul_(factors)
        else:
            by_group = factors.reshape(second.groups, -1).repeat_interleave(weight.shape[0] // second.groups, 0)
            weight.mul_(by_group.reshape(*by_group.shape, *[1] * (weight.dim() - 2)))


def balanced(factors: Tensor, is_used: Tensor) -> Tensor:
    """Factors that leave the sizes of channels as they are on the whole; 1 for a channel that is not used."""
    if not bool(is_used.any()):
        return torch.ones_like(factors)
    middle = factors[is_used].log().mean().exp()
    return torch.where(is_used, (factors / middle).clamp(1 / _LIMIT, _LIMIT), 1.0)


def _input_ranges(layer: Any) -> Tensor:
    """The largest weight for each input channel of a layer."""
    weight = layer.weight.abs()
    if isinstance(layer, _ConvTransposeNd):
        return weight.flatten(1).amax(1)
    if isinstance(layer, nn.Linear):
        return weight.amax(0)
    return weight.flatten(2).amax(2).unflatten(0, (layer.groups, -1)).amax(1).flatten()


def find_pairs(model: nn.Module, graphs: Sequence[fx.Graph], modules: Modules) -> list[ChannelPair]:
    """Pairs that are so in each of the graphs that call any of their layers.

    Args:
        model: whose layers the graphs call.
        graphs: recorded on several inputs, which may take different ways.
        modules: what the graphs call, by path.
    """
    return found_in_all(model, graphs, modules, lambda called: _Chains(called).pairs())


class _Chains:
    """The chains of a graph: a layer, what passes factors on, and another layer."""

    def __init__(self, called: CalledModules) -> None:
        self._called = called

    def pairs(self) -> Iterator[ChannelPair]:
        for start in self._called.graph.nodes:
            first = self._own(start)
            if type(first) not in _LAYERS:
                continue
            axis: int | None = _channel_axis(first, _rank(start))
            last, node, bn = start, _only_user(start), None
            if node is not None and isinstance(self._called.at(node), _BatchNorm):
                if self._own(node) is None or axis != 1:  # of other layers a batch norm's channels are another axis
                    continue
                last, bn, node = node, str(node.target), _only_user(node)
            while node is not None and axis is not None and type(self._called.at(node)) not in _LAYERS:
                axis = self._passed(node, axis, last)
                last, node = node, _only_user(node)
            second = None if node is None else self._own(node)
            if node is not None and second is not None and axis == _channel_axis(second, _rank(last)):
                yield ChannelPair(str(start.target), bn, str(node.target))

    def _own(self, node: fx.Node) -> Any:
        """The module that a node calls, if it has plain weights that serve this place only."""
        module = self._called.at(node)
        if module is None or not self._called.is_own(module):
            return None
        tensors = {name: p for name, p in module._parameters.items() if p is not None}
        is_plain = "weight" in tensors and tensors.keys() <= {"weight", "bias"}
        return module if is_plain else None

    def _passed(self, node: fx.Node, axis: int, source: fx.Node) -> int | None:
        """Where the channels are after a call; None if it does not pass a channel's factor on unchanged."""
        if node.all_input_nodes != [source] or node.op not in ("call_module", "call_function", "call_method"):
            return None
        module = self._called.at(node)
        name = "" if module is not None else _name(node)
        if type(module) in _ELEMENTWISE or name in _ELEMENTWISE_FUNCTIONS:
            return axis
        if type(module) is nn.Upsample or name == "interpolate":
            return axis if axis == 1 else None
        spatial = _SPATIAL.get(type(module)) or _SPATIAL_FUNCTIONS.get(name)
        if spatial is not None:
            return axis if axis < _rank(source) - spatial else None
        if type(module) is nn.Flatten:
            return _flattened(_shape(source), axis, module.start_dim, module.end_dim)
        if name == "flatten":
            given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
            return _flattened(_shape(source), axis, given.get("start_dim", 0), given.get("end_dim", -1))
        return None


def _flattened(shape: tuple[int, ...], axis: int, start: Any, end: Any) -> int | None:
    """Where an axis is after a flatten, if it is still one by itself."""
    start, end = start % len(shape), end % len(shape)
    if axis < start:
        return axis
    if axis > end:
        return axis - (end - start)
    return start if math.prod(shape[start : end + 1]) == shape[axis] else None


def _channel_axis(layer: Any, rank: int) -> int:
    return rank - layer.weight.dim() + 1


def _shape(node: fx.Node) -> tuple[int, ...]:
    shape = notes(node).shape
    assert shape is not None  # `_only_user` asked
    return shape


def _rank(node: fx.Node) -> int:
    return len(_shape(node))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 and notes(node).shape is not None else None


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
