"""Convolutions of bytes: ``QLinearConv``, whose kernels add in int32."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.export.onnx_digits import HALF_WEIGHT, halves_of_weight
from horizon_plugin_pytorch.export.onnx_fixed_point import is_byte
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.fixed_point.accumulator_plan import INT32_MAX, AccumulatorPlan, Geometry

_MANY_CHANNELS = 8  # from here on a convolution of signed weights and twice the channels is faster


def is_of_bytes(site: Site, plan: AccumulatorPlan, geometry: Geometry) -> bool:
    """Can the layer be a convolution of bytes, whose sum is an int32 and is scaled by one float32 product?"""
    if not is_byte(site.inputs[0]) or geometry.is_transposed or plan.worst_case > INT32_MAX:
        return False
    if plan.is_real or plan.low < -128 or plan.high > 127 or len(plan.weights) != plan.parts:
        return False
    return all(w.numel() and int(w.min()) >= -128 and int(w.max()) <= 127 for w in plan.weights)


def conv_of_bytes(g: OnnxGraph, site: Site, x: str, plan: AccumulatorPlan, geometry: Geometry) -> str:
    """``QLinearConv`` with scales of 1 and a weight scale that is the factor: the kernel computes the definition."""
    zero = 0 if plan.low >= 0 else 128
    out = _convolved_bytes(g, site, x, plan, geometry, plan.factor, zero)
    return g.from_bytes(g.limited_bytes(out, zero, plan.low, plan.high), zero)


def conv_and_residual(
    g: OnnxGraph, site: Site, x: str, residual: str, plan: AccumulatorPlan, geometry: Geometry
) -> str:
    """A convolution of bytes and a sum of bytes, with a rounding between them that the definition does not have.

    The convolution's bytes reach as far as it can without the output being saturated, whatever the residual is.
    """
    other, out = site.inputs[1].quantization, site.outputs[0].quantization
    assert other is not None and out is not None
    ratio = float(other.scale) / float(out.scale)
    ends = other.range or (-128, 127)
    low, high = plan.low - ends[1] * ratio, plan.high - ends[0] * ratio
    step = (high - low) / 255
    zero = min(max(round(-low / step), 0), 255)
    between = _convolved_bytes(g, site, x, plan, geometry, plan.factor.double() / step, zero)
    added, added_zero = g.bytes_of(residual, ends[0] < 0)
    total = g.node("Add", g.real_of_bytes(between, step, zero), g.real_of_bytes(added, ratio, added_zero))
    return g.rounded_bytes(total, plan.low, plan.high)


def _convolved_bytes(
    g: OnnxGraph, site: Site, x: str, plan: AccumulatorPlan, geometry: Geometry, factor: Tensor, zero: int
) -> str:
    """The layer's sums times a factor, as bytes with a zero point."""
    parts = plan.weights
    weight = torch.cat(parts, geometry.input_axis) if geometry.groups == 1 else torch.stack(parts).sum(0)
    given = site.inputs[0].quantization
    source, source_zero = g.bytes_of(x, given is None or given.range is None or given.range[0] < 0)
    source, kernel, kernel_zero = _kernel_of_bytes(g, source, source_zero, weight, geometry.groups)
    kernel_type = torch.uint8 if kernel_zero else torch.int8
    factor = factor.float().reshape(-1).expand(len(weight)).contiguous()
    one = g.scalar(1.0, torch.float32)
    operands = [
        source, one, g.constant(source_zero, torch.uint8, "zero_point"),
        kernel, g.constant(factor, hint="factor"),
        g.constant(kernel_zero, kernel_type, "zero_point"), one, g.constant(zero, torch.uint8, "zero_point"),
    ]  # fmt: skip
    if plan.bias is not None:
        operands.append(g.constant(plan.bias.reshape(-1).expand(len(weight)).contiguous(), torch.int32, "bias"))
    return g.node(
        "QLinearConv", *operands, strides=list(geometry.stride), pads=list(geometry.padding) * 2,
        dilations=list(geometry.dilation), group=geometry.groups,
    )  # fmt: skip


def _kernel_of_bytes(g: OnnxGraph, x: str, zero: int, weight: Tensor, groups: int) -> tuple[str, str, int]:
    """Bytes and weights that meet in a kernel, and the zero point of the weights.

    On processors without VNNI, kernels of unsigned inputs and signed weights add pairs of products in 16 bits, and
    saturate. Inputs up to 127 cannot get there, nor weights up to 64. Other weights are the sum of two such, with the
    input channels twice: that is faster than unsigned weights, which kernels widen first, unless channels are few.
    """
    if zero == 0 or float(weight.abs().max()) <= HALF_WEIGHT:
        return x, g.constant(weight, torch.int8, "weight"), 0
    if groups > 1 or weight.shape[1] < _MANY_CHANNELS:
        return x, g.constant(weight + 128, torch.uint8, "weight"), 128
    kernels = halves_of_weight(g, g.constant(weight, torch.int8, "weight"))
    return g.node("Concat", x, x, axis=1), g.node("Concat", *kernels, axis=1), 0
