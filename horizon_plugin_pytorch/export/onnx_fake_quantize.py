"""Roundings of the training route, as QuantizeLinear and DequantizeLinear where the opset has them.

``clamp(round(x / scale), low, high) * scale`` with ties to even is what these two operators compute: results are the
same, bit for bit, also where an older opset has only `Div`, `Round`, `Clip` and `Mul` for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.export.onnx_fixed_point import lowers
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.fake_quant.rounding import fake_quantize
from horizon_plugin_pytorch.fixed_point.elementwise import along

_PER_CHANNEL, _INT16 = 13, 21  # the opsets that have them
_AS_UINT8 = 21  # ONNX Runtime's optimiser makes int8 uint8 by itself, and from this opset on an invalid graph


@lowers("fake_quantize", data="")
def rounding(g: OnnxGraph, site: Site, x: str | Tensor, scale: Tensor, axis: int, low: float, high: float) -> str:
    """Data are rounded; weights are stored as integers, with their scales beside them."""
    storage = torch.int8 if low >= -128 and high <= 127 else torch.int16
    if low < -(1 << 15) or high >= 1 << 15:
        storage = torch.int32
    is_written = storage != torch.int32 and g.opset >= (_INT16 if storage == torch.int16 else 10)
    is_written = is_written and (axis < 0 or g.opset >= _PER_CHANNEL)
    ends = scale if axis < 0 else along(scale, axis, site.rank)
    if isinstance(x, Tensor):
        integers = (fake_quantize(x, scale, axis, low, high) / ends).round()
        if not is_written:
            stored = g.cast(g.constant(integers, storage, "weight"), torch.float32)
            return g.node("Mul", stored, g.constant(ends, hint="scale"))
        stored = g.constant(integers, storage, "weight")
    elif not is_written:
        steps = g.node("Round", g.node("Div", x, g.constant(ends, hint="scale")))
        return g.node("Mul", g.clip(steps, low, high), g.constant(ends, hint="scale"))
    else:
        stored = ""
    numbers = g.constant(scale.reshape(-1) if axis >= 0 else scale.reshape(()), hint="scale")
    zero = torch.zeros(scale.numel() if axis >= 0 else (), dtype=storage)
    attributes = {"axis": axis} if axis >= 0 else {}
    if isinstance(x, str):
        x = _inside(g, x, ends, storage, low, high)
        if storage == torch.int8 and g.opset >= _AS_UINT8:
            zero = (zero + 128).to(torch.uint8)
    zeros = g.constant(zero, hint="zero_point")
    if isinstance(x, str):
        stored = g.node("QuantizeLinear", x, numbers, zeros, **attributes)
    return g.node("DequantizeLinear", stored, numbers, zeros, **attributes)


def _inside(g: OnnxGraph, x: str, scale: Tensor, storage: torch.dtype, low: float, high: float) -> str:
    """Values that do not round to integers outside the ends, where these are not those of the type.

    Where weights have no `DequantizeLinear` because their channels have scales, ONNX Runtime would round them once
    more, with one scale for all of them, if it found only a `Relu` between the layer and its `QuantizeLinear`.
    """
    info = torch.iinfo(storage)
    if low == 0 and g.opset >= _PER_CHANNEL:
        x = g.node("Relu", x)
    elif low > info.min or g.opset < _PER_CHANNEL:
        x = g.node("Max", x, g.constant(low * scale, hint="lowest"))
    return x if high >= info.max else g.node("Min", x, g.constant(high * scale, hint="highest"))
