"""The convolution that a layer of bytes runs on: a kernel, or float32 where kernels are not exact for its inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.accumulator import convolution
from horizon_plugin_pytorch.fixed_point.byte_shapes import SEVEN_BITS, is_within
from horizon_plugin_pytorch.fixed_point.kernels import PackedConv, Reach, Walk, proved_reach

_BLOCK = 4


class FloatConv:
    """The sums of a `PackedConv` on float32 numbers.

    Args:
        weight: int8, [out, in / groups, two axes].
    """

    def __init__(self, weight: Tensor, walk: Walk) -> None:
        self._weight = weight.float().contiguous(memory_format=torch.channels_last)
        self._geometry = walk.stride, walk.padding, walk.dilation, walk.groups
        self._is_product = weight.shape[2:].numel() == 1 and walk == Walk()

    def taken(self, x: Tensor) -> Tensor:
        """Integers as `__call__` wants them: float32, channels last."""
        return x.to(torch.float32, memory_format=torch.channels_last)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Sums and bias in float32, channels last: exact while they stay below 2**24."""
        if self._is_product:  # for a few images torch takes a slower way to the same product
            return F.linear(x.permute(0, 2, 3, 1), self._weight.flatten(1), bias).permute(0, 3, 1, 2)
        return convolution(x, self._weight, bias, *self._geometry)


def is_on_kernels(input_range: tuple[int, int]) -> bool:
    """Are the kernels of this machine exact for inputs of this range?"""
    reach = proved_reach()
    return reach is Reach.BYTES or (reach is Reach.SEVEN_BITS and is_within(input_range, SEVEN_BITS))


def has_kernel(weight: torch.Size, groups: int) -> bool:
    """Is there a kernel for weights of this shape? oneDNN adds number by number where groups are not of four channels.

    That takes 10 to 40 times as long as float32 does.
    """
    outputs, inputs = weight[0] // groups, weight[1]
    return groups == 1 or inputs == outputs == 1 or (inputs % _BLOCK == 0 and outputs % _BLOCK == 0)


def pack(weight: Tensor, walk: Walk, input_range: tuple[int, int], shape: torch.Size) -> PackedConv | FloatConv:
    """A convolution for inputs of a range and shape.

    Args:
        weight: int8, [out, in / groups, one or two axes].
    """
    weight = weight.unsqueeze(2) if weight.dim() == 3 else weight
    if not is_on_kernels(input_range) or not has_kernel(weight.shape, walk.groups):
        return FloatConv(weight, walk)
    seen = torch.Size([shape[0], weight.shape[1] * walk.groups, *shape[2:]])
    return PackedConv(weight, walk, 128 if input_range[0] < 0 else 0, seen)
