"""The order of numbers in files: of booleans, of which ONNX has none, and of integers, which old opsets lack."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site


def extreme(g: OnnxGraph, operator: str, a: str, b: str, dtype: torch.dtype) -> str:
    """The larger (``Max``) or smaller (``Min``) number; before opset 12 these operators have float numbers alone."""
    if dtype.is_floating_point or g.opset >= 12:
        return g.node(operator, a, b)
    return g.where(g.node("Greater" if operator == "Max" else "Less", a, b), a, b, dtype)


def of_numbers(lower: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering that compares numbers, of booleans as well: these are 0 and 1 for it, which ONNX has no order of."""

    @functools.wraps(lower)
    def lower_any(g: OnnxGraph, site: Site, x: str, *args: Any, **kwargs: Any) -> Any:
        if site.input_dtype != torch.bool:
            return lower(g, site, x, *args, **kwargs)
        numbers = tuple(replace(v, dtype=torch.int32) if v.dtype == torch.bool else v for v in site.outputs)
        among = replace(site, input_dtype=torch.int32, outputs=numbers)
        found = lower(g, among, g.cast(x, torch.int32), *args, **kwargs)
        given = [
            g.cast(value, torch.bool) if output.dtype == torch.bool else value
            for value, output in zip(found if isinstance(found, list) else [found], site.outputs, strict=True)
        ]
        return given if isinstance(found, list) else given[0]

    return lower_any
