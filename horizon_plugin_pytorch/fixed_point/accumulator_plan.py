"""How a layer's sum is computed exactly: digits, parts and factors, for one input scale and range.

A sum of integers is exact in float32 while no partial sum passes 2**24. Weights and the input's range are known, so the
worst case is known: where it fits, one float32 convolution does it. Where it does not, input channels are split into
parts, and 16-bit operands into byte digits, so that each convolution fits; the pieces are added in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point import rescaling
from horizon_plugin_pytorch.fixed_point.lines import move_to_lines
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32, OutputSums, choose_factor, signed_sums

INT32_MAX = (1 << 31) - 1
_DIGIT = 128.0
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_MOST_TAP_PARTS = 3


@dataclass(frozen=True)
class AccumulatorPlan:
    """Everything that a layer's integer arithmetic needs, for one input scale and range.

    Args:
        weights: integer weights of each part, as byte digits (lowest first); for `is_double` the float64 weights, plain
            and times the factor.
        factor: requantization factor, or the accumulator's scale for real outputs; its dtype is the sum's dtype.
        input_digits, parts: how inputs are cut; `parts` 0 means that no cut of the channels is enough.
        is_double: on the CPU, one float64 convolution is faster than the cut ones.
        worst_case: largest magnitude that the sum can reach before its residual alone saturates the output.
        saturates: the sum is limited to int32; one of int16 weights is not.
        low, high: range of the output.
        is_real: the sum leaves as real numbers.
    """

    weights: list[Tensor]
    bias: Tensor | None
    factor: Tensor
    residual_factor: Tensor | None
    input_digits: int
    parts: int
    is_double: bool
    worst_case: float
    saturates: bool
    low: int
    high: int
    is_real: bool

    @property
    def limit(self) -> float:
        """Where the sum saturates, 0 if it cannot get there."""
        return float(INT32_MAX) if self.saturates and self.worst_case > INT32_MAX else 0.0


@dataclass(frozen=True)
class Geometry:
    """How a convolution walks over its input; one number for each spatial axis."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output_padding: list[int]
    groups: int
    is_transposed: bool

    @property
    def input_axis(self) -> int:
        """The weight's axis of input channels."""
        return 0 if self.is_transposed else 1

    @property
    def spread(self) -> tuple[int, ...]:
        """The shape in which one value a channel meets the output."""
        return (-1, *[1] * len(self.stride))


def _double_weights(weight: Tensor, factor: Tensor, output_axis: int, groups: int) -> list[Tensor]:
    """The weights in float64, and multiplied by the factor of their output channel.

    With 20-bit multipliers and sums within int32 every product and partial sum has at most 53 bits, so a layer with
    the second tensor gives the scaled accumulator exactly.
    """
    whole = weight.double()
    shape = [1] * weight.dim()
    shape[output_axis] = -1
    if output_axis == 1 and groups > 1:
        by_group = whole.unflatten(0, (groups, -1)) * factor.double().reshape(groups, 1, *shape[1:])
        return [whole, by_group.flatten(0, 1)]
    return [whole, whole * factor.double().reshape(shape)]


def split_digits(x: Tensor, count: int) -> list[Tensor]:
    """Signed base-256 digits of integers, lowest first: one for 8-bit values, two for 16-bit values.

    >>> [d.tolist() for d in split_digits(torch.tensor([-32768.0, 300.0]), 2)]
    [[0.0, 44.0], [-128.0, 1.0]]
    """
    if count == 1:
        return [x]
    high = x.mul(1 / 256).round_()
    return [torch.add(x, high, alpha=-256.0), high]


def reaches(weight: Tensor, low: float, high: float, largest: float | None = None) -> Tensor:
    """The largest positive and negative sums over the last axis: [2, ...] in float64.

    Args:
        largest: the largest magnitude of a weight, or a number above it, where somebody knows one.
    """
    return _reaches_of(*signed_sums(weight, largest), low, high)


def _reaches_of(positive: Tensor, negative: Tensor, low: float, high: float) -> Tensor:
    return torch.stack([positive * high + negative * -low, negative * high + positive * -low])


def channel_parts(
    weight: Tensor,
    channels: int,
    low: float,
    high: float,
    bias: Tensor,
    whole: Tensor | None = None,
    largest: float | None = None,
) -> int:
    """How many slices of the input channels keep every slice's partial sums below 2**24; 0 if none does.

    Args:
        weight: [out, weights], those of an input channel side by side.
        bias: what the sum holds beside the products, if it stays whole.
        whole: the `reaches` of the weight, where they are known.
        largest: as of `reaches`.
    """
    whole = reaches(weight, low, high, largest) if whole is None else whole
    if float((whole.amax(0) + bias).max()) < EXACT_FLOAT32:
        return 1
    taps = weight.shape[1] // max(channels, 1)
    for parts in _PARTS[1:]:
        if parts > channels:
            break
        # Sums over whole slices: those of single channels are short, and torch takes long for many short ones.
        sizes = [len(slice_) * taps for slice_ in torch.arange(channels).tensor_split(parts)]
        if all(float(reaches(piece, low, high, largest).max()) < EXACT_FLOAT32 for piece in weight.split(sizes, 1)):
            return parts
    return 0


def _tap_parts(reaches: Tensor) -> Tensor:
    """For each output channel and weight, the part that it belongs to, so that no part's sums pass 2**24.

    A channel whose sums fit is in part 0 as a whole. The weights of the others are taken in order, each counted at its
    larger side, so that positive and negative sums of a part stay within the limit together.
    """
    limit = EXACT_FLOAT32 - 1 - float(reaches.max())
    part = torch.div(reaches.amax(0).cumsum(1), limit, rounding_mode="floor").long()
    fits = reaches.sum(2).amax(0) < EXACT_FLOAT32
    return part.masked_fill(fits.unsqueeze(1), 0)


def choose_residual_factor(ratio: Tensor, bits: int) -> Tensor:
    """``R / 2**k`` for the ratio of a residual's scale to the accumulator's.

    ``R`` has 16 bits for an 8-bit residual, so that their product is exact in float32; and 24 bits for one of 16.
    """
    width = 16 if bits <= 8 else 24
    shift = (width - torch.frexp(ratio)[1].double()).clamp(max=22 if bits <= 8 else 40)
    return torch.ldexp(torch.round(torch.ldexp(ratio, shift)), -shift)


def plan_accumulator(
    weight: Tensor,
    bias: Tensor | None,
    accumulator_scale: Tensor,
    output_scale: Tensor | None,
    *,
    output_axis: int,
    groups: int,
    input_range: tuple[int, int],
    weight_bits: int,
    low: int,
    high: int,
    residual_scale: Tensor | None = None,
    residual_bits: int = 8,
    sums: OutputSums | None = None,
) -> AccumulatorPlan:
    """Choose digits, parts and factors for a layer.

    Args:
        weight: integer weights, float32.
        bias: real bias, one per output channel.
        accumulator_scale: input scale times weight scale, one per output channel, float64.
        output_scale: None for a high-precision output, which leaves as real numbers.
        output_axis: 0 for Conv2d and Linear, 1 for ConvTranspose2d.
        input_range: smallest and largest integer of the input.
        residual_scale: scale of a tensor that is added before rounding.
        sums: those of the weight, where they are known.
    """
    by_output = rescaling.by_output(weight, output_axis, groups)
    outputs, channels = by_output.shape[:2]
    by_output = by_output.flatten(1)
    accumulator_scale = accumulator_scale.double().reshape(-1).expand(outputs)
    integer_bias, bias_size = None, torch.zeros(outputs, dtype=torch.float64, device=weight.device)
    if bias is not None:
        integer_bias = torch.round(bias.detach().double() / accumulator_scale).clamp(-INT32_MAX - 1, INT32_MAX)
        bias_size = integer_bias.abs()

    sums = OutputSums.of(weight, output_axis, groups) if sums is None else sums
    whole = _reaches_of(sums.positive, sums.negative, min(input_range[0], 0), max(input_range[1], 0))
    reach = whole.amax(0) + bias_size
    cut = _choose_cut(
        weight, by_output, whole, bias_size, input_range, weight_bits, output_axis, groups, channels, sums.largest
    )
    is_pointwise = groups == 1 and by_output.shape[1] == channels
    is_double = cut.parts == 0 or (is_pointwise and max(cut.input_digits, cut.weight_digits) > 1)
    # One piece holds the bias too, where that fits.
    is_overfull = cut.parts == 1 and bool((reach >= EXACT_FLOAT32).any())

    residual_factor = None
    if residual_scale is not None:
        residual_factor = choose_residual_factor(residual_scale.double().reshape(-1) / accumulator_scale, residual_bits)
        residual_reach = residual_factor * float(1 << (residual_bits - 1)) + 1
        if output_scale is not None:  # beyond this the output is saturated, whatever the layer adds
            end = (max(abs(low), abs(high)) + 1) * output_scale.double().reshape(-1) / accumulator_scale
            residual_reach = torch.minimum(residual_reach, end * (1 + 2.0**-10) + reach + 1)
        reach = reach + residual_reach

    # A float32 sum of two exact terms may pass 2**24: rounding is monotone, so that only matters to real outputs.
    # A third term could bring such a sum back to where a lost unit shows. The bias is a term unless one piece holds it.
    terms = cut.parts + (residual_factor is not None) + (bias is not None and cut.parts > 1)
    is_wide = (
        cut.input_digits * cut.weight_digits > 1
        or is_double
        or is_overfull
        or terms > 2
        or (residual_scale is not None and residual_bits > 8)
        or (output_scale is None and bool((reach >= EXACT_FLOAT32).any()))
    )
    if output_scale is None:
        factor = accumulator_scale if is_wide else accumulator_scale.float()
    else:
        ratio = accumulator_scale / output_scale.double().reshape(-1)
        factor = choose_factor(ratio, low, high)
        if residual_scale is None and weight_bits <= 8:  # whatever the input is: it must not move the factor
            any_byte = (sums.positive + sums.negative) * _DIGIT
            factor = move_to_lines(factor, ratio, integer_bias, low, high, any_byte)
        last_step = (max(abs(low), abs(high)) + 1) / factor.double()
        if is_wide or bool(((reach >= EXACT_FLOAT32) & (last_step >= EXACT_FLOAT32)).any()):
            factor = factor.double()
    is_wide = factor.dtype == torch.float64
    return AccumulatorPlan(
        weights=_double_weights(weight, factor, output_axis, groups) if is_double else cut.weights,
        bias=None if integer_bias is None else integer_bias.to(factor.dtype),
        factor=factor,
        residual_factor=None if residual_factor is None else residual_factor.to(factor.dtype),
        input_digits=cut.input_digits,
        parts=cut.parts,
        is_double=is_double,
        worst_case=float(reach.max()),
        saturates=weight_bits <= 8,
        low=low,
        high=high,
        is_real=output_scale is None,
    )


@dataclass(frozen=True)
class Cut:
    """A layer in pieces whose sums are exact in float32: byte digits of the operands, parts of the weights.

    `weights` has one tensor for each part and digit, digits of one part side by side. A part has a slice of the input
    channels; where there are groups, it has all channels and zeros in place of the weights of other parts.
    """

    input_digits: int
    weight_digits: int
    parts: int
    weights: list[Tensor]


def cut_layer(weight: Tensor, input_digits: int, weight_digits: int, parts: int, axis: int, groups: int) -> Cut:
    """Cut the input channels of a layer into so many parts, and its weights into so many digits."""
    if parts == 0:
        return Cut(input_digits, weight_digits, 0, [weight])
    slices = _masked_channels(weight, parts, axis, groups) if groups > 1 else weight.tensor_split(parts, dim=axis)
    weights = [digit.contiguous() for piece in slices for digit in split_digits(piece, weight_digits)]
    return Cut(input_digits, weight_digits, parts, weights)


def _masked_channels(weight: Tensor, parts: int, axis: int, groups: int) -> list[Tensor]:
    per_group = weight.shape[axis] if axis == 1 else weight.shape[0] // groups
    part = torch.empty(per_group, dtype=torch.long, device=weight.device)
    for index, members in enumerate(torch.arange(per_group, device=weight.device).tensor_split(parts)):
        part[members] = index
    shape = [1] * weight.dim()
    shape[axis] = -1
    mask = (part.repeat(groups) if axis == 0 else part).reshape(shape)
    return [weight * (mask == index) for index in range(parts)]


def _choose_cut(
    weight: Tensor,
    by_output: Tensor,
    whole: Tensor,
    bias: Tensor,
    input_range: tuple[int, int],
    weight_bits: int,
    output_axis: int,
    groups: int,
    channels: int,
    largest: float,
) -> Cut:
    """The cheapest cut that keeps every piece exact."""
    input_axis = 1 - output_axis
    is_byte = max(-input_range[0], input_range[1]) <= _DIGIT
    low, high = min(input_range[0], 0), max(input_range[1], 0)
    if weight_bits <= 8:
        parts = channel_parts(by_output, channels, low, high, bias, whole, largest)
        if parts == 1 or (parts and is_byte):
            return cut_layer(weight, 1, 1, parts, input_axis, groups)
        if groups > 1 and output_axis == 0:  # a few channels of a depthwise layer may need a second piece
            part = _tap_parts(reaches(by_output.unsqueeze(-1), low, high, largest))
            parts = int(part.max()) + 1
            if parts <= _MOST_TAP_PARTS and float(bias.max()) < EXACT_FLOAT32:
                masks = part.reshape(weight.shape)
                return Cut(1, 1, parts, [weight * (masks == index) for index in range(parts)])
    input_digits, weight_digits = (1 if is_byte else 2), (1 if weight_bits <= 8 else 2)
    digits = by_output if weight_digits == 1 else by_output.clamp(-_DIGIT, _DIGIT)
    parts = channel_parts(digits, channels, -_DIGIT, _DIGIT, torch.zeros_like(bias), largest=largest)
    return cut_layer(weight, input_digits, weight_digits, parts, input_axis, groups)
