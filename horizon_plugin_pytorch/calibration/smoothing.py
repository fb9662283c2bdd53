"""Large channels moved from the results of layer norms into the weights that read them, before a model is prepared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.calibration.batches import Process
from horizon_plugin_pytorch.calibration.channel_pairs import WeightReaders, result_shape
from horizon_plugin_pytorch.calibration.equalization import EqualizationResult, rewrite
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.passes.inplace import asks_only, call_name
from horizon_plugin_pytorch.torch_functions import SAME_MEMORY, SAME_MEMORY_MODULES

_MOVING = SAME_MEMORY | {"clone", "roll", "pad"}
_LIMIT = 1e4  # no channel is made larger or smaller than so many times


@dataclass(frozen=True)
class NormGroup:
    """A layer norm, and the layers that read its result, by their paths.

    Args:
        strength: which part of a channel's size goes into the weights, from 0 to 1.
    """

    first: str
    readers: tuple[str, ...]
    strength: float = 0.5

    @property
    def second(self) -> str:
        """The first of the layers that read it."""
        return self.readers[0]

    @property
    def modules(self) -> set[str]:
        """The paths of all of them."""
        return {self.first, *self.readers}

    def channels(self, model: nn.Module) -> int:
        """How many channels there are."""
        return int(self._norm(model).weight.numel())

    def _norm(self, model: nn.Module) -> Any:
        return model.get_submodule(self.first)

    def _weights(self, model: nn.Module) -> list[Tensor]:
        return [_columns(model.get_submodule(path)) for path in self.readers]  # type: ignore[misc]

    def measured(self, model: nn.Module) -> tuple[nn.Module, bool]:
        """The module at which the channels can be seen, and whether they are in its result."""
        return self._norm(model), True

    def factors(self, model: nn.Module, ranges: Tensor) -> Tensor:
        """What each channel is to be divided by, given its largest magnitude."""
        weights = torch.stack([weight.abs().amax(0) for weight in self._weights(model)]).amax(0)
        is_used = (ranges > 0) & (weights > 0)
        if not bool(is_used.any()):
            return torch.ones_like(ranges)
        wanted = torch.where(is_used, ranges**self.strength / weights ** (1 - self.strength), 1.0)
        middle = wanted[is_used].log().mean().exp()  # sizes stay as they are on the whole
        return torch.where(is_used, (wanted / middle).clamp(1 / _LIMIT, _LIMIT), 1.0)

    def divide(self, model: nn.Module, factors: Tensor) -> None:
        """Make the channels smaller in the norm and larger in the weights."""
        norm = self._norm(model)
        norm.weight.div_(factors)
        if getattr(norm, "bias", None) is not None:
            norm.bias.div_(factors)
        for weight in self._weights(model):
            weight.mul_(factors)


def _columns(layer: Any) -> Tensor | None:
    """The weight of a layer whose columns are the channels of its input."""
    if type(layer) is nn.Linear:
        return layer.weight
    if type(layer) is nn.MultiheadAttention:
        return layer.in_proj_weight  # None where query, key and value have other sizes
    return None


def smooth_norms(
    model: nn.Module,
    batches: Iterable[Any],
    strength: float = 0.5,
    batch_process_func: Process | None = None,
) -> EqualizationResult:
    """Make the channels that layer norms give alike in size, without changing what a float model computes.

    A tensor has one scale for all channels, and layer norms of transformers give few channels that are far larger than
    the others. Where only linear layers read the result of a norm (through reshapes, Dropout and the like), channel
    ``i`` is divided by ``a[i] ** strength / w[i] ** (1 - strength)`` in the norm's weight and bias, and the columns of
    those layers are multiplied by it: ``a`` are the largest magnitudes of the channels in the data, ``w`` those of the
    columns. In int8 the norm's result then loses less, and no operator is added.

    It helps models that norm before attention and before the feed-forward part (ViT, Swin, GPT). Where a norm's result
    is also added (BERT), it stays as it is: give such adds and norms int16. As `equalize` does, each norm is tried
    before anything is changed, and left as it is, with a warning, if the outputs would not be the same.

    Args:
        model: a float model, before `prepare`; changed in place.
        batches: a list, tuple or generator of inputs, or a DataLoader; all are used, and kept meanwhile.
        strength: 0 moves nothing of the result's size, 1 all of it.
        batch_process_func: makes the model's inputs of what a DataLoader gives.

    Raises:
        CalibrationError: data or outputs are not finite, or the outputs hang on rounding; the model stays as it was.

    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)).eval()
    >>> _ = net[0].weight.data[1].mul_(50)
    >>> x = torch.randn(8, 4)
    >>> before = net(x)
    >>> len(smooth_norms(net, [x]).pairs), torch.allclose(net(x), before, atol=1e-4)
    (1, True)
    """
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength <= 1:
        raise QuantizationConfigError(f"smooth_norms: strength must lie between 0 and 1, got {strength!r}.")

    def find(model: nn.Module, graphs: Sequence[fx.Graph]) -> list[NormGroup]:
        return find_norms(model, graphs, float(strength))

    return rewrite(model, batches, batch_process_func, find, "smooth_norms", rounds=1)


def find_norms(model: nn.Module, graphs: Sequence[fx.Graph], strength: float = 0.5) -> list[NormGroup]:
    """Norms whose results only linear layers read, in each of the graphs that call any of them."""
    found = [list(_groups(model, graph, WeightReaders(model, graphs), strength)) for graph in graphs]
    called = [{str(n.target) for n in graph.nodes if n.op == "call_module"} for graph in graphs]
    return [
        group
        for group in dict.fromkeys(group for groups in found for group in groups)
        if all(group in groups or not group.modules & paths for groups, paths in zip(found, called, strict=True))
    ]


def _groups(model: nn.Module, graph: fx.Graph, readers: WeightReaders, strength: float) -> Iterator[NormGroup]:
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    calls: dict[int, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls[id(modules[str(node.target)])] = calls.get(id(modules[str(node.target)]), 0) + 1

    def is_own(module: Any) -> bool:
        return calls.get(id(module)) == 1 and readers.is_alone(module)

    for node in graph.nodes:
        norm: Any = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(norm) not in (nn.LayerNorm, nn.RMSNorm) or norm.weight is None or norm.weight.dim() != 1:
            continue
        found = _readers(node, modules) if is_own(norm) else None
        if found and all(is_own(modules[path]) for path in found):
            yield NormGroup(str(node.target), tuple(found), strength)


def _readers(norm: fx.Node, modules: Mapping[str, Any]) -> list[str] | None:
    """The layers that read a result, through what only moves numbers; None if anything else does."""
    found: dict[str, None] = {}
    pending, seen = [norm], {norm}
    while pending:
        node = pending.pop()
        if not node.users:
            return None
        for user in node.users:
            module = modules.get(str(user.target)) if user.op == "call_module" else None
            is_moving = isinstance(module, SAME_MEMORY_MODULES) if module is not None else call_name(user) in _MOVING
            if module is not None and _columns(module) is not None:
                if type(module) is nn.MultiheadAttention and not _is_self(user, node):
                    return None
                found[str(user.target)] = None
            elif is_moving and _keeps_channels(user, node):
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
            elif not asks_only(user):
                return None
    return list(found)


def _is_self(attention: fx.Node, source: fx.Node) -> bool:
    """Are query, key and value one tensor?"""
    given = dict(zip(("query", "key", "value"), attention.args, strict=False)) | attention.kwargs
    return all(given.get(name) is source for name in ("query", "key", "value"))


def _keeps_channels(node: fx.Node, source: fx.Node) -> bool:
    """Is the last axis still there? Whether it has the same channels is seen when the norm is tried."""
    before, after = result_shape(source), result_shape(node)
    return after is None or before is None or (bool(after) and after[-1] == before[-1])
