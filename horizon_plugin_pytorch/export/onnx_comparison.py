"""Comparisons, choices and quotients as ONNX operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.export.onnx_aten import ATEN
from horizon_plugin_pytorch.export.onnx_aten import lowers as lowers_aten
from horizon_plugin_pytorch.export.onnx_fixed_point import lowers, round_half_up
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site

_RELATIONS = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}


@lowers("compare", data="a b")
def compare(
    g: OnnxGraph, site: Site, a: str, b: str, factor_a: float, factor_b: float, is_narrow: bool, relation: str
) -> str:
    if factor_a != 1 or factor_b != 1:
        dtype = torch.float32 if is_narrow else torch.float64
        if not is_narrow:
            a, b = g.cast(a, dtype), g.cast(b, dtype)
        a = a if factor_a == 1 else g.node("Mul", a, g.scalar(factor_a, dtype))
        b = b if factor_b == 1 else g.node("Mul", b, g.scalar(factor_b, dtype))
    return g.node("Not", g.node("Equal", a, b)) if relation == "ne" else g.node(_RELATIONS[relation], a, b)


def _factors(g: OnnxGraph, a: Tensor, b: Tensor) -> tuple[torch.dtype, str, str]:
    dtype = a.dtype if a.dtype == b.dtype else torch.float64
    return dtype, g.constant(a.reshape(()), dtype, "factor"), g.constant(b.reshape(()), dtype, "factor")


def _rounded(g: OnnxGraph, scaled: str, dtype: torch.dtype, low: int, high: int) -> str:
    if dtype == torch.float32:
        return g.clip(g.node("Round", scaled), low, high)
    return round_half_up(g, scaled, low, high, dtype)


@lowers("extremum", data="a b")
def extremum(
    g: OnnxGraph, site: Site, a: str, b: str, factor_a: Tensor, factor_b: Tensor, is_minimum: bool, low: int, high: int
) -> str:
    dtype, *factors = _factors(g, factor_a, factor_b)
    if dtype == torch.float64:
        a, b = g.cast(a, dtype), g.cast(b, dtype)
    left, right = g.node("Mul", a, factors[0]), g.node("Mul", b, factors[1])
    return _rounded(g, g.node("Min" if is_minimum else "Max", left, right), dtype, low, high)


@lowers("div", data="a b")
def div(g: OnnxGraph, site: Site, a: str, b: str, factor: float, smallest: float, low: int, high: int) -> str:
    limit, zero = g.scalar(smallest, torch.float32), g.scalar(0.0, torch.float32)
    below, above = g.node("Min", b, g.scalar(-smallest, torch.float32)), g.node("Max", b, limit)
    divisor = g.cast(g.node("Where", g.node("Less", b, zero), below, above), torch.float64)
    scaled = g.node("Mul", g.cast(a, torch.float64), g.scalar(factor, torch.float64))
    return round_half_up(g, g.node("Div", scaled, divisor), low, high, torch.float64)


@lowers_aten("ne")
def ne(g: OnnxGraph, site: Site, a: str, b: Any) -> str:
    return g.node("Not", ATEN["aten::eq"](g, site, a, b))


@lowers_aten("logical_not", "bitwise_not")
def logical_not(g: OnnxGraph, site: Site, x: str) -> str:
    return g.node("Not", _as_bool(g, site, x))


@lowers_aten("logical_xor", "bitwise_xor")
def logical_xor(g: OnnxGraph, site: Site, a: str, b: str) -> str:
    return g.node("Xor", a, b)


@lowers_aten("any", "all")
def any_(g: OnnxGraph, site: Site, x: str, dim: Any = None, keepdim: bool = False) -> str:
    """The largest (smallest) of 0 and 1."""
    rank = len(site.input_shape)
    dims = [dim] if isinstance(dim, int) else list(dim or range(rank))
    numbers = g.cast(_as_bool(g, site, x), torch.float32)
    if rank > 0:
        operator = "ReduceMax" if site.name == "aten::any" else "ReduceMin"
        numbers = g.axes(operator, numbers, [d % rank for d in dims], keepdim)
    return g.cast(numbers, torch.bool)


def _as_bool(g: OnnxGraph, site: Site, x: str) -> str:
    return x if site.input_dtype == torch.bool else g.cast(x, torch.bool)


@lowers_aten("masked_fill", "masked_fill_")
def masked_fill(g: OnnxGraph, site: Site, x: str, mask: str, value: Any) -> str:
    number = value if isinstance(value, str) else g.constant(value, site.input_dtype)
    return g.where(mask, number, x, site.input_dtype)
