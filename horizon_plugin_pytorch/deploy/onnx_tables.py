"""PReLU and angles as standard ONNX operators."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.deploy.onnx_fixed_point import lookup, lowers, round_half_up
from horizon_plugin_pytorch.deploy.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.fixed_point.elementwise import along

_HALF = 1 << 15


@lowers("prelu")
def prelu(g: OnnxGraph, site: Site, q: str, above: Tensor, below: Tensor, axis: int, low: int, high: int) -> str:
    dtype = above.dtype
    is_below = g.node("Less", q, g.scalar(0.0, torch.float32))
    factors = [g.constant(along(f, a, site.rank), dtype, "slope") for f, a in ((below, axis), (above, -1))]
    scaled = g.node("Mul", g.node("Where", is_below, *factors), g.cast(q, dtype) if dtype == torch.float64 else q)
    if dtype == torch.float32:
        return g.clip(g.node("Round", scaled), low, high)
    return round_half_up(g, scaled, low, high, dtype)


@lowers("atan2", data="y x")
def atan2(
    g: OnnxGraph, site: Site, y: str, x: str, y_log: Tensor, x_log: Tensor, angles: Tensor, y_min: int, x_min: int,
    low: int, high: int,
) -> str:  # fmt: skip
    def sign(q: str, negative: float, otherwise: float) -> str:
        is_negative = g.node("Less", q, g.scalar(0.0, torch.float32))
        return g.node("Where", is_negative, g.scalar(negative, torch.float32), g.scalar(otherwise, torch.float32))

    difference = g.node("Sub", lookup(g, site, y, y_log, y_min), lookup(g, site, x, x_log, x_min))
    ratio = g.node("Add", g.clip(difference, -_HALF, _HALF - 1), sign(x, 2.0 * _HALF, 0.0))
    return g.clip(g.node("Mul", lookup(g, site, ratio, angles, -_HALF), sign(y, -1.0, 1.0)), low, high)
