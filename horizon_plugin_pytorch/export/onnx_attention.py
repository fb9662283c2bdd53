"""Ordinary torch operators around attention and embeddings as ONNX operators: masks and rows of tables."""

from __future__ import annotations

from horizon_plugin_pytorch.export.onnx_aten import lowers
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site


@lowers("bitwise_not", "logical_not")
def invert(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Not", x)


@lowers("embedding")
def embedding(g: OnnxGraph, site: Site, weight: str, index: str, *args: object) -> str:
    return g.node("Gather", weight, index, axis=0)
