"""Tables, PReLU and angles as standard ONNX operators."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.export.onnx_fixed_point import lookup, lowers
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.fixed_point.elementwise import along

_HALF = 1 << 15


@lowers("evaluate")
def evaluate(g: OnnxGraph, site: Site, q: str, program: str, table: Tensor, offset: int) -> str:
    return lookup(g, site, q, table, offset)


@lowers("prelu")
def prelu(
    g: OnnxGraph, site: Site, q: str, above: Tensor, below: Tensor, axis: int, is_convex: bool, low: int, high: int
) -> str:
    is_below = g.node("Less", q, g.scalar(0.0, torch.float32))
    slopes = [g.constant(along(s, a, site.rank), hint="slope") for s, a in ((below, axis), (above, -1))]
    return g.clip(g.node("Round", g.node("Mul", q, g.node("Where", is_below, *slopes))), low, high)


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
