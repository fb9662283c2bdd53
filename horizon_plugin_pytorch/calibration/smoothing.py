"""Large channels moved from the results of layer norms into the weights that read them, before a model is prepared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.calibration.batches import Process
from horizon_plugin_pytorch.calibration.called_modules import CalledModules, Modules, found_in_all
from horizon_plugin_pytorch.calibration.channel_pairs import balanced
from horizon_plugin_pytorch.calibration.equalization import EqualizationResult, rewrite
from horizon_plugin_pytorch.calibration.norm_readers import (
    MOVING,
    NORMS,
    SHARED,
    add_others,
    is_self_attention,
    refusal,
)
from horizon_plugin_pytorch.errors import QuantizationConfigError

_MOVING = MOVING | {"pad"}  # a zero that is added stays zero, whatever a channel is divided by


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
        return balanced(ranges**self.strength / weights ** (1 - self.strength), (ranges > 0) & (weights > 0))

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
    is also added (BERT), it stays as it is, and the result says so: give such adds and norms int16. As `equalize` does,
    each norm is tried before anything is changed, and left as it is, with a warning, if the outputs would not be the
    same.

    Args:
        model: a float model, before `prepare`; changed in place.
        batches: a list, tuple or generator of inputs, or a DataLoader; all are used, and kept meanwhile.
        strength: 0 moves nothing of the result's size, 1 all of it.
        batch_process_func: makes the model's inputs of what a DataLoader gives.

    Raises:
        CalibrationError: data or outputs are not finite, or rounding alone changes the outputs much; the model stays
            as it was.

    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)).eval()
    >>> _ = net[0].weight.data[1].mul_(50)
    >>> x = torch.randn(8, 4)
    >>> before = net(x)
    >>> len(smooth_norms(net, [x]).pairs), torch.allclose(net(x), before, atol=1e-4)
    (1, True)
    """
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength <= 1:
        raise QuantizationConfigError(f"smooth_norms: strength must lie between 0 and 1, got {strength!r}.")

    left: dict[str, str] = {}

    def find(model: nn.Module, graphs: Sequence[fx.Graph], modules: Modules) -> list[NormGroup]:
        groups = found_in_all(model, graphs, modules, lambda called: _groups(called, float(strength), left))
        add_others(model, graphs, modules, [group.first for group in groups], left)
        return groups

    result = rewrite(model, batches, batch_process_func, find, "smooth_norms", rounds=1)
    result.left = {**left, **result.left}
    return result


def _groups(called: CalledModules, strength: float, left: dict[str, str]) -> Iterator[NormGroup]:
    """Norms of a graph whose results only linear layers read; why others stay comes into `left`."""
    for node in called.graph.nodes:
        norm = called.at(node)
        if not isinstance(norm, NORMS):
            continue
        readers: dict[str, None] = {}
        if type(norm) not in NORMS or norm.weight is None or norm.weight.dim() != 1:
            why = f"{type(norm).__name__} has no weight by channel that is known to be multiplied at last"
        else:
            why = _refusal(node, called, readers) if called.is_own(norm) else SHARED
        if why or not readers:
            left.setdefault(str(node.target), why or "nothing but its shape is read")
        else:
            yield NormGroup(str(node.target), tuple(readers), strength)


def _refusal(norm: fx.Node, called: CalledModules, found: dict[str, None]) -> str:
    """Who reads a result and is no linear layer of all its channels; the layers come into `found`."""
    channels = called.at(norm).weight.numel()

    def takes(user: fx.Node, source: fx.Node) -> bool:
        layer = called.at(user)
        columns = _columns(layer)
        if columns is None or columns.shape[1] != channels or not called.is_own(layer):
            return False
        if type(layer) is nn.MultiheadAttention and not is_self_attention(user, source):
            return False
        found[str(user.target)] = None
        return True

    return refusal(norm, called, takes, _MOVING)
