"""Convolution and linear layers on integers, with a plan that keeps every sum exact.

A sum of integers is exact in float32 while no partial sum passes 2**24. Weights and the input's range are known, so the
worst case is known: where it fits, one float32 convolution does it. Where it does not, input channels are split into
parts, and 16-bit operands into byte digits, so that each convolution fits; the pieces are added in float64.

Which of these routes a layer takes never changes its integers: the definition is

    acc = sum(x * w) + bias + ((residual * R + 2**(k-1)) >> k)
    y   = clamp((acc * M + 2**(n-1)) >> n, low, high)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32, choose_factor, rescale_

INT32_MAX = (1 << 31) - 1
_DIGIT = 128.0
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# A residual is brought to the accumulator's grid by a multiplier of 16 bits (24 for int16 residuals), so that an
# 8-bit residual times it is exact in float32; below this size adding one half is exact too.
_RESIDUAL_LIMIT = 1 << 22
_CHUNK = 1 << 18


@dataclass(frozen=True)
class AccumulatorPlan:
    """Everything that a layer's integer arithmetic needs, for one input scale and range.

    Args:
        weights: integer weights, as one tensor or as byte digits (lowest first).
        factor: requantization factor, or the accumulator's scale for real outputs; its dtype is the sum's dtype.
        input_digits, parts: how inputs are cut; `parts` 0 means that no cut of the channels is enough.
        is_double: on the CPU, one float64 convolution is faster than the cut ones.
        limit: where the sum saturates, 0 if it cannot get there.
        worst_case: largest magnitude that the sum can reach.
    """

    weights: list[Tensor]
    bias: Tensor | None
    factor: Tensor
    residual_factor: Tensor | None
    input_digits: int
    parts: int
    is_double: bool
    limit: float
    worst_case: float
    low: int
    high: int
    is_real: bool


def split_digits(x: Tensor, count: int) -> list[Tensor]:
    """Signed base-256 digits of integers, lowest first: one for 8-bit values, two for 16-bit values.

    >>> [d.tolist() for d in split_digits(torch.tensor([-32768.0, 300.0]), 2)]
    [[0.0, 44.0], [-128.0, 1.0]]
    """
    if count == 1:
        return [x]
    high = x.mul(1 / 256).round_()
    return [torch.add(x, high, alpha=-256.0), high]


def _reaches(weight: Tensor, low: float, high: float) -> Tensor:
    """For each output and input channel, the largest positive and negative sums over the kernel: [2, out, in]."""
    positive, negative = weight.clamp(min=0).flatten(2).sum(-1), weight.clamp(max=0).neg().flatten(2).sum(-1)
    return torch.stack([positive * high + negative * -low, negative * high + positive * -low])


def _choose_parts(reaches: Tensor, bias: Tensor) -> int:
    """How many slices of the input channels keep every slice's partial sums below 2**24; 0 if none does."""
    for parts in _PARTS:
        if parts > reaches.shape[2]:
            break
        extra = bias if parts == 1 else torch.zeros_like(bias)
        if all(float((piece.sum(2).amax(0) + extra).max()) < EXACT_FLOAT32 for piece in reaches.tensor_split(parts, 2)):
            return parts
    return 0


def choose_residual_factor(ratio: Tensor, bits: int) -> Tensor:
    """``R / 2**k`` for the ratio of a residual's scale to the accumulator's."""
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
    """
    by_output = weight.double()
    if output_axis == 1:  # [in, out / groups, ...] -> [out, in / groups, ...]
        by_output = by_output.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    if by_output.dim() == 2:
        by_output = by_output.unsqueeze(-1)
    outputs = by_output.shape[0]
    accumulator_scale = accumulator_scale.double().reshape(-1).expand(outputs)
    integer_bias, bias_size = None, torch.zeros(outputs, dtype=torch.float64, device=weight.device)
    if bias is not None:
        integer_bias = torch.round(bias.detach().double() / accumulator_scale).clamp(-INT32_MAX - 1, INT32_MAX)
        bias_size = integer_bias.abs()

    reaches = _reaches(by_output, min(input_range[0], 0), max(input_range[1], 0))
    reach = reaches.sum(2).amax(0) + bias_size
    is_byte = max(-input_range[0], input_range[1]) <= _DIGIT
    weight_digits = 2 if weight_bits > 8 else 1
    input_digits, parts = 1, _choose_parts(reaches, bias_size) if weight_digits == 1 else 0
    if parts != 1 and (weight_digits > 1 or not is_byte):
        input_digits = 1 if is_byte else 2
        digits = by_output.clamp(-_DIGIT, _DIGIT) if weight_digits > 1 else by_output
        parts = _choose_parts(_reaches(digits, -_DIGIT, _DIGIT), torch.zeros_like(bias_size))
    pieces = input_digits * weight_digits * parts
    is_pointwise = groups == 1 and by_output.shape[2] == 1
    is_double = pieces == 0 or (is_pointwise and pieces > 1 and (input_digits > 1 or weight_digits > 1))

    residual_factor, residual_reach = None, torch.zeros_like(reach)
    if residual_scale is not None:
        residual_factor = choose_residual_factor(residual_scale.double().reshape(-1) / accumulator_scale, residual_bits)
        residual_reach = residual_factor * float(1 << (residual_bits - 1)) + 1
        reach = reach + residual_reach

    # A float32 sum of two exact pieces may pass 2**24: rounding is monotone, so that only matters to real outputs.
    terms = pieces + (residual_factor is not None)
    is_wide = (
        input_digits * weight_digits > 1
        or is_double
        or terms > 2
        or bool((residual_reach >= _RESIDUAL_LIMIT).any())
        or (residual_scale is not None and residual_bits > 8)
        or (output_scale is None and bool((reach >= EXACT_FLOAT32).any()))
    )
    if output_scale is None:
        factor = accumulator_scale if is_wide else accumulator_scale.float()
    else:
        factor = choose_factor(accumulator_scale / output_scale.double().reshape(-1), low, high)
        last_step = (max(abs(low), abs(high)) + 1) / factor.double()
        if is_wide or bool(((reach >= EXACT_FLOAT32) & (last_step >= EXACT_FLOAT32)).any()):
            factor = factor.double()
    is_wide = factor.dtype == torch.float64
    worst = float(reach.max())
    return AccumulatorPlan(
        weights=[weight.double()] if is_double else split_digits(weight, weight_digits),
        bias=None if integer_bias is None else integer_bias.to(factor.dtype),
        factor=factor,
        residual_factor=None if residual_factor is None else residual_factor.to(factor.dtype),
        input_digits=input_digits,
        parts=parts,
        is_double=is_double,
        limit=float(INT32_MAX) if worst > INT32_MAX else 0.0,
        worst_case=worst,
        low=low,
        high=high,
        is_real=output_scale is None,
    )


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


Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True)
class _Layout:
    """Where channels are: axes of weight and input, and the shape that makes per-channel values broadcast."""

    weight_axis: int
    input_axis: int
    groups: int
    spread: tuple[int, ...]


def _pieces(product: Product, x: Tensor, weights: Sequence[Tensor], digits: int, parts: int, layout: _Layout) -> Iterator[tuple[Tensor, float]]:
    """Exact float32 sums and what each counts for: byte digits count 1, 256 or 65536."""
    kernels = [split_weight(w, parts, layout.weight_axis, layout.groups) for w in weights]
    for index, piece in enumerate(split_input(x, parts, layout.input_axis, layout.groups)):
        for i, digit in enumerate(split_digits(piece, digits)):
            for j, kernel in enumerate(kernels):
                yield product(digit, kernel[index], None), 256.0 ** (i + j)


def _residual_term(residual: Tensor, factor: Tensor) -> Tensor:
    """``(residual * R + 2**(k-1)) >> k`` with ``factor = R / 2**k``."""
    return torch.mul(residual.to(factor.dtype), factor).add_(0.5).floor_()


def _added(acc: Tensor, term: Tensor) -> Tensor:
    is_inside = torch.broadcast_shapes(acc.shape, term.shape) == acc.shape
    return acc.add_(term) if is_inside else acc + term


def _chunks(x: Tensor) -> Iterator[slice]:
    """Slices of the first axis small enough that float64 temporaries stay in cache and are not mapped anew."""
    rows = x.shape[0] if x.dim() else 1
    per_row = max(x.numel() // max(rows, 1), 1)
    step = max(_CHUNK // per_row, 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _run(
    product: Product,
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    residual_factor: Tensor | None,
    factor: Tensor,
    digits: int,
    parts: int,
    is_double: bool,
    limit: float,
    low: int,
    high: int,
    is_real: bool,
    layout: _Layout,
) -> Tensor:
    def spread(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.reshape(layout.spread)

    factor, residual_factor = factor.reshape(layout.spread), spread(residual_factor)
    if factor.dtype == torch.float32 and x.device.type == "cpu":
        if digits * len(weights) * parts == 1:
            acc = product(x, weights[0], bias)
        else:
            acc = None
            for piece, _ in _pieces(product, x, weights, digits, parts, layout):
                acc = piece if acc is None else acc.add_(piece)
            assert acc is not None
            if bias is not None:
                acc.add_(bias.reshape(layout.spread))
        if residual is not None and residual_factor is not None:
            acc = _added(acc, _residual_term(residual, residual_factor))
        return acc.mul_(factor) if is_real else rescale_(acc, factor, low, high)

    if x.dim() == 1:
        residual = None if residual is None else residual.unsqueeze(0)
        return _run(
            product, x.unsqueeze(0), weights, bias, residual, residual_factor, factor, digits, parts, is_double, limit,
            low, high, is_real, layout,
        )[0]  # fmt: skip
    finish = _WideFinish(factor.double(), spread(bias), residual_factor, limit, low, high, is_real)
    # Other devices may pick transforms (Winograd, TF32) that are not exact on integers; float64 and a round are.
    if is_double or x.device.type != "cpu":
        kernel = weights[0].double() if len(weights) == 1 else weights[0].double() + 256.0 * weights[1].double()
        out = None
        for rows in _chunks(x):
            acc = product(x[rows].double(), kernel, None)
            if x.device.type != "cpu":
                acc.round_()
            out = finish.store(out, rows, x.shape[0], finish(acc, None if residual is None else residual[rows]))
        assert out is not None
        return out
    terms = list(_pieces(product, x, weights, digits, parts, layout))
    out = None
    for rows in _chunks(terms[0][0]):
        acc = finish.combine([(term[rows], weight) for term, weight in terms])
        out = finish.store(out, rows, x.shape[0], finish(acc, None if residual is None else residual[rows]))
    assert out is not None
    return out


class _WideFinish:
    """Bias, residual, saturation and requantization of a float64 sum, chunk by chunk."""

    def __init__(
        self,
        factor: Tensor,
        bias: Tensor | None,
        residual_factor: Tensor | None,
        limit: float,
        low: int,
        high: int,
        is_real: bool,
    ) -> None:
        self.factor, self.residual_factor = factor, residual_factor
        self.bias = None if bias is None else bias.double()
        self.limit, self.low, self.high, self.is_real = limit, low, high, is_real
        half = torch.full_like(factor, 0.5)
        # Exact: 32-bit bias times 20-bit multiplier, and a half, on one grid of at most 53 bits.
        self.offset = half if self.bias is None else self.bias * factor + half

    @staticmethod
    def combine(terms: list[tuple[Tensor, float]]) -> Tensor:
        """The sum of the pieces."""
        total = None
        for term, weight in sorted(terms, key=lambda pair: -pair[1]):
            if total is None:
                total = term.double()
                if weight != 1:
                    total.mul_(weight)
            else:
                total.add_(term, alpha=weight)
        assert total is not None
        return total

    def __call__(self, acc: Tensor, residual: Tensor | None) -> Tensor:
        is_plain = residual is None and not self.limit and not self.is_real
        if is_plain:  # one pass for multiplier, bias and half: every step of it is exact
            torch.addcmul(self.offset, acc, self.factor, out=acc)
            return acc.floor_().clamp_(self.low, self.high)
        if self.bias is not None:
            acc.add_(self.bias)
        if residual is not None and self.residual_factor is not None:
            acc = _added(acc, _residual_term(residual, self.residual_factor.double()))
        if self.limit:
            acc.clamp_(-self.limit - 1, self.limit)
        if self.is_real:
            return acc.mul_(self.factor)
        return acc.mul_(self.factor).add_(0.5).floor_().clamp_(self.low, self.high)

    @staticmethod
    def store(out: Tensor | None, rows: slice, count: int, value: Tensor) -> Tensor:
        """Write a chunk into the float32 result, which is made when its shape is known."""
        if out is None:
            if value.shape[0] >= count:
                return value.float()
            out = torch.empty((count, *value.shape[1:]), dtype=torch.float32, device=value.device)
        out[rows].copy_(value)
        return out


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
    """The layer's sum, requantized per output channel, or as real numbers. Inputs are [N, C, H, W]."""

    def product(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if is_transposed:
            return F.conv_transpose2d(a, w, b, stride, padding, output_padding, groups, dilation)
        return F.conv2d(a, w, b, stride, padding, dilation, groups)

    layout = _Layout(0 if is_transposed else 1, 1, groups, (-1, 1, 1))
    return _run(
        product, x, weights, bias, residual, residual_factor, factor, input_digits, parts, is_double, limit, low, high,
        is_real, layout,
    )  # fmt: skip


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
    return _run(
        F.linear, x, weights, bias, residual, residual_factor, factor, input_digits, parts, is_double, limit, low, high,
        is_real, _Layout(1, -1, 1, (-1,)),
    )  # fmt: skip


@operator("matmul(Tensor a, Tensor b, Tensor factor, bool is_double, int low, int high, bool is_real) -> Tensor")
def matmul(a: Tensor, b: Tensor, factor: Tensor, is_double: bool, low: int, high: int, is_real: bool) -> Tensor:
    """``acc = a @ b``, requantized or as real numbers; `is_double` where the sum can pass 2**24."""
    if is_double or a.device.type != "cpu":
        acc = torch.matmul(a.double(), b.double()).round_()
        acc = acc if is_double else acc.float()
    else:
        acc = torch.matmul(a, b)
    return acc.mul_(factor).float() if is_real else rescale_(acc, factor, low, high)
