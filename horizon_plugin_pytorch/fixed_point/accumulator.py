"""Convolution and linear layers on integers, with a plan that keeps every sum exact.

A sum of integers is exact in float32 while no partial sum passes 2**24. The weights are known, so the worst case is
known: where it fits, one float32 convolution does it. Where it does not, input channels are split into parts, and
16-bit operands into byte digits, so that each convolution fits; the pieces are added in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32, choose_factor, rescale_, wide_factor

INT32_MAX = (1 << 31) - 1
_DIGIT = 128.0
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_RESIDUAL_BITS = 10


@dataclass(frozen=True)
class AccumulatorPlan:
    """Everything that a layer's integer arithmetic needs, for one input scale."""

    weights: list[Tensor]
    bias: Tensor | None
    factor: Tensor
    residual_factor: Tensor | None = None
    input_digits: int = 1
    parts: int = 1
    is_double: bool = False
    limit: float = 0.0
    worst_case: float = 0.0
    low: int = 0
    high: int = 0
    is_real: bool = False
    route: str = field(default="")


def split_digits(x: Tensor, count: int) -> list[Tensor]:
    """Signed base-256 digits of integers, lowest first: one for 8-bit values, two for 16-bit values.

    >>> [d.tolist() for d in split_digits(torch.tensor([-32768.0, 300.0]), 2)]
    [[0.0, 44.0], [-128.0, 1.0]]
    """
    if count == 1:
        return [x]
    high = x.add(128.0).mul_(1 / 256).floor_()
    return [torch.add(x, high, alpha=-256.0), high]


def plan_accumulator(
    weight: Tensor,
    bias: Tensor | None,
    accumulator_scale: Tensor,
    output_scale: Tensor | None,
    *,
    output_axis: int,
    groups: int,
    input_bits: int,
    weight_bits: int,
    low: int,
    high: int,
    residual_scale: Tensor | None = None,
    residual_bits: int = 8,
) -> AccumulatorPlan:
    """Choose digits, parts and factor for a layer.

    Args:
        weight: integer weights, float32.
        bias: real bias, one per output channel.
        accumulator_scale: input scale times weight scale, one per output channel, float64.
        output_scale: None for a high-precision output, which leaves as real numbers.
        output_axis: 0 for Conv2d and Linear, 1 for ConvTranspose2d.
        residual_scale: scale of a tensor that is added before rounding.
    """
    device = weight.device
    if output_axis == 1:  # [in, out / groups, ...] -> [out, in / groups, ...]
        by_output = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    else:
        by_output = weight
    magnitude = by_output.abs().double().flatten(2).sum(-1) if by_output.dim() > 2 else by_output.abs().double()
    total = magnitude.sum(1)
    accumulator_scale = accumulator_scale.double().reshape(-1).expand(total.numel())
    integer_bias = None
    if bias is not None:
        integer_bias = torch.round(bias.detach().double() / accumulator_scale).clamp(-INT32_MAX - 1, INT32_MAX)
    bias_size = torch.zeros_like(total) if integer_bias is None else integer_bias.abs()
    input_size = float(1 << (input_bits - 1))
    bound = total * input_size + bias_size

    input_digits, weight_digits = (2 if input_bits > 8 else 1), (2 if weight_bits > 8 else 1)
    is_single = input_digits == weight_digits == 1
    weights = split_digits(weight, weight_digits)
    piece = magnitude if weight_digits == 1 else magnitude.clamp(max=_DIGIT * by_output[0, 0].numel())
    parts = _choose_parts(piece * _DIGIT, bias_size if is_single else torch.zeros_like(bias_size))
    is_double = parts == 0
    parts = max(parts, 1)

    residual_factor = None
    residual_size = torch.zeros_like(total)
    is_wide = not is_single or is_double or parts > 2 or (residual_scale is not None and parts > 1)
    fraction = 0
    if residual_scale is not None:
        ratio = residual_scale.double().reshape(-1) / accumulator_scale
        residual_size = ratio * float(1 << (residual_bits - 1))
        headroom = float((EXACT_FLOAT32 - 1) / (bound + residual_size).max())
        fraction = max(0, min(16, int(torch.log2(torch.tensor(max(headroom, 1.0))))))
        fits = headroom >= 1 and float(ratio.min()) * 2.0**fraction >= 2.0**_RESIDUAL_BITS and residual_bits == 8
        if not fits or is_wide:
            is_wide, fraction = True, 16
        multiplier = torch.round(ratio * 2.0**fraction).clamp(max=2.0**40)
        residual_factor = multiplier * 2.0**-fraction
        residual_size = residual_factor * float(1 << (residual_bits - 1))

    reach = bound + residual_size
    if output_scale is None:
        factor = accumulator_scale if is_wide or float(reach.max()) >= EXACT_FLOAT32 else accumulator_scale.float()
        is_wide = factor.dtype == torch.float64
    else:
        ratio = accumulator_scale / output_scale.double().reshape(-1)
        unit = 2.0**-fraction
        if is_wide:
            factor = wide_factor(ratio)
        else:  # the unit is a power of two, so the proof for the scaled integers holds for the accumulator
            factor = choose_factor(ratio * unit, low, high, reach / unit, may_overflow=parts == 2) / unit
        is_wide = factor.dtype == torch.float64
    if residual_factor is not None:
        residual_factor = residual_factor if is_wide else residual_factor.float()
    worst = float(reach.max())
    return AccumulatorPlan(
        weights=[w.double() if is_double else w for w in weights],
        bias=None if integer_bias is None else (integer_bias if is_wide else integer_bias.float()).to(device),
        factor=factor,
        residual_factor=residual_factor,
        input_digits=1 if is_double else input_digits,
        parts=parts,
        is_double=is_double,
        limit=float(INT32_MAX) if worst > INT32_MAX else 0.0,
        worst_case=worst,
        low=low,
        high=high,
        is_real=output_scale is None,
        route="float64" if is_wide else "float32",
    )


def _choose_parts(piece: Tensor, bias: Tensor) -> int:
    """How many slices of the input channels keep each slice's sum below 2**24; 0 if none does."""
    for parts in _PARTS:
        if parts > piece.shape[1]:
            break
        slices = piece.tensor_split(parts, dim=1)
        largest = max(float((s.sum(1) + (bias if parts == 1 else 0)).max()) for s in slices)
        if largest < EXACT_FLOAT32:
            return parts
    return 0


def split_input(x: Tensor, parts: int, axis: int, groups: int) -> Sequence[Tensor]:
    """What each part of a split layer reads: its slice of the channels, or all of them if there are groups."""
    if parts == 1 or groups > 1:
        return [x] * parts
    return x.tensor_split(parts, dim=axis)


def split_weight(weight: Tensor, parts: int, axis: int, groups: int) -> Sequence[Tensor]:
    """The weights of each part: a slice of the input channels; with groups, all of them with the others zeroed."""
    if parts == 1:
        return [weight]
    if groups == 1:
        return weight.tensor_split(parts, dim=axis)
    per_group = weight.shape[axis] if axis == 1 else weight.shape[0] // groups
    part = torch.empty(per_group, dtype=torch.long, device=weight.device)
    for index, members in enumerate(torch.arange(per_group, device=weight.device).tensor_split(parts)):
        part[members] = index
    if axis == 0:
        part = part.repeat(groups)
    shape = [1] * weight.dim()
    shape[axis] = -1
    return [weight * (part == index).reshape(shape) for index in range(parts)]


def _accumulate(
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    input_digits: int,
    parts: int,
    is_double: bool,
    is_wide: bool,
    weight_axis: int,
    groups: int,
    input_axis: int,
    spread: Callable[[Tensor], Tensor],
) -> Tensor:
    """The exact integer sum of products, in float32 or float64."""
    # Other devices may pick transforms (Winograd, TF32) that are not exact on integers; float64 and a round are.
    if is_double or x.device.type != "cpu":
        kernel = weights[0].double() if len(weights) == 1 else weights[0].double() + 256.0 * weights[1].double()
        acc = product(x.double(), kernel, None).round_()
        if bias is not None:
            acc.add_(spread(bias.double()))
        return acc if is_wide else acc.float()
    if input_digits == 1 and len(weights) == 1 and parts == 1:
        acc = product(x, weights[0], None if bias is None else bias.float())
        return acc.double() if is_wide else acc
    acc = None
    kernels = [split_weight(w, parts, weight_axis, groups) for w in weights]
    for index, piece in enumerate(split_input(x, parts, input_axis, groups)):
        for i, digit in enumerate(split_digits(piece, input_digits)):
            for j, kernel in enumerate(kernels):
                term = product(digit, kernel[index], None)
                if acc is None:
                    acc = term.double() if is_wide else term
                    if i + j:
                        acc.mul_(256.0 ** (i + j))
                else:
                    acc.add_(term.double() if is_wide else term, alpha=256.0 ** (i + j))
    assert acc is not None
    if bias is not None:
        acc.add_(spread(bias))
    return acc


def _finish(
    acc: Tensor,
    residual: Tensor | None,
    residual_factor: Tensor | None,
    factor: Tensor,
    limit: float,
    low: int,
    high: int,
    is_real: bool,
) -> Tensor:
    if residual is not None and residual_factor is not None:
        is_same = torch.broadcast_shapes(residual.shape, acc.shape) == acc.shape
        acc = torch.addcmul(acc, residual.to(acc.dtype), residual_factor.to(acc.dtype), out=acc if is_same else None)
    if limit:
        acc.clamp_(-limit - 1, limit)
    if is_real:
        return acc.mul_(factor).float()
    return rescale_(acc, factor, low, high)


@operator(
    "conv2d(Tensor x, Tensor[] weights, Tensor? bias, Tensor? residual, Tensor? residual_factor, Tensor factor, "
    "int[] stride, int[] padding, int[] dilation, int groups, bool is_transposed, int[] output_padding, "
    "int input_digits, int parts, bool is_double, float limit, int low, int high, bool is_real) -> Tensor"
)
def conv2d(
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    residual_factor: Tensor | None,
    factor: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    is_transposed: bool,
    output_padding: list[int],
    input_digits: int,
    parts: int,
    is_double: bool,
    limit: float,
    low: int,
    high: int,
    is_real: bool,
) -> Tensor:
    """``acc = sum(x * w) + bias + residual * R``, requantized per output channel, or as real numbers."""

    def product(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if is_transposed:
            return F.conv_transpose2d(a, w, b, stride, padding, output_padding, groups, dilation)
        return F.conv2d(a, w, b, stride, padding, dilation, groups)

    is_wide = factor.dtype == torch.float64
    axis = 0 if is_transposed else 1
    acc = _accumulate(
        product, x, weights, bias, input_digits, parts, is_double, is_wide,
        axis, groups, 1, lambda v: v.reshape(-1, 1, 1),
    )  # fmt: skip
    spread = None if residual_factor is None else residual_factor.reshape(-1, 1, 1)
    return _finish(acc, residual, spread, factor.reshape(-1, 1, 1), limit, low, high, is_real)


@operator(
    "linear(Tensor x, Tensor[] weights, Tensor? bias, Tensor? residual, Tensor? residual_factor, Tensor factor, "
    "int input_digits, int parts, bool is_double, float limit, int low, int high, bool is_real) -> Tensor"
)
def linear(
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    residual_factor: Tensor | None,
    factor: Tensor,
    input_digits: int,
    parts: int,
    is_double: bool,
    limit: float,
    low: int,
    high: int,
    is_real: bool,
) -> Tensor:
    """As `conv2d`, over the last axis."""
    is_wide = factor.dtype == torch.float64
    acc = _accumulate(
        F.linear, x, weights, bias, input_digits, parts, is_double, is_wide,
        1, 1, -1, lambda v: v,
    )  # fmt: skip
    return _finish(acc, residual, residual_factor, factor, limit, low, high, is_real)


@operator("matmul(Tensor a, Tensor b, Tensor factor, bool is_double, int low, int high, bool is_real) -> Tensor")
def matmul(a: Tensor, b: Tensor, factor: Tensor, is_double: bool, low: int, high: int, is_real: bool) -> Tensor:
    """``acc = a @ b``, requantized or as real numbers; `is_double` where the sum can pass 2**24."""
    if is_double or a.device.type != "cpu":
        acc = torch.matmul(a.double(), b.double())
        acc = acc if is_double else acc.float()
    else:
        acc = torch.matmul(a, b)
    return _finish(acc, None, None, factor, 0.0, low, high, is_real)
