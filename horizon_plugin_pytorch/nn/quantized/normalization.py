"""Normalisation on integers: layer, group, instance and root-mean-square norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.nn.quantized.small import bytes_of
from horizon_plugin_pytorch.qtensor import QTensor


@dataclass(frozen=True)
class Groups:
    """Which values are normalised together.

    Args:
        view: the shape in which the tensor is looked at.
        dims: the axes of a group in that view.
        parameters: the shape of weight and bias that fits the view; None takes them as they are.
    """

    view: tuple[int, ...]
    dims: list[int]
    parameters: tuple[int, ...] | None = None


def last_axes(shape: tuple[int, ...], normalized_shape: tuple[int, ...]) -> Groups:
    """Groups of layer norm: the last axes.

    >>> last_axes((2, 5, 3, 4), (3, 4))
    Groups(view=(10, 12), dims=[1], parameters=(12,))
    """
    count = prod(normalized_shape)
    lead = shape[: len(shape) - len(normalized_shape)]
    if shape[len(lead) :] != tuple(normalized_shape):
        raise RuntimeError(f"expected the last axes to be {list(normalized_shape)}, got a tensor of {list(shape)}")
    return Groups((prod(lead), count), [1], (count,))


def one_axis(shape: tuple[int, ...], dim: int) -> Groups:
    """Groups of layer norm with `dim`; weight and bias broadcast as they are."""
    return Groups(shape, [dim % len(shape)])


def channel_groups(shape: tuple[int, ...], num_groups: int) -> Groups:
    """Groups of group norm: as many channels, at all positions.

    >>> channel_groups((2, 6, 3, 4), 3)
    Groups(view=(2, 3, 2, 12), dims=[2, 3], parameters=(3, 2, 1))
    """
    batch, channels, *space = shape
    if channels % num_groups:
        raise RuntimeError(f"expected the number of channels to be a multiple of {num_groups}, got {list(shape)}")
    per_group = channels // num_groups
    return Groups((batch, num_groups, per_group, prod(space)), [2, 3], (num_groups, per_group, 1))


def each_channel(shape: tuple[int, ...], rank: int | None) -> Groups:
    """Groups of instance norm: one channel at all positions; an image of `rank` axes may come without a batch axis.

    >>> each_channel((6, 3, 4), 4)
    Groups(view=(1, 6, 12), dims=[2], parameters=(6, 1))
    """
    batch, channels, *space = shape if rank is None or len(shape) == rank else (1, *shape)
    return Groups((batch, channels, prod(space)), [2], (channels, 1))


class Normalization(QuantizedModule):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` in one rounding."""

    weight: Tensor | None
    bias: Tensor | None
    epsilon: float | None = None  # pickles of before have it as `eps`, which the user may have left None

    def configure(self, mod: Any) -> None:
        self.groups: Callable[[tuple[int, ...]], Groups] = mod.groups
        self.eps, self.epsilon, self.is_centred = mod.eps, float(mod.epsilon), bool(mod.is_centred)
        for name in ("weight", "bias"):
            value = getattr(mod, name)
            self.register_buffer(name, None if value is None else value.detach().clone())

    def _plan(self, x: QTensor, groups: Groups) -> tuple:
        assert self.scale is not None
        out_scale = self.scale.double()

        def in_steps(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            steps = (value.double() / out_scale).float()
            return steps if groups.parameters is None else steps.reshape(groups.parameters)

        gain = 1.0 if self.weight is not None else 1.0 / float(out_scale)
        epsilon = self.eps if self.epsilon is None else self.epsilon
        return in_steps(self.weight), in_steps(self.bias), gain, epsilon / float(x.scale.double()) ** 2

    def forward(self, x: QTensor) -> QTensor:
        x = self.quantized_input(x)
        shape = tuple(x.shape)
        groups, plan = self._plans.get((x,), shape, lambda: self._made(x, shape))
        values = bytes_of(x, self.out_dtype)
        values = (x.plain() if values is None else values).reshape(groups.view)
        out = fp.normalize(values, groups.dims, *plan, self.is_centred, x.dtype.bits, self.low, self.high)
        return self.output(out.reshape(shape))

    def _made(self, x: QTensor, shape: tuple[int, ...]) -> tuple:
        groups = self.groups(shape)
        return groups, self._plan(x, groups)
