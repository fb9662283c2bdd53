"""Positions and runs as standard ONNX operators: how many there are is known when the model runs."""

from __future__ import annotations

import math

import torch

from horizon_plugin_pytorch.export import onnx_aten
from horizon_plugin_pytorch.export.onnx_fixed_point import lowers
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site


@onnx_aten.lowers("nonzero")
def nonzero(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Transpose", g.node("NonZero", x), perm=[1, 0])


@lowers("rle")
def rle(g: OnnxGraph, site: Site, q: str) -> str:
    """Runs start where a value differs from the one before it, and end where the next one starts."""
    count = math.prod(site.input_shape)

    def numbers(*values: int) -> str:
        return g.constant(list(values), torch.int64)

    flat = g.reshape(g.cast(q, torch.int64), [count])
    if count == 0:
        return g.node("Concat", numbers(0), flat, axis=0)
    later, earlier = (
        g.node("Slice", flat, numbers(1), numbers(count)),
        g.node("Slice", flat, numbers(0), numbers(count - 1)),
    )
    differs = g.cast(g.node("Not", g.node("Equal", later, earlier)), torch.int64)
    starts = g.reshape(g.node("NonZero", g.node("Concat", numbers(1), differs, axis=0)), [-1])
    ends = g.node("Concat", g.node("Slice", starts, numbers(1), numbers(count)), numbers(count), axis=0)
    lengths, values = g.node("Sub", ends, starts), g.node("Gather", flat, starts, axis=0)
    columns = [g.node("Unsqueeze", x, numbers(1)) for x in (values, lengths)]
    return g.node("Concat", g.node("Shape", starts), g.reshape(g.node("Concat", *columns, axis=1), [-1]), axis=0)
