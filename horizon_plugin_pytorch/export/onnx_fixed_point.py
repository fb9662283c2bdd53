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

from horizon_plugin_pytorch.export.onnx_digits import float_digits
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.fixed_point.dynamic import SMALLEST_SCALE, Blocks
from horizon_plugin_pytorch.fixed_point.elementwise import along
from horizon_plugin_pytorch.fixed_point.library import unflatten
from horizon_plugin_pytorch.program.note import Value

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
    if g.has_bytes and (low, high) == (-128, 127) and scale.numel() == 1:  # the operator divides, rounds and saturates
        return g.quantized(x, scale)
    steps = g.node("Div", x, g.constant(along(scale, axis, site.rank), hint="scale"))
    steps = g.node("Where", g.node("IsNaN", steps), g.scalar(0.0, torch.float32), steps)
    return g.clip(g.node("Round", steps), low, high)


@lowers("dequantize")
def dequantize(g: OnnxGraph, site: Site, q: str, scale: Tensor, axis: int) -> str:
    out = g.node("Mul", q, g.constant(along(scale, axis, site.rank), hint="scale"))
    return out if g.is_from_bytes(q) else g.without_sign_of_zero(out)


@lowers("requantize")
def requantize(g: OnnxGraph, site: Site, q: str, factor: Tensor, axis: int, low: int, high: int) -> str:
    return rescale(g, q, torch.float32, along(factor, axis, site.rank), low, high)


def is_byte(value: Value) -> bool:
    """Are its integers of int8, with one scale?"""
    known = value.quantization
    return known is not None and known.dtype.storage == torch.int8 and known.scale.numel() == 1


def _bytes_of(g: OnnxGraph, x: str, value: Value, factor: float) -> tuple[str, float, int]:
    known = value.quantization
    name, zero = g.bytes_of(x, known is None or known.range is None or known.range[0] < 0)
    return name, factor, zero


@lowers("add", data="a b")
def add(
    g: OnnxGraph, site: Site, a: str, b: str, factor_a: float, factor_b: float, is_narrow: bool, low: int, high: int
) -> str:
    dtype = torch.float32 if is_narrow else torch.float64
    if g.is_fast and min(factor_a, factor_b) > 0 and all(map(is_byte, (*site.inputs, *site.outputs))):
        g.tell_inexact("a sum of bytes rounds halves to even")
        parts = [
            g.real_of_bytes(*_bytes_of(g, x, value, factor))
            for x, value, factor in zip((a, b), site.inputs, (factor_a, factor_b), strict=True)
        ]
        return g.rounded_bytes(g.node("Add", *parts), low, high)
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
    dtype = factor.dtype
    wide = q if dtype == torch.float32 else g.cast(q, dtype)
    scaled = g.node("Mul", wide, g.constant(along(factor, axis, site.rank), dtype, "factor"))
    shifted = g.node("Add", scaled, g.constant(along(offset, axis, site.rank), dtype, "offset"))
    if dtype == torch.float32:  # the half is in the offset
        return g.clip(g.node("Floor", shifted), low, high)
    return round_half_up(g, shifted, low, high, dtype)


@lowers("lookup")
def lookup(g: OnnxGraph, site: Site, q: str, table: Tensor, offset: int) -> str:
    index = g.node("Sub", g.cast(q, torch.int32), g.constant(offset, torch.int32))
    return g.node("Gather", g.table(table), index, axis=0)


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


@lowers("dynamic_linear", data="x")
def dynamic_linear(
    g: OnnxGraph, site: Site, x: str, weight: Tensor, scale: Tensor, bias: Tensor | None, *constants: Any
) -> str:
    (blocks,) = unflatten(constants, Blocks)
    columns = weight.split(blocks.size, 1)
    parts = [x]
    if len(columns) > 1:
        sizes = g.constant([part.shape[1] for part in columns], torch.int64, "split")
        parts = g.node("Split", x, sizes, outputs=len(columns), axis=site.rank - 1)
    total = None
    for part, kernel in zip(parts, columns, strict=True):
        largest = g.axes("ReduceMax", g.node("Abs", part), [site.rank - 1], keepdim=True)
        step = g.node("Div", largest, g.scalar((blocks.high - blocks.low) / 2, torch.float32))
        step = g.node("Max", step, g.scalar(SMALLEST_SCALE, torch.float32))
        integers = g.clip(g.node("Round", g.node("Div", part, step)), blocks.low, blocks.high)
        if weight.dtype == torch.float64:
            integers = g.cast(integers, torch.float64)
        sums = g.node("Round", g.node("MatMul", integers, g.compact(kernel.T.contiguous())))
        if weight.dtype == torch.float64:
            sums = g.cast(sums, torch.float32)
        term = g.node("Mul", sums, step)
        total = term if total is None else g.node("Add", total, term)
    assert total is not None
    out = g.node("Mul", total, g.constant(scale, hint="scale"))
    out = g.without_sign_of_zero(out)
    return out if bias is None else g.node("Add", out, g.constant(bias, hint="bias"))


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
        return g.without_sign_of_zero(out if dtype == torch.float32 else g.cast(out, torch.float32))
    return rescale(g, acc, dtype, factor, low, high)


@lowers("avg_pool2d")
@lowers("avg_pool3d")
def avg_pool(
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
    axes = len(kernel)
    channels = site.input_shape[-axes - 1]
    stride = list(stride) or list(kernel)
    ends = [
        max((out - 1) * s + k - size - begin, 0)
        for out, s, k, size, begin in zip(
            site.output_shape[-axes:], stride, kernel, site.input_shape[-axes:], padding, strict=True
        )
    ]
    ones = g.compact(torch.ones(channels, 1, *kernel, dtype=torch.float32), "ones")

    def window(x: str) -> str:
        return g.node("Round", g.node("Conv", x, ones, strides=stride, pads=[*padding, *ends], group=channels))

    if not is_double:
        return rescale(g, window(q), torch.float32, factor, low, high)
    left, multiples = (g.cast(window(d), torch.float64) for d in float_digits(g, q, (-(1 << 15), (1 << 15) - 1)))
    return rescale(g, g.node("Add", left, multiples), torch.float64, factor, low, high)


@lowers("resample2d")
def resample2d(
    g: OnnxGraph, site: Site, q: str, rows: Tensor, columns: Tensor, factor: Tensor, low: int, high: int
) -> str:
    dtype = rows.dtype
    wide = q if dtype == torch.float32 else g.cast(q, dtype)
    across = g.node("MatMul", wide, g.compact(columns, "columns"))
    acc = g.node("Round", g.node("MatMul", g.compact(rows, "rows"), across))
    return rescale(g, acc, dtype, factor, low, high)


@lowers("resample3d")
def resample3d(
    g: OnnxGraph,
    site: Site,
    q: str,
    planes: Tensor,
    rows: Tensor,
    columns: Tensor,
    factor: Tensor,
    low: int,
    high: int,
) -> str:
    dtype = rows.dtype
    wide = q if dtype == torch.float32 else g.cast(q, dtype)
    across = g.node("MatMul", g.compact(rows, "rows"), g.node("MatMul", wide, g.compact(columns, "columns")))
    flat = g.reshape(across, [*site.input_shape[:-2], rows.shape[0] * columns.shape[1]])
    total = g.reshape(g.node("MatMul", g.compact(planes, "planes"), flat), site.output_shape)
    return rescale(g, g.node("Round", total), dtype, factor, low, high)
