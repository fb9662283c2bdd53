"""`horizon::*` operators as standard ONNX operators.

Each function mirrors the Python kernel in `fixed_point`, so the same exactness arguments hold. A `Round` after a sum of
integers changes nothing and keeps ONNX Runtime from folding the scale that follows into the layer's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.deploy.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.fixed_point.accumulator import Cut, cut_layer
from horizon_plugin_pytorch.fixed_point.elementwise import along

Lowering = Callable[..., Any]


@dataclass(frozen=True)
class FixedPoint:
    """How a ``horizon::*`` operator is written, and which of its arguments are values of the graph."""

    lower: Lowering
    data: frozenset[str]


FIXED_POINT: dict[str, FixedPoint] = {}


def lowers(name: str, data: str = "q") -> Callable[[Lowering], Lowering]:
    """Register the lowering of ``horizon::<name>``.

    It gets the graph, the site, value names for tensors of the graph, and its other arguments as they are; it gives
    the name of its result, or a list of names where the operator gives several.

    Args:
        data: the arguments that are values of the graph, also where a constant is given for them. Other tensors are
            constants (factors, weights), unless the model computed them.
    """

    def register(function: Lowering) -> Lowering:
        FIXED_POINT[f"horizon::{name}"] = FixedPoint(function, frozenset(data.split()))
        return function

    return register


def rescale(g: OnnxGraph, acc: str, acc_dtype: torch.dtype, factor: Tensor, low: float, high: float) -> str:
    """As `fixed_point.rescaling.rescale_`."""
    if factor.dtype == torch.float32 and acc_dtype == torch.float32:
        return g.clip(g.node("Round", g.node("Mul", acc, g.constant(factor, hint="factor"))), low, high)
    if acc_dtype != torch.float64:
        acc = g.cast(acc, torch.float64)
    scaled = g.node("Mul", acc, g.constant(factor.double(), hint="factor"))
    return round_half_up(g, scaled, low, high, torch.float64)


def round_half_up(g: OnnxGraph, x: str, low: float, high: float, dtype: torch.dtype) -> str:
    """``clamp(floor(x + 0.5))`` in float32."""
    out = g.clip(g.node("Floor", g.node("Add", x, g.scalar(0.5, dtype))), low, high, dtype)
    return out if dtype == torch.float32 else g.cast(out, torch.float32)


@lowers("quantize", data="x")
def quantize(g: OnnxGraph, site: Site, x: str, scale: Tensor, axis: int, low: int, high: int) -> str:
    steps = g.node("Div", x, g.constant(along(scale, axis, site.rank), hint="scale"))
    return g.clip(g.node("Round", steps), low, high)


@lowers("dequantize")
def dequantize(g: OnnxGraph, site: Site, q: str, scale: Tensor, axis: int) -> str:
    return g.node("Mul", q, g.constant(along(scale, axis, site.rank), hint="scale"))


@lowers("requantize")
def requantize(g: OnnxGraph, site: Site, q: str, factor: Tensor, axis: int, low: int, high: int) -> str:
    return rescale(g, q, torch.float32, along(factor, axis, site.rank), low, high)


@lowers("add", data="a b")
def add(
    g: OnnxGraph, site: Site, a: str, b: str, factor_a: float, factor_b: float, is_narrow: bool, low: int, high: int
) -> str:
    dtype = torch.float32 if is_narrow else torch.float64
    if not is_narrow:
        a, b = g.cast(a, dtype), g.cast(b, dtype)
    left, right = g.node("Mul", a, g.scalar(factor_a, dtype)), g.node("Mul", b, g.scalar(factor_b, dtype))
    return round_half_up(g, g.node("Add", left, right), low, high, dtype)


@lowers("mul", data="a b")
def mul(g: OnnxGraph, site: Site, a: str, b: str, factor: Tensor, low: int, high: int) -> str:
    if factor.dtype == torch.float64:
        a, b = g.cast(a, torch.float64), g.cast(b, torch.float64)
    return rescale(g, g.node("Mul", a, b), factor.dtype, factor, low, high)


@lowers("affine")
def affine(g: OnnxGraph, site: Site, q: str, factor: Tensor, offset: Tensor, axis: int, low: int, high: int) -> str:
    wide = g.cast(q, torch.float64)
    scaled = g.node("Mul", wide, g.constant(along(factor, axis, site.rank), torch.float64, "factor"))
    shifted = g.node("Add", scaled, g.constant(along(offset, axis, site.rank), torch.float64, "offset"))
    return round_half_up(g, shifted, low, high, torch.float64)


@lowers("lookup")
def lookup(g: OnnxGraph, site: Site, q: str, table: Tensor, offset: int) -> str:
    index = g.node("Sub", g.cast(q, torch.int32), g.constant(offset, torch.int32))
    return g.node("Gather", g.compact(table, "table"), index, axis=0)


@lowers("sum")
def sum(
    g: OnnxGraph,
    site: Site,
    q: str,
    dims: list[int],
    keepdim: bool,
    factor: Tensor,
    is_double: bool,
    low: int,
    high: int,
) -> str:
    dtype = torch.float64 if is_double else torch.float32
    total = g.axes("ReduceSum", g.cast(q, dtype) if is_double else q, list(dims), keepdim)
    return rescale(g, total, dtype, factor, low, high)


def split_digits(g: OnnxGraph, x: str, count: int) -> list[str]:
    """As `fixed_point.accumulator.split_digits`."""
    if count == 1:
        return [x]
    high = g.node("Round", g.node("Mul", x, g.scalar(1 / 256, torch.float32)))
    return [g.node("Sub", x, g.node("Mul", high, g.scalar(256.0, torch.float32))), high]


def _accumulate(
    g: OnnxGraph,
    product: Callable[[str, Tensor, Tensor | None], str],
    x: str,
    cut: Cut,
    bias: Tensor | None,
    is_wide: bool,
    weight_axis: int,
    groups: int,
    input_axis: int,
    spread: Callable[[Tensor], Tensor],
) -> str:
    """As `fixed_point.accumulator`: the exact sum of the layer's pieces."""
    if len(cut.weights) == 1 and cut.input_digits == 1:
        acc = g.node("Round", product(x, cut.weights[0], None if is_wide else bias))
        if not is_wide:
            return acc
        acc = g.cast(acc, torch.float64)  # the bias may not fit beside the products in float32
        return acc if bias is None else g.node("Add", acc, g.constant(spread(bias), torch.float64, "bias"))
    dtype = torch.float64 if is_wide else torch.float32
    sizes = [w.shape[weight_axis] for w in cut.weights[:: cut.weight_digits]]
    slices = [x] * cut.parts
    if groups == 1 and cut.parts > 1:
        slices = g.node("Split", x, g.constant(sizes, torch.int64, "split"), outputs=cut.parts, axis=input_axis)
    total = None
    for index, piece in enumerate(slices):
        kernels = cut.weights[index * cut.weight_digits : (index + 1) * cut.weight_digits]
        for i, digit in enumerate(split_digits(g, piece, cut.input_digits)):
            for j, kernel in enumerate(kernels):
                term = g.node("Round", product(digit, kernel, None))
                if is_wide:
                    term = g.cast(term, torch.float64)
                if i + j:
                    term = g.node("Mul", term, g.scalar(256.0 ** (i + j), dtype))
                total = term if total is None else g.node("Add", total, term)
    assert total is not None
    if bias is not None:
        total = g.node("Add", total, g.constant(spread(bias), dtype, "bias"))
    return total


def _finish(
    g: OnnxGraph,
    acc: str,
    residual: str | None,
    residual_factor: Tensor | None,
    factor: Tensor,
    limit: float,
    low: int,
    high: int,
    is_real: bool,
) -> str:
    dtype = factor.dtype
    if residual is not None and residual_factor is not None:
        if dtype == torch.float64:
            residual = g.cast(residual, dtype)
        term = g.node("Mul", residual, g.constant(residual_factor, dtype, "residual_factor"))
        acc = g.node("Add", acc, g.node("Floor", g.node("Add", term, g.scalar(0.5, dtype))))
    if limit:
        acc = g.clip(acc, -limit - 1, limit, dtype)
    if is_real:
        out = g.node("Mul", acc, g.constant(factor, hint="scale"))
        return out if dtype == torch.float32 else g.cast(out, torch.float32)
    return rescale(g, acc, dtype, factor, low, high)


def _cut(weights: list[Tensor], digits: int, parts: int, axis: int, groups: int) -> Cut:
    """The layer's pieces, also where torch runs it whole in float64."""
    if parts == 0:
        raise ExportError(
            "a layer whose sums over one input channel can pass 2**24 has no float32 form for ONNX Runtime; use a "
            "smaller kernel, or int8 instead of int16."
        )
    if weights[0].dtype != torch.float64:
        return Cut(digits, len(weights) // parts, parts, weights)
    weight = weights[0].float()
    return cut_layer(weight, digits, 2 if float(weight.abs().max()) > 128 else 1, parts, axis, groups)


@lowers("conv2d", data="x residual")
def conv2d(
    g: OnnxGraph,
    site: Site,
    x: str,
    weights: list[Tensor],
    bias: Tensor | None,
    residual: str | None,
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
) -> str:
    def product(a: str, w: Tensor, b: Tensor | None) -> str:
        weight, offset = g.compact(w.float()), None if b is None else g.constant(b, hint="bias")
        if is_transposed:
            return g.conv_transpose(a, weight, offset, stride, padding, dilation, output_padding, groups)
        inputs = [a, weight] if offset is None else [a, weight, offset]
        return g.node(
            "Conv", *inputs, strides=list(stride), pads=list(padding) * 2, dilations=list(dilation), group=groups
        )

    axis = 0 if is_transposed else 1
    acc = _accumulate(
        g, product, x, _cut(weights, input_digits, parts, axis, groups), bias, factor.dtype == torch.float64, axis,
        groups, 1, lambda v: v.reshape(-1, 1, 1),
    )  # fmt: skip
    spread = None if residual_factor is None else residual_factor.reshape(-1, 1, 1)
    return _finish(g, acc, residual, spread, factor.reshape(-1, 1, 1), limit, low, high, is_real)


@lowers("linear", data="x residual")
def linear(
    g: OnnxGraph,
    site: Site,
    x: str,
    weights: list[Tensor],
    bias: Tensor | None,
    residual: str | None,
    residual_factor: Tensor | None,
    factor: Tensor,
    input_digits: int,
    parts: int,
    is_double: bool,
    limit: float,
    low: int,
    high: int,
    is_real: bool,
) -> str:
    def product(a: str, w: Tensor, b: Tensor | None) -> str:
        out = g.node("MatMul", a, g.compact(w.float().T.contiguous()))
        return out if b is None else g.node("Add", out, g.constant(b, hint="bias"))

    acc = _accumulate(
        g,
        product,
        x,
        _cut(weights, input_digits, parts, 1, 1),
        bias,
        factor.dtype == torch.float64,
        1,
        1,
        site.rank - 1,
        lambda v: v,
    )
    return _finish(g, acc, residual, residual_factor, factor, limit, low, high, is_real)


@lowers("matmul", data="a b")
def matmul(
    g: OnnxGraph, site: Site, a: str, b: str, factor: Tensor, is_double: bool, low: int, high: int, is_real: bool
) -> str:
    if is_double:
        a, b = g.cast(a, torch.float64), g.cast(b, torch.float64)
    acc = g.node("Round", g.node("MatMul", a, b))
    dtype = torch.float64 if is_double else torch.float32
    if is_real:
        out = g.node("Mul", acc, g.constant(factor, dtype, "scale"))
        return out if dtype == torch.float32 else g.cast(out, torch.float32)
    return rescale(g, acc, dtype, factor, low, high)


@lowers("avg_pool2d")
def avg_pool2d(
    g: OnnxGraph,
    site: Site,
    q: str,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    factor: Tensor,
    is_double: bool,
    low: int,
    high: int,
) -> str:
    """The window's sum as a convolution with ones: ONNX's AveragePool divides, and so rounds."""
    channels = site.input_shape[-3]
    stride = list(stride) or list(kernel)
    ends = [
        max((out - 1) * s + k - size - begin, 0)
        for out, s, k, size, begin in zip(
            site.output_shape[-2:], stride, kernel, site.input_shape[-2:], padding, strict=True
        )
    ]
    ones = g.compact(torch.ones(channels, 1, *kernel), "ones")

    def window(x: str) -> str:
        return g.node("Round", g.node("Conv", x, ones, strides=stride, pads=[*padding, *ends], group=channels))

    if not is_double:
        return rescale(g, window(q), torch.float32, factor, low, high)
    low_digit, high_digit = (g.cast(window(d), torch.float64) for d in split_digits(g, q, 2))
    total = g.node("Add", low_digit, g.node("Mul", high_digit, g.scalar(256.0, torch.float64)))
    return rescale(g, total, torch.float64, factor, low, high)


@lowers("resample2d")
def resample2d(
    g: OnnxGraph, site: Site, q: str, rows: Tensor, columns: Tensor, factor: Tensor, low: int, high: int
) -> str:
    dtype = rows.dtype
    wide = q if dtype == torch.float32 else g.cast(q, dtype)
    across = g.node("MatMul", wide, g.compact(columns, "columns"))
    acc = g.node("Round", g.node("MatMul", g.compact(rows, "rows"), across))
    return rescale(g, acc, dtype, factor, low, high)
