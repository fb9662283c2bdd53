"""Convolution and linear layers on integers, by a plan that keeps every sum exact (`accumulator_plan.py`).

Which route a plan takes never changes a layer's integers: the definition is

    acc = sum(x * w) + bias + ((residual * R + 2**(k-1)) >> k)      limited to int32, if the weights have 8 bits
    y   = clamp((acc * M + 2**(n-1)) >> n, low, high)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.accumulator_plan import INT32_MAX, AccumulatorPlan, Geometry, split_digits
from horizon_plugin_pytorch.fixed_point.library import operator, signature, unflatten
from horizon_plugin_pytorch.fixed_point.rescaling import rescale_

_CHUNK = 1 << 18
Product = Callable[[Tensor, Tensor, "Tensor | None", int], Tensor]


@dataclass(frozen=True)
class Layout:
    """Where channels are: the weight's and the input's input-channel axis, groups, and how channel values broadcast."""

    weight_axis: int
    input_axis: int
    groups: int
    spread: tuple[int, ...]

    @property
    def has_images(self) -> bool:
        """Are channels the second axis, with the axes of an image after them?"""
        return self.input_axis == 1


@dataclass(frozen=True)
class _Piece:
    """An exact float32 sum: what it counts for (1, 256 or 65536), and for which output channels (None: all)."""

    value: Tensor
    weight: float
    channels: Tensor | None = None


def _pieces(product: Product, x: Tensor, plan: AccumulatorPlan, layout: Layout) -> Iterator[_Piece]:
    weights, parts = plan.weights, plan.parts
    per_part = len(weights) // parts
    sizes = [w.shape[layout.weight_axis] for w in weights[::per_part]]
    slices = x.split(sizes, layout.input_axis) if layout.groups == 1 and parts > 1 else [x] * parts
    for index, piece in enumerate(slices):
        for j, kernel in enumerate(weights[index * per_part : (index + 1) * per_part]):
            channels = _few_channels(kernel, layout) if index else None
            if channels is not None:
                value = product(piece.index_select(1, channels), kernel.index_select(0, channels), None, len(channels))
                yield _Piece(value, 256.0**j, channels)
                continue
            for i, digit in enumerate(split_digits(piece, plan.input_digits)):
                yield _Piece(product(digit, kernel, None, layout.groups), 256.0 ** (i + j))


def _few_channels(kernel: Tensor, layout: Layout) -> Tensor | None:
    """Channels of a depthwise kernel that are not zero, if they are less than half."""
    is_depthwise = layout.groups > 1 and layout.weight_axis == 1 and kernel.shape[:2] == (layout.groups, 1)
    if not is_depthwise:
        return None
    channels = kernel.flatten(1).any(1).nonzero().flatten()
    return channels if 0 < len(channels) <= layout.groups // 2 else None


def _residual_term(residual: Tensor, factor: Tensor) -> Tensor:
    """``(residual * R + 2**(k-1)) >> k`` with ``factor = R / 2**k``."""
    return torch.mul(residual.to(factor.dtype), factor).add_(0.5).floor_()


def _added(acc: Tensor, term: Tensor) -> Tensor:
    is_inside = acc.shape == term.shape or torch.broadcast_shapes(acc.shape, term.shape) == acc.shape
    return acc.add_(term) if is_inside else acc + term


def _chunks(x: Tensor, residual: Tensor | None) -> Iterator[slice]:
    """Slices of the first axis small enough that float64 temporaries stay in cache and are not mapped anew."""
    rows = x.shape[0]
    is_whole = residual is not None and residual.dim() > x.dim()  # its first axis is not the batch
    step = max(rows, 1) if is_whole else max(_CHUNK // max(x.numel() // max(rows, 1), 1), 1)
    for start in range(0, max(rows, 1), step):
        yield slice(start, start + step)


def _run(product: Product, x: Tensor, residual: Tensor | None, plan: AccumulatorPlan, layout: Layout) -> Tensor:
    def spread(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.reshape(layout.spread)

    factor, residual_factor = plan.factor.reshape(layout.spread), spread(plan.residual_factor)
    if factor.dtype == torch.float32 and x.device.type == "cpu":
        if len(plan.weights) == 1:
            acc = product(x, plan.weights[0], plan.bias, layout.groups)
        else:
            acc = _sum_pieces(_pieces(product, x, plan, layout))
            if plan.bias is not None:
                acc.add_(plan.bias.reshape(layout.spread))
        if residual is not None and residual_factor is not None:
            acc = _added(acc, _residual_term(residual, residual_factor))
        return acc.mul_(factor).add_(0.0) if plan.is_real else rescale_(acc, factor, plan.low, plan.high)

    if x.dim() == 1:
        return _run(product, x.unsqueeze(0), None if residual is None else residual.unsqueeze(0), plan, layout)[0]
    finish = WideFinish(plan, factor.double(), spread(plan.bias), residual_factor)
    # Other devices may pick transforms (Winograd, TF32) that are not exact on integers; float64 and a round are.
    is_double = plan.is_double or x.device.type != "cpu"
    is_scaled = is_double and x.device.type == "cpu" and finish.is_plain and residual is None
    pieces = [] if is_double else list(_pieces(product, x, plan, layout))
    if pieces and finish.is_plain and residual is None and layout.has_images and _is_large(pieces):
        return finish.in_blocks(pieces)
    kernel = (plan.weights[1] if is_scaled else whole_weight(plan.weights, plan.parts, layout)) if is_double else None
    out = None if is_double else pieces[0].value
    for rows in _chunks(x if is_double else pieces[0].value, residual):
        if kernel is not None and is_scaled:
            scaled = product(x[rows].double(), kernel, finish.offset.flatten(), layout.groups)
            out = finish.store(out, rows, x.shape[0], finish.rounded(scaled))
            continue
        if kernel is not None:
            acc = product(x[rows].double(), kernel, None, layout.groups)
            if x.device.type != "cpu":
                acc.round_()
        else:
            acc = _sum_pieces(_Piece(p.value[rows].double(), p.weight, p.channels) for p in pieces)
        value = finish(acc, _rows_of(residual, rows, acc.dim(), x.shape[0]))
        if value.dim() > acc.dim():  # the residual has more axes; there is one chunk then
            return value.float()
        out = finish.store(out, rows, x.shape[0], value)
    assert out is not None
    return out


def _is_large(pieces: list[_Piece]) -> bool:
    """Does one image pass the chunk's size, with every piece there for all of its channels?"""
    shape = pieces[0].value.shape
    return shape.numel() > 0 and shape[1:].numel() > _CHUNK and all(p.channels is None for p in pieces)


def _rows_of(residual: Tensor | None, rows: slice, rank: int, count: int) -> Tensor | None:
    """The residual's part for a chunk; one that is broadcast along the first axis serves every chunk."""
    if residual is None or residual.dim() < rank or residual.shape[0] != count:
        return residual
    return residual[rows]


def _sum_pieces(pieces: Iterable[_Piece]) -> Tensor:
    """The sum of pieces, in the memory of the first."""
    total = None
    for piece in pieces:
        if total is None:
            total = piece.value if piece.weight == 1 else piece.value.mul_(piece.weight)
        elif piece.channels is not None:
            total.index_add_(1, piece.channels, piece.value, alpha=piece.weight)
        else:
            total.add_(piece.value, alpha=piece.weight)
    assert total is not None
    return total


def whole_weight(weights: list[Tensor], parts: int, layout: Layout) -> Tensor:
    """The layer's weights in float64, put together from parts and digits."""
    if weights[0].dtype == torch.float64:
        return weights[0]  # the second are scaled
    per_part = len(weights) // parts
    joined = []
    for start in range(0, len(weights), per_part):
        digits = [w.double() * 256.0**j for j, w in enumerate(weights[start : start + per_part])]
        joined.append(torch.stack(digits).sum(0))
    return torch.stack(joined).sum(0) if layout.groups > 1 else torch.cat(joined, layout.weight_axis)


class WideFinish:
    """Bias, residual, saturation and requantization of a float64 sum, chunk by chunk."""

    def __init__(
        self, plan: AccumulatorPlan, factor: Tensor, bias: Tensor | None, residual_factor: Tensor | None
    ) -> None:
        self.factor, self.residual_factor = factor, residual_factor
        self.bias = None if bias is None else bias.double()
        self.limit, self.low, self.high, self.is_real = plan.limit, plan.low, plan.high, plan.is_real
        # Beyond int32 a scaled product is rounded, so that its terms must be added before they are scaled.
        self.is_plain = plan.worst_case <= INT32_MAX and not self.is_real
        half = torch.full_like(factor, 0.5)
        # Exact: 32-bit bias times 20-bit multiplier, and a half, on one grid of at most 53 bits.
        self.offset = half if self.bias is None else self.bias * factor + half

    def __call__(self, acc: Tensor, residual: Tensor | None) -> Tensor:
        scaled = self.scaled(acc, residual)
        return scaled if self.is_real else self.rounded(scaled)

    def scaled(self, acc: Tensor, residual: Tensor | None) -> Tensor:
        """What is left to be cut off and limited; or the real numbers."""
        if self.is_plain and residual is None:  # bias and half in one pass: every step of it is exact
            return torch.addcmul(self.offset, acc, self.factor, out=acc)
        if self.bias is not None:
            acc.add_(self.bias)
        if residual is not None and self.residual_factor is not None:
            acc = _added(acc, _residual_term(residual, self.residual_factor.double()))
        if self.limit:
            acc.clamp_(-self.limit - 1, self.limit)
        return acc.mul_(self.factor).add_(0.0 if self.is_real else 0.5)  # zero has no sign

    def write(self, acc: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """The finished sums, into memory of their type; to make an integer of a positive number cuts it off already."""
        scaled = self.scaled(acc, residual)
        if self.is_real:
            out.copy_(scaled)
        elif self.low >= 0 and not out.is_floating_point():
            out.copy_(scaled.clamp_(self.low, self.high))
        else:
            out.copy_(self.rounded(scaled))

    def in_blocks(self, pieces: list[_Piece]) -> Tensor:
        """The rounded sum of large images, a block of output channels at a time, in the memory of the first piece.

        Channels are the second axis, as in the sums of convolutions.
        """
        out = pieces[0].value
        step = max(_CHUNK // out[0, 0].numel(), 1)
        for row in range(out.shape[0]):
            for start in range(0, out.shape[1], step):
                channels = slice(start, start + step)
                acc = out[row, channels].double()  # the first piece counts for 1
                for piece in pieces[1:]:
                    acc.add_(piece.value[row, channels], alpha=piece.weight)
                out[row, channels].copy_(self.rounded(acc.mul_(self.factor[channels]).add_(self.offset[channels])))
        return out

    def rounded(self, scaled: Tensor) -> Tensor:
        """The last step: what is left of a half is cut off."""
        return scaled.floor_().clamp_(self.low, self.high)

    @staticmethod
    def store(out: Tensor | None, rows: slice, count: int, value: Tensor) -> Tensor:
        """Write a chunk into the float32 result, which is made when its shape is known."""
        if out is None or out[rows].shape != value.shape:  # a residual may be larger than the sum
            if value.shape[0] >= count:
                return value.float()
            out = torch.empty((count, *value.shape[1:]), dtype=torch.float32, device=value.device)
        out[rows].copy_(value)
        return out


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], *walk: Any) -> Tensor:
    """A convolution over one to three axes, whose sums are exact if float32 holds them."""
    run = _CONVOLUTIONS[len(stride)]
    x, weight = _plain_strides(x), _plain_strides(weight)
    if torch._C._get_mkldnn_enabled():  # then torch does not take NNPACK, whose transforms are not exact
        return run(x, weight, bias, stride, *walk)
    with torch.backends.nnpack.flags(enabled=False):
        return run(x, weight, bias, stride, *walk)


def _plain_strides(x: Tensor) -> Tensor:
    """A tensor of one channel with the strides of plain memory.

    That of the channel may be any, and a channel that is cut out of others keeps theirs. Where it is that of channels
    last, torch 2.13 takes the whole tensor for such, and gives an output of one column, with a stride across, the
    numbers of other rows.
    """
    if x.shape[1] != 1:
        return x
    strides = tuple(math.prod(x.shape[axis + 1 :]) for axis in range(x.dim()))
    return x if x.stride() == strides else x.contiguous().as_strided(x.shape, strides)


@operator(f"conv(Tensor x, Tensor? residual, {signature(AccumulatorPlan)}, {signature(Geometry)}) -> Tensor")
def conv(x: Tensor, residual: Tensor | None, *constants: Any) -> Tensor:
    """The layer's sum, requantized per output channel, or as real numbers. Inputs are [N, C, one to three axes]."""
    plan, geometry = unflatten(constants, AccumulatorPlan, Geometry)
    stride, padding, dilation, output_padding = (
        geometry.stride, geometry.padding, geometry.dilation, geometry.output_padding,
    )  # fmt: skip

    def product(a: Tensor, w: Tensor, b: Tensor | None, groups: int) -> Tensor:
        if geometry.is_transposed:
            return _TRANSPOSED[len(stride)](a, w, b, stride, padding, output_padding, groups, dilation)
        return convolution(a, w, b, stride, padding, dilation, groups)

    layout = Layout(geometry.input_axis, 1, geometry.groups, geometry.spread)
    return _run(product, x, residual, plan, layout)


@operator(f"linear(Tensor x, Tensor? residual, {signature(AccumulatorPlan)}) -> Tensor")
def linear(x: Tensor, residual: Tensor | None, *constants: Any) -> Tensor:
    """As `conv`, over the last axis."""
    (plan,) = unflatten(constants, AccumulatorPlan)
    shape = (*x.shape[:-1], plan.factor.numel())
    if x.dim() > 2 and (residual is None or residual.shape == shape):  # every row is on its own: any of them is a chunk
        rows = x.reshape(math.prod(shape[:-1]), x.shape[-1])
        added = None if residual is None else residual.reshape(len(rows), shape[-1])
        return _linear(rows, added, plan).reshape(shape)
    return _linear(x, residual, plan)


def _linear(x: Tensor, residual: Tensor | None, plan: AccumulatorPlan) -> Tensor:
    return _run(lambda a, w, b, groups: F.linear(a, w, b), x, residual, plan, Layout(1, -1, 1, (-1,)))


@operator("matmul(Tensor a, Tensor b, Tensor factor, bool is_double, int low, int high, bool is_real) -> Tensor")
def matmul(a: Tensor, b: Tensor, factor: Tensor, is_double: bool, low: int, high: int, is_real: bool) -> Tensor:
    """``acc = a @ b``, requantized or as real numbers; `is_double` where the sum can pass 2**24."""

    def finish(acc: Tensor) -> Tensor:
        return finish_product(acc, factor, low, high, is_real)

    if a.device.type != "cpu":
        acc = torch.matmul(a.double(), b.double()).round_()
        return finish(acc if is_double else acc.float())
    if min(a.dim(), b.dim()) < 2 or a[..., 0].numel() * b.shape[-1] <= _CHUNK:
        return finish(torch.matmul(a.double(), b.double()) if is_double else torch.matmul(a, b))
    return _matmul_in_blocks(a, b, is_double, finish)


def finish_product(acc: Tensor, factor: Tensor, low: int, high: int, is_real: bool) -> Tensor:
    """The sums of a product of matrices, in whose memory this may write: requantized, or as real numbers."""
    if is_real:
        return acc.mul_(factor.reshape([1] * acc.dim())).add_(0.0).float()
    return rescale_(acc, factor, low, high)


def in_pairs(a: Tensor, b: Tensor) -> tuple[list[tuple[Tensor, Tensor]], torch.Size]:
    """The pairs of matrices that ``a @ b`` multiplies, and the shape of the result."""
    batch = a.shape[:-2]
    if b.shape[:-2] != batch:
        batch = torch.broadcast_shapes(batch, b.shape[:-2])
    shape = torch.Size([*batch, a.shape[-2], b.shape[-1]])
    if b.dim() == 2:  # one matrix for the whole batch
        return [(a.reshape(-1, a.shape[-1]), b)], shape
    matrices = [x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b)]
    return list(zip(*matrices, strict=True)), shape


def _matmul_in_blocks(a: Tensor, b: Tensor, is_double: bool, finish: Callable[[Tensor], Tensor]) -> Tensor:
    """A product of matrices whose sums are finished while they are in cache."""
    pairs, shape = in_pairs(a, b)
    out = torch.empty((len(pairs), len(pairs[0][0]), b.shape[-1]), dtype=torch.float32)
    step = max(_CHUNK // (b.shape[-1] * (2 if is_double else 1)), 1)
    for (left, right), rows in zip(pairs, out, strict=True):
        right = right.double() if is_double else right
        for part, block in zip(left.split(step), rows.split(step), strict=True):
            block.copy_(finish(torch.mm(part.double() if is_double else part, right)))
    return out.reshape(shape)
