"""Convolutions and linear layers as standard ONNX operators.

A layer takes the cheapest form that gives its integers whatever the runtime makes of it:

* int8 to int8: ``QLinearConv`` with scales of 1 and a weight scale that is the factor;
* 16-bit inputs and many channels: ``MatMulInteger`` of their bytes (`onnx_digits`);
* float32 sums of integers, cut as `fixed_point.accumulator_plan` cuts them, and added in int32;
* a float64 product of matrices, where digits would be needed: ONNX Runtime has no convolution in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.onnx_byte_layers import conv_and_residual, conv_of_bytes, is_of_bytes
from horizon_plugin_pytorch.export.onnx_digits import (
    Sum,
    conv_of_digits,
    float_digit_ends,
    float_digits,
    has_cheap_bytes,
    linear_of_digits,
)
from horizon_plugin_pytorch.export.onnx_fixed_point import is_byte, lowers, rescale
from horizon_plugin_pytorch.export.onnx_forms import (
    Block,
    Integers,
    block_size,
    blocks_of,
    joined,
    note_integers,
)
from horizon_plugin_pytorch.export.onnx_graph import TYPES, OnnxGraph, Site
from horizon_plugin_pytorch.fixed_point.accumulator_plan import (
    INT32_MAX,
    AccumulatorPlan,
    Cut,
    Geometry,
    cut_layer,
    reaches,
)
from horizon_plugin_pytorch.fixed_point.library import unflatten
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32, is_exact_in_float32
from horizon_plugin_pytorch.program.note import Value

_FEWEST_CHANNELS = 128  # of inputs and outputs, from which products of bytes are faster than those of floats
# The same of products of matrices with more inputs than outputs, and of the latter where bytes cost little.
_FEWEST_INPUTS, _FEWEST_OUTPUTS, _FEWEST_OF_CHEAP = 96, 64, 24
_BLOCK = 16  # channels


@dataclass(frozen=True)
class _Layer:
    """What the pieces of a layer are made with: its product with a weight, and where its channels are.

    Args:
        product: of a value and a weight, which is given by the name that `stored` gives it; and a bias.
        stored: puts a weight into the file, in its own type.
        ends, residual_ends: the smallest and largest integer of the input, and of a residual of the sum's shape.
        is_matrix: the product is one of matrices, which exists in float64 too.
        is_lifted: a residual gives the sum more axes, so that channels are no longer the second.
    """

    product: Callable[[str, str, Tensor | None], str]
    stored: Callable[[Tensor], str]
    weight_axis: int
    input_axis: int
    groups: int
    spread: tuple[int, ...]
    ends: tuple[int, int]
    residual_ends: tuple[int, int] | None = None
    is_matrix: bool = False
    is_lifted: bool = False


@lowers("conv", data="x residual")
def conv(g: OnnxGraph, site: Site, x: str, residual: str | None, *constants: Any) -> str:
    plan, geometry = unflatten(constants, AccumulatorPlan, Geometry)
    if g.has_bytes and is_of_bytes(site, plan, geometry):
        is_proved = is_exact_in_float32(plan.factor, plan.low, plan.high, plan.worst_case)
        if residual is None and (is_proved or g.is_fast):
            if not is_proved:
                g.tell_inexact("one float32 product rounds other than the definition")
            return conv_of_bytes(g, site, x, plan, geometry)
        if residual is not None and g.is_fast and is_byte(site.inputs[1]):
            g.tell_inexact("its sum has 8 bits before the residual is added")
            return conv_and_residual(g, site, x, residual, plan, geometry)

    is_lifted = residual is not None and len(site.inputs[1].shape) > site.rank
    layer = _Layer(
        _convolution(g, geometry), g.compact, geometry.input_axis, 1, geometry.groups, geometry.spread,
        _ends(site.inputs[0]), _residual_ends(site, residual), is_lifted=is_lifted,
    )  # fmt: skip
    if geometry.groups == 1 and not geometry.is_transposed and _takes_digits(g, x, plan):
        total = conv_of_digits(g, x, _whole_weight(plan), geometry, layer.ends)
        return _finish(g, total, residual, plan, layer)
    if _is_pointwise(site, residual, plan, geometry):
        return _pointwise(g, site, x, residual, plan, geometry)
    blocks = blocks_of(g, x, site.input_shape[1])
    if residual is None and _is_depthwise(plan, geometry):
        return _depthwise(g, blocks, plan, geometry, layer.ends)
    return _finish(g, _accumulate(g, x, plan, layer), residual, plan, layer)


@lowers("linear", data="x residual")
def linear(g: OnnxGraph, site: Site, x: str, residual: str | None, *constants: Any) -> str:
    (plan,) = unflatten(constants, AccumulatorPlan)

    def product(a: str, w: str, b: Tensor | None) -> str:
        out = g.node("MatMul", a, w)
        return out if b is None else g.node("Add", out, g.constant(b, hint="bias"))

    def stored(w: Tensor) -> str:
        return g.compact(w.T.contiguous())

    ends = _ends(site.inputs[0]), _residual_ends(site, residual)
    layer = _Layer(product, stored, 1, site.rank - 1, 1, (-1,), *ends, True)
    if site.rank > 1 and _takes_digits(g, x, plan):
        total = linear_of_digits(g, x, _whole_weight(plan), layer.ends)
        return _finish(g, total, residual, plan, layer)
    if residual is None and _is_scaled_matrix(plan):
        if len(plan.weights[0]) <= site.input_shape[-1]:
            return _matrix_in_float64(g, x, plan, layer)
        return _scaled_rows(g, _with_one(g, x, site.rank, site.rank - 1), 0, plan, layer)
    return _finish(g, _accumulate(g, x, plan, layer), residual, plan, layer)


def _takes_digits(g: OnnxGraph, x: str, plan: AccumulatorPlan) -> bool:
    """Is it a layer of 16-bit inputs and 8-bit weights, large enough to be computed in bytes?"""
    if not g.has_bytes or plan.input_digits == 1 or plan.factor.dtype != torch.float64 or plan.parts == 0:
        return False
    is_narrow = all(w.numel() and float(w.min()) >= -128 and float(w.max()) <= 127 for w in plan.weights[:1])
    is_whole = plan.weights[0].dtype == torch.float64 or len(plan.weights) == plan.parts
    if not is_narrow or not is_whole:
        return False
    outputs, inputs, *kernel = _whole_weight(plan).shape
    if min(outputs, inputs) >= _FEWEST_CHANNELS:
        return True
    fewest = _FEWEST_OF_CHEAP if has_cheap_bytes(g, x) else _FEWEST_OUTPUTS
    return math.prod(kernel) == 1 and inputs >= max(_FEWEST_INPUTS, 2 * outputs) and outputs >= fewest


def _whole_weight(plan: AccumulatorPlan) -> Tensor:
    """The weights of a layer without groups as they are."""
    return plan.weights[0] if plan.weights[0].dtype == torch.float64 else torch.cat(plan.weights, 1)


def _is_pointwise(site: Site, residual: str | None, plan: AccumulatorPlan, geometry: Geometry) -> bool:
    """Is it a product of matrices, one for each image?"""
    is_one = all(size == 1 for size in plan.weights[0].shape[2:]) and not any(geometry.padding)
    is_shaped = residual is None or list(site.inputs[1].shape) == site.output_shape
    return is_one and is_shaped and geometry.groups == 1 and not geometry.is_transposed


def _pointwise(
    g: OnnxGraph, site: Site, x: str, residual: str | None, plan: AccumulatorPlan, geometry: Geometry
) -> str:
    """A convolution of 1x1 kernels as a product of matrices, for which ONNX Runtime needs no other layout."""
    batch, outputs, *places = site.output_shape
    channels = site.input_shape[1]
    if any(step > 1 for step in geometry.stride):
        axes = list(range(2, site.rank))
        bounds = ([0] * len(axes), site.input_shape[2:], axes, list(geometry.stride))
        x = g.node("Slice", x, *(g.constant(v, torch.int64, "slice") for v in bounds))
    count = math.prod(places) and -1  # as for any size of the image

    def product(a: str, w: str, b: Tensor | None) -> str:
        out = g.node("MatMul", w, a)
        return out if b is None else g.node("Add", out, g.constant(b.reshape(-1, 1), hint="bias"))

    ends = _ends(site.inputs[0]), _residual_ends(site, residual)
    layer = _Layer(product, lambda w: g.compact(w.flatten(1)), 1, 1, 1, (-1, 1), *ends, True)
    x = g.reshape(x, [batch, channels, count])
    if residual is None and _is_scaled_matrix(plan):
        if outputs <= channels:
            return g.reshape(_matrix_in_float64(g, x, plan, layer), site.output_shape)
        return _rows_in_blocks(g, _with_one(g, x, 3, 1), site.output_shape, plan, layer)
    if residual is not None:
        residual = g.reshape(residual, [batch, outputs, count])
    return g.reshape(_finish(g, _accumulate(g, x, plan, layer), residual, plan, layer), site.output_shape)


def _ends(value: Value) -> tuple[int, int]:
    """The smallest and largest integer of a value, and 0, which a layer is padded with."""
    known = value.quantization
    low, high = (-(1 << 15), (1 << 15) - 1) if known is None else known.range or (known.dtype.min, known.dtype.max)
    return min(low, 0), max(high, 0)


def _residual_ends(site: Site, residual: str | None) -> tuple[int, int] | None:
    """The smallest and largest integer that is added, if there is one for each of the sum's."""
    is_whole = residual is not None and list(site.inputs[1].shape) == site.output_shape
    return _ends(site.inputs[1]) if is_whole else None


def _is_scaled_matrix(plan: AccumulatorPlan) -> bool:
    """Is every partial sum exact in float64, with the factor in the weights? As `fixed_point.accumulator` has it."""
    return plan.weights[0].dtype == torch.float64 and plan.worst_case <= INT32_MAX and not plan.is_real


def _matrix_in_float64(g: OnnxGraph, x: str, plan: AccumulatorPlan, layer: _Layer) -> str:
    """A product of matrices whose weights hold the factor; they are multiplied when the file is loaded."""
    shift = _shift(plan)
    offset = g.constant(_offset(plan, shift).reshape(layer.spread), hint="offset")
    scaled = layer.product(g.cast(x, torch.float64), _scaled_weight(g, plan, layer), None)
    return _cut_off(g, g.node("Add", scaled, offset), plan, shift)


def _scaled_weight(g: OnnxGraph, plan: AccumulatorPlan, layer: _Layer) -> str:
    factor = g.constant(plan.factor.reshape(layer.spread), hint="factor")
    return g.node("Mul", layer.stored(plan.weights[0]), factor)


def _with_one(g: OnnxGraph, x: str, rank: int, axis: int) -> str:
    """The input in float64 with one more channel, which is 1: bias and half are its weight."""
    pads = [0] * 2 * rank
    pads[rank + axis] = 1
    return g.cast(g.node("Pad", x, g.constant(pads, torch.int64, "pads"), g.scalar(1.0, torch.float32)), torch.float64)


def _scaled_rows(g: OnnxGraph, wide: str, channels: int, plan: AccumulatorPlan, layer: _Layer) -> str:
    """As `_matrix_in_float64`, of an input with a channel of 1.

    Args:
        channels: the weight's axis of input channels, as it is stored.
    """
    shift = _shift(plan)
    offset = g.constant(_offset(plan, shift).reshape(layer.spread), hint="offset")
    row = offset if layer.spread != (-1,) else g.reshape(offset, [1, -1])
    weight = g.node("Concat", _scaled_weight(g, plan, layer), row, axis=channels)
    return _cut_off(g, layer.product(wide, weight, None), plan, shift)


def _rows_in_blocks(g: OnnxGraph, wide: str, shape: list[int], plan: AccumulatorPlan, layer: _Layer) -> str:
    """The output of a pointwise layer, of this shape, in blocks of channels."""
    batch, outputs, *places = shape
    size = block_size(g, outputs, math.prod(places))
    found = []
    for start in range(0, outputs, size):
        count = min(size, outputs - start)
        part = _scaled_rows(g, wide, 1, _rows(plan, start, start + size), layer)
        found.append(Block(g.reshape(part, [batch, count, *places]), count))
    return joined(g, found)


def _rows(plan: AccumulatorPlan, start: int, end: int) -> AccumulatorPlan:
    """The part of a layer that gives these output channels."""
    outputs = len(plan.weights[0])

    def some(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.reshape(-1).expand(outputs)[start:end]

    factor = some(plan.factor)
    assert factor is not None
    return replace(plan, weights=[w[start:end] for w in plan.weights], bias=some(plan.bias), factor=factor)


def _is_depthwise(plan: AccumulatorPlan, geometry: Geometry) -> bool:
    """Is it a layer with a kernel for each channel, of 16-bit inputs and 8-bit weights, whose sums are whole?"""
    is_alone = geometry.groups == len(plan.weights[0]) and plan.weights[0].shape[1] == 1 and not geometry.is_transposed
    is_alone = is_alone and (geometry.groups > 1 or plan.parts == 1)  # not one output that is cut into an input each
    is_plain = plan.factor.dtype == torch.float64 and not plan.is_real and plan.worst_case <= INT32_MAX
    return is_alone and is_plain and plan.input_digits == 1 and len(plan.weights) == plan.parts


def _depthwise(
    g: OnnxGraph, blocks: list[Block], plan: AccumulatorPlan, geometry: Geometry, ends: tuple[int, int]
) -> str:
    """A layer with a kernel for each channel, in the blocks of its input."""
    found, start = [], 0
    for block in blocks:
        own = replace(geometry, groups=block.size)
        layer = _Layer(_convolution(g, own), g.compact, 1, 1, block.size, geometry.spread, ends)
        rows = _rows(plan, start, start + block.size)
        total = _sum_of_halves(g, block.name, rows, layer) or _accumulate(g, block.name, rows, layer)
        found.append(Block(_finish(g, total, None, rows, layer), block.size))
        start += block.size
    return joined(g, found)


def _sum_of_halves(g: OnnxGraph, x: str, plan: AccumulatorPlan, layer: _Layer) -> Sum | None:
    """The sum of two convolutions in float32, moved so that it lies around zero; None if that does not hold it.

    ONNX Runtime makes one of an `Add` and the convolution that is its first input: that adds the other's result to its
    own, in any order. The other one holds the shift, so that what is added up stays within the ends of the whole sum.
    """
    cut = _cut(plan, layer)
    if len(cut.weights) != 2 or cut.input_digits > 1 or cut.weight_digits > 1:
        return None
    one, other = (reaches(w.flatten(1), *layer.ends) for w in cut.weights)  # above zero, and below
    above, below = one + other
    lift = ((below - above) / 2).round()
    moved = torch.stack([other[0] + lift, other[1] - lift])
    held = torch.stack([other[0] + lift.clamp(min=0), other[1] - lift.clamp(max=0)])
    if float(torch.stack([held, one, one + moved.clamp(min=0)]).max()) >= EXACT_FLOAT32:
        return None
    first, second = (layer.stored(w.float()) for w in cut.weights)
    lifted = layer.product(x, second, lift.float())
    return Sum(g.node("Add", layer.product(x, first, None), lifted), torch.float32, lift=lift)


def _convolution(g: OnnxGraph, geometry: Geometry) -> Callable[[str, str, Tensor | None], str]:
    return lambda a, w, b: g.conv(a, w, None if b is None else g.constant(b, hint="bias"), geometry)


def _accumulate(g: OnnxGraph, x: str, plan: AccumulatorPlan, layer: _Layer) -> Sum:
    """As `fixed_point.accumulator`: the exact sum of the layer's pieces; with the bias only if it is in float32.

    A `Round` keeps ONNX Runtime from folding what follows a float32 sum into the weights; a `Cast` does so as well.
    Pieces are added in int32 where it holds them all: that moves half the bytes of float64.
    """
    dtype = plan.factor.dtype
    is_wide = dtype == torch.float64
    if is_wide and layer.is_matrix and plan.weights[0].dtype == torch.float64:
        product = layer.product(g.cast(g.apart_from_transpose(x), dtype), layer.stored(plan.weights[0]), None)
        return Sum(product, dtype)
    cut = _cut(plan, layer)
    reach = _reach(cut, layer)
    if is_wide and len(cut.weights) * cut.input_digits > 1 and reach <= INT32_MAX:
        dtype = torch.int32

    def term(a: str, w: Tensor, bias: Tensor | None = None, size: float = 1.0) -> str:
        kernel = layer.stored(w.float())
        if size > 1:  # a power of two changes nothing about the sum; it is multiplied when the file is loaded
            kernel = g.node("Mul", kernel, g.scalar(size, torch.float32))
        out = layer.product(a, kernel, bias)
        return g.cast(out, dtype) if is_wide else g.node("Round", out)

    if len(cut.weights) == 1 and cut.input_digits == 1:
        return Sum(term(x, cut.weights[0], None if is_wide else plan.bias), dtype)
    sizes = [w.shape[layer.weight_axis] for w in cut.weights[:: cut.weight_digits]]
    total = None
    for digit in [x] if cut.input_digits == 1 else float_digits(g, x, layer.ends):
        pieces = [digit] * cut.parts
        if layer.groups == 1 and cut.parts > 1:
            split = g.constant(sizes, torch.int64, "split")
            pieces = g.node("Split", digit, split, outputs=cut.parts, axis=layer.input_axis)
        for index, kernel in enumerate(cut.weights):
            part = term(pieces[index // cut.weight_digits], kernel, size=256.0 ** (index % cut.weight_digits))
            total = part if total is None else g.node("Add", total, part)
    assert total is not None
    if plan.bias is None or is_wide:
        return Sum(total, dtype, reach)
    return Sum(g.node("Add", total, g.constant(plan.bias.reshape(layer.spread), dtype, "bias")), dtype)


def _reach(cut: Cut, layer: _Layer) -> float:
    """The largest magnitude of the pieces of a sum and of sums of them; infinite if it is not known."""
    if cut.weight_digits > 1 or layer.weight_axis != 1:
        return math.inf
    ends = [layer.ends] if cut.input_digits == 1 else float_digit_ends(layer.ends)
    by_output = [w.flatten(1) for w in cut.weights]
    return sum(float(reaches(w, *each).max()) for w in by_output for each in ends)


def _finish(g: OnnxGraph, total: Sum, residual: str | None, plan: AccumulatorPlan, layer: _Layer) -> str:
    factor, dtype = plan.factor.reshape(layer.spread), plan.factor.dtype
    bias = None if plan.bias is None else plan.bias.reshape(layer.spread)
    acc, lift = total.name, total.lift
    is_plain = dtype == torch.float64 and plan.worst_case <= INT32_MAX and not plan.is_real
    if lift is not None:
        acc = g.cast(acc, dtype)
    if total.dtype == torch.int32:
        lift = _lift(total, plan, layer) if is_plain and residual is not None else None
        if lift is not None and residual is not None:
            acc, residual = g.node("Add", acc, _residual_term(g, residual, lift, plan, layer)), None
        acc = g.node("Cast", acc, to=TYPES[dtype])  # no product of matrices follows, so it may stand after a transpose
    if is_plain and residual is None:
        shift = _shift(plan)
        offset = _offset(plan, shift) if lift is None else _offset(plan, shift) - lift * plan.factor
        return _cut_off(g, _scaled(g, acc, plan.factor, offset, layer), plan, shift)
    half = g.scalar(0.5, dtype)
    if residual is not None and plan.residual_factor is not None:
        if dtype == torch.float64:
            residual = g.cast(residual, dtype)
            if bias is not None and _holds_bias(plan.residual_factor):
                half, bias = g.constant(bias + 0.5, dtype, "offset"), None
        term = g.node("Mul", residual, g.constant(plan.residual_factor.reshape(layer.spread), dtype, "residual_factor"))
        acc = g.node("Add", acc, g.node("Floor", g.node("Add", term, half)))
    if dtype == torch.float64 and bias is not None:
        acc = g.node("Add", acc, g.constant(bias, dtype, "bias"))
    if plan.limit:
        acc = g.clip(acc, -plan.limit - 1, plan.limit, dtype)
    if plan.is_real:
        out = g.node("Mul", acc, g.constant(factor, hint="scale"))
        return g.without_sign_of_zero(out if dtype == torch.float32 else g.cast(out, torch.float32))
    if dtype == torch.float64:
        shift = _shift(plan)
        offset = torch.full_like(plan.factor, 0.5 + (shift or 0))
        return _cut_off(g, _scaled(g, acc, plan.factor, offset, layer), plan, shift)
    if g.has_bytes and residual is not None and plan.low >= -128 and plan.high <= 127:  # other layers take bytes
        return g.rounded_bytes(g.node("Mul", acc, g.constant(factor, hint="factor")), plan.low, plan.high)
    return rescale(g, acc, dtype, factor, plan.low, plan.high)


def _lift(total: Sum, plan: AccumulatorPlan, layer: _Layer) -> Tensor | None:
    """What makes a residual's term positive, for each channel; None if the sum with it may leave int32."""
    if plan.residual_factor is None or layer.residual_ends is None:
        return None
    low, high = layer.residual_ends
    factor = plan.residual_factor.double()
    lift = torch.ceil(factor * -low) + (1 if low < 0 else 0)
    return lift if total.reach + float((factor * high + lift).max()) + 1 <= INT32_MAX else None


def _residual_term(g: OnnxGraph, residual: str, lift: Tensor, plan: AccumulatorPlan, layer: _Layer) -> str:
    """``((residual * R + 2**(k-1)) >> k) + lift`` as int32: what is left of a positive number is cut off by a cast."""
    assert plan.residual_factor is not None
    factor = plan.residual_factor.double().expand_as(lift)
    return g.cast(_scaled(g, g.cast(residual, torch.float64), factor, lift + 0.5, layer), torch.int32)


def _scaled(g: OnnxGraph, acc: str, factor: Tensor, offset: Tensor, layer: _Layer) -> str:
    """``acc * factor + offset`` in float64, for each channel; every step of it is exact.

    Where channels are the second axis this is what a `BatchNormalization` with mean 0 and variance 1 computes, in one
    pass instead of two.
    """
    if len(layer.spread) == 1 or layer.is_lifted:
        scaled = g.node("Mul", acc, g.constant(factor.reshape(layer.spread), hint="factor"))
        return g.node("Add", scaled, g.constant(offset.reshape(layer.spread), hint="offset"))
    factor, offset = factor.reshape(-1), offset.reshape(-1)
    numbers = (factor, offset, torch.zeros_like(factor), torch.ones_like(factor))
    names = zip(numbers, ("factor", "offset", "mean", "variance"), strict=True)
    return g.node("BatchNormalization", acc, *(g.constant(x, hint=name) for x, name in names), epsilon=0.0)


def _holds_bias(factor: Tensor) -> bool:
    """Has a residual's product so few bits behind the point that the bias, of 32 bits, can be added to it?"""
    steps = factor.double() * (1 << 20)
    return bool((steps == steps.round()).all())


def _shift(plan: AccumulatorPlan) -> int | None:
    """What makes every output in range positive, so that a `Cast` to int32 cuts off what `Floor` would; else None.

    The cast is faster. It needs sums that stay within int32, and a factor that leaves the shifted sum its 53 bits.
    """
    reach = plan.worst_case
    if plan.residual_factor is not None:  # the worst case leaves out residuals that saturate the output by themselves
        reach += float(plan.residual_factor.max()) * (1 << 15)
    is_small = plan.worst_case <= INT32_MAX and reach * float(plan.factor.max()) < 1 << 30
    return max(-plan.low, 0) if is_small and float(plan.factor.min()) >= 2.0**-16 else None


def _offset(plan: AccumulatorPlan, shift: int | None) -> Tensor:
    """What is added to a scaled sum: its bias, a half, and the shift; exact, as in torch."""
    half = torch.full_like(plan.factor, 0.5) if plan.bias is None else plan.bias * plan.factor + 0.5
    return half + (shift or 0)


def _cut_off(g: OnnxGraph, scaled: str, plan: AccumulatorPlan, shift: int | None) -> str:
    """What is left of a half is cut off; beyond 2**24 float32 rounds, but that is beyond every range too."""
    if shift is None:
        return g.clip(g.cast(g.node("Floor", scaled), torch.float32), plan.low, plan.high)
    integers = g.cast(scaled, torch.int32)
    out = g.cast(integers, torch.float32)
    if shift:
        return g.clip(g.node("Sub", out, g.scalar(shift, torch.float32)), plan.low, plan.high)
    out = g.clip(out, plan.low, plan.high)
    note_integers(g, out, Integers(integers, plan.low, plan.high))
    return out


def _cut(plan: AccumulatorPlan, layer: _Layer) -> Cut:
    """The layer's pieces, also where torch runs it whole in float64."""
    if plan.parts == 0:
        raise ExportError(
            "a layer whose sums over one input channel can pass 2**24 has no float32 form for ONNX Runtime; use a "
            "smaller kernel, or int8 instead of int16."
        )
    if plan.weights[0].dtype != torch.float64:
        known = Cut(plan.input_digits, len(plan.weights) // plan.parts, plan.parts, plan.weights)
        return known if known.parts == 1 else _whole_blocks(known, layer) or _fewer_taps(known, layer) or known
    weight = plan.weights[0].float()
    digits = 2 if float(weight.abs().max()) > 128 else 1
    return cut_layer(weight, plan.input_digits, digits, plan.parts, layer.weight_axis, layer.groups)


def _whole_blocks(cut: Cut, layer: _Layer) -> Cut | None:
    """The same parts in blocks of channels, as many as ONNX Runtime's convolutions take at once; None if that fails."""
    if layer.groups > 1 or layer.is_matrix or cut.weight_digits > 1 or layer.weight_axis != 1:
        return None
    weight = torch.cat(cut.weights, 1)
    channels = weight.shape[1]
    size = -(-channels // (cut.parts * _BLOCK)) * _BLOCK
    pieces = weight.split(size, 1)
    ends = layer.ends if cut.input_digits == 1 else (-128, 128)
    if channels % _BLOCK or any(float(reaches(w.flatten(1), *ends).max()) >= EXACT_FLOAT32 for w in pieces):
        return None
    return Cut(cut.input_digits, 1, len(pieces), [w.contiguous() for w in pieces])


def _fewer_taps(cut: Cut, layer: _Layer) -> Cut | None:
    """The weights of a layer with groups in two parts, or in one if the bias is not part of the sum; None if not."""
    if layer.groups == 1 or cut.input_digits > 1 or cut.weight_digits > 1 or layer.weight_axis != 1:
        return None
    weight = torch.stack(cut.weights).sum(0)
    by_output = weight.flatten(1)
    # Every other one in the order of size, so that positive and negative sums are halved alike.
    part = by_output.argsort(1).argsort(1) % 2
    part = part.masked_fill((reaches(by_output, *layer.ends).amax(0) < EXACT_FLOAT32).unsqueeze(1), 0)
    pieces = [by_output * (part == index) for index in range(int(part.max()) + 1)]
    if len(pieces) >= cut.parts or any(float(reaches(w, *layer.ends).max()) >= EXACT_FLOAT32 for w in pieces):
        return None
    return Cut(1, 1, len(pieces), [w.reshape(weight.shape) for w in pieces])
