"""Layers whose kernel requantizes: one call gives bytes, where two float32 roundings are proved to be the definition.

The few channels for which they are not are computed once more, and finished as the plan says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.accumulator_plan import AccumulatorPlan
from horizon_plugin_pytorch.fixed_point.byte_convs import fits_kernel, pack
from horizon_plugin_pytorch.fixed_point.byte_shapes import pixel_strides
from horizon_plugin_pytorch.fixed_point.kernels import PackedConv, PackedLinear, Walk
from horizon_plugin_pytorch.fixed_point.lines import Line, choose_line
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32

_MOST_UNPROVED = 0.25  # of the channels
_LEAST_SUMS = 1 << 16  # of fewer, to compute some channels again takes longer than to finish them all


@dataclass(frozen=True)
class Rounding:
    """A layer whose kernel requantizes, and the channels for which it does not: these are finished as in others.

    Attributes:
        rest: the channels; None if there are none.
        rest_conv, rest_bias, rest_factor: their layer.
        takes_rest: does their layer have as many inputs as they are? A depthwise one has.
    """

    conv: PackedConv | PackedLinear
    line: Line
    low: int
    high: int
    rest: Tensor | None = None
    rest_conv: PackedConv | PackedLinear | None = None
    rest_bias: Tensor | None = None
    rest_factor: Tensor | None = None
    takes_rest: bool = False

    def is_faster(self, sums: int) -> bool:
        """Is it, for so many sums, than to finish them all on float32?"""
        return self.rest is None or sums >= _LEAST_SUMS

    @property
    def has_rows(self) -> bool:
        """Does it take rows, and not images?"""
        return isinstance(self.conv, PackedLinear)

    def __call__(self, x: Tensor) -> Tensor:
        """int8, images with channels last, of the same."""
        taken = self.conv.taken(x)
        out = self.conv.rounded(taken, self.line.scale, self.line.offset, self.low, self.high)
        if self.rest is None:
            return out
        assert self.rest_conv is not None and self.rest_factor is not None
        acc = self.rest_conv(taken.index_select(1, self.rest) if self.takes_rest else taken, self.rest_bias)
        acc.mul_(self.rest_factor).round_().clamp_(self.low, self.high)
        return out.index_copy_(1, self.rest, acc.to(torch.int8))


def find_rounding(
    plan: AccumulatorPlan,
    weight: Tensor,
    walk: Walk,
    input_range: tuple[int, int],
    shape: torch.Size,
    linear: PackedLinear | None,
    conv: PackedConv | None,
    is_linear: bool,
) -> Rounding | None:
    """How the kernel of a layer that is one sum requantizes it; None where it cannot, or too many channels are left.

    Args:
        weight: [out, in / groups, two axes].
        shape: of the images.
        linear: the kernel that takes rows, if the layer runs on it.
        conv: the one that takes images, if it is packed already.
        is_linear: is it a linear layer, rather than a convolution?
    """
    size = weight.flatten(1).float().abs().sum(1, dtype=torch.float64)  # a byte cannot hold that of -128
    reach = size * max(-input_range[0], input_range[1])
    if float(reach.max()) >= EXACT_FLOAT32 or not fits_kernel(weight, input_range):
        return None
    line = choose_line(plan.factor, plan.bias, plan.low, plan.high, reach)
    rest = line.unproved
    is_depthwise = weight.shape[:2] == (walk.groups, 1)
    if len(rest):
        if is_linear and linear is None:  # a product and its finish take less
            return None
        if len(rest) > _MOST_UNPROVED * len(weight) or (walk.groups > 1 and not is_depthwise):
            return None
    if linear is None and conv is None:
        conv = _packed(weight, walk, input_range, shape)
    whole = linear or conv
    assert whole is not None
    if not len(rest):
        return Rounding(whole, line, plan.low, plan.high)
    bias, factor = None if plan.bias is None else plan.bias[rest], plan.factor[rest]
    if linear is not None:
        again = linear.of_channels(weight.flatten(1).to(torch.int8)[rest])
        return Rounding(whole, line, plan.low, plan.high, rest, again, bias, factor)
    takes_rest = is_depthwise and walk.groups > 1
    rest_walk = replace(walk, groups=len(rest)) if takes_rest else walk
    rest_conv = _packed(weight[rest], rest_walk, input_range, shape)
    return Rounding(whole, line, plan.low, plan.high, rest, rest_conv, bias, factor.reshape(-1, 1, 1), takes_rest)


def _packed(weight: Tensor, walk: Walk, input_range: tuple[int, int], shape: torch.Size) -> PackedConv:
    (conv,) = pack([weight.to(torch.int8)], walk, input_range, shape)
    assert isinstance(conv, PackedConv)
    return conv


class OneCall:
    """A layer on images of one shape whose kernel requantizes all channels: nothing else is to be asked.

    Args:
        shape, sizes: of its input and output.
    """

    __slots__ = ("_kernel", "_rows", "_settings", "_shape", "_sizes", "_strides")

    def __init__(self, rounding: Rounding, shape: torch.Size, sizes: torch.Size) -> None:
        self._kernel, line = rounding.conv, rounding.line
        self._settings = line.scale, line.offset, rounding.low, rounding.high
        self._shape, self._sizes = shape, sizes
        batch, channels, height, width = shape
        self._rows = ((batch * height * width, channels), (channels, 1)) if rounding.has_rows else None
        self._strides = pixel_strides(sizes)

    def __call__(self, x: Tensor) -> Tensor | None:
        """int8 with channels last, of the same; None of others."""
        if x.shape != self._shape or x.dtype is not torch.int8:
            return None
        if not x.is_contiguous(memory_format=torch.channels_last):
            return None
        kernel, rows = self._kernel, self._rows
        if rows is None:
            return kernel.rounded(kernel.taken(x), *self._settings)
        out = kernel.rounded(kernel.taken(x.as_strided(*rows)), *self._settings)
        return out.as_strided(self._sizes, self._strides)
