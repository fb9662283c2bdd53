"""Colour conversion as standard ONNX operators."""

from __future__ import annotations

from torch import Tensor

from horizon_plugin_pytorch.export.onnx_fixed_point import lowers
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site


@lowers("mix_channels")
def mix_channels(g: OnnxGraph, site: Site, q: str, matrix: Tensor, offset: Tensor, low: Tensor, high: Tensor) -> str:
    weight = g.constant(matrix[:, :, None, None], hint="matrix")
    out = g.node("Floor", g.node("Conv", q, weight, g.constant(offset, hint="offset")))
    lowest, highest = (g.constant(v.reshape(-1, 1, 1), hint="limit") for v in (low, high))
    return g.node("Min", g.node("Max", out, lowest), highest)
