"""The convolution that a layer of bytes runs on: a kernel, or float32 where kernels are not exact for its inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.accumulator import convolution
from horizon_plugin_pytorch.fixed_point.accumulator_plan import reaches
from horizon_plugin_pytorch.fixed_point.byte_shapes import SEVEN_BITS, is_within
from horizon_plugin_pytorch.fixed_point.kernels import PackedConv, Reach, Walk, proved_reach
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32

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


def zero_point_of(input_range: tuple[int, int]) -> int:
    """What kernels, which take bytes from 0 on, add to inputs of a range."""
    return 128 if input_range[0] < 0 else 0


def summed_range(input_range: tuple[int, int]) -> tuple[int, int]:
    """The range of the numbers that are added up for inputs of a range: the bytes of a kernel, with its zero point."""
    return (0, 255) if zero_point_of(input_range) and is_on_kernels(input_range) else input_range


def fits_kernel(weight: Tensor, input_range: tuple[int, int]) -> bool:
    """Are a kernel's sums with these weights below 2**24 before its zero point is taken off them?

    Kernels on AMX give float32 the sum of bytes, and take off there what the zero point added to it.

    Args:
        weight: [out, in / groups, two axes].
    """
    if not zero_point_of(input_range):  # the layer's plan has cut it so
        return True
    return float(reaches(weight.flatten(1).float(), *summed_range(input_range)).max()) < EXACT_FLOAT32


def pack(
    weights: list[Tensor], walk: Walk, input_range: tuple[int, int], shape: torch.Size
) -> list[PackedConv] | list[FloatConv]:
    """Convolutions for inputs of a range and shape, which are added up: all of one kind, as they take one input.

    Args:
        weights: int8, [out, in / groups, one or two axes] each.
    """
    weights = [weight.unsqueeze(2) if weight.dim() == 3 else weight for weight in weights]
    have_kernel = is_on_kernels(input_range) and all(has_kernel(weight.shape, walk.groups) for weight in weights)
    if not have_kernel or not all(fits_kernel(weight, input_range) for weight in weights):
        return [FloatConv(weight, walk) for weight in weights]
    sizes = [torch.Size([shape[0], weight.shape[1] * walk.groups, *shape[2:]]) for weight in weights]
    zero_point = zero_point_of(input_range)
    return [PackedConv(weight, walk, zero_point, size) for weight, size in zip(weights, sizes, strict=True)]
