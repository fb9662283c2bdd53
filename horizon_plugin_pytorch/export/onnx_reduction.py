"""Norms, variances and running sums as ONNX operators; each line mirrors one of `fixed_point.norm`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.export.onnx_fixed_point import lowers, rescale, round_half_up
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site


def _measure(g: OnnxGraph, site: Site, q: str, dims: list[int], keepdim: bool, kind: str, is_double: bool) -> str:
    def double(x: str) -> str:
        return x if is_double else g.cast(x, torch.float64)

    if kind in (fp.LARGEST, fp.SMALLEST):
        word = "ReduceMax" if kind == fp.LARGEST else "ReduceMin"
        return g.cast(g.axes(word, g.node("Abs", q), dims, keepdim), torch.float64)
    wide = g.cast(q, torch.float64) if is_double else q
    if kind == fp.MAGNITUDES:
        return double(g.axes("ReduceSum", g.node("Abs", wide), dims, keepdim))
    squares = double(g.axes("ReduceSum", g.node("Mul", wide, wide), dims, keepdim))
    if kind == fp.SQUARES:
        return squares
    count = math.prod(site.input_shape[d] for d in dims)
    total = double(g.axes("ReduceSum", wide, dims, keepdim))
    return g.node("Sub", g.node("Mul", squares, g.scalar(count, torch.float64)), g.node("Mul", total, total))


@lowers("norm")
def norm(
    g: OnnxGraph,
    site: Site,
    q: str,
    dims: list[int],
    keepdim: bool,
    kind: str,
    is_root: bool,
    factor: float,
    is_double: bool,
    low: int,
    high: int,
) -> str:
    measure = _measure(g, site, q, dims, keepdim, kind, is_double)
    if is_root:
        measure = g.node("Sqrt", measure)
    scaled = g.node("Mul", measure, g.scalar(factor, torch.float64))
    return round_half_up(g, scaled, low, high, torch.float64)


@lowers("divide_by_norm")
def divide_by_norm(
    g: OnnxGraph,
    site: Site,
    q: str,
    dims: list[int],
    kind: str,
    gain: float,
    smallest: float,
    is_double: bool,
    low: int,
    high: int,
) -> str:
    measure = _measure(g, site, q, dims, True, kind, is_double)
    if kind == fp.SQUARES:
        measure = g.node("Sqrt", measure)
    measure = g.node("Max", measure, g.scalar(smallest, torch.float64))
    factor = g.cast(g.node("Div", g.scalar(gain, torch.float64), measure), torch.float32)
    return g.clip(g.node("Round", g.node("Mul", q, factor)), low, high)


@lowers("cumsum")
def cumsum(g: OnnxGraph, site: Site, q: str, dim: int, factor: Tensor, is_double: bool, low: int, high: int) -> str:
    dtype = torch.float64 if is_double else torch.float32
    wide = g.cast(q, dtype) if is_double else q
    acc = wide if site.rank == 0 else g.node("CumSum", wide, g.constant(dim % site.rank, torch.int64, "axis"))
    return rescale(g, acc, dtype, factor, low, high)
