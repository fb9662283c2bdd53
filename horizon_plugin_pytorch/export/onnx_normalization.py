"""Normalisation as standard ONNX operators, step by step as in `fixed_point.normalization`."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.export.onnx_fixed_point import lowers
from horizon_plugin_pytorch.export.onnx_graph import OnnxGraph, Site
from horizon_plugin_pytorch.fixed_point import EXACT_FLOAT32
from horizon_plugin_pytorch.fixed_point.normalization import LOG_2, LOWEST, OCTAVES, SMALLEST_VARIANCE, folds

_WIDE = torch.float64


def _sum(g: OnnxGraph, x: str, dims: list[int], is_double: bool) -> str:
    """An exact sum over axes, in float64."""
    return g.axes("ReduceSum", x, dims, True) if is_double else g.cast(g.axes("ReduceSum", x, dims, True), _WIDE)


def _rounded(g: OnnxGraph, x: str, low: int, high: int) -> str:
    return g.clip(g.node("Round", x), low, high)


@lowers("normalize")
def normalize(
    g: OnnxGraph,
    site: Site,
    q: str,
    dims: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    gain: float,
    epsilon: float,
    is_centred: bool,
    bits: int,
    low: int,
    high: int,
) -> str:
    dims = list(dims)
    count = 1
    for axis in dims:
        count *= site.input_shape[axis]
    square, number = float(count) ** 2, g.scalar(count, _WIDE)
    is_double = count << (2 * bits - 2) >= EXACT_FLOAT32
    wide = g.cast(q, _WIDE) if is_double else q
    spread = g.node("Mul", _sum(g, g.node("Mul", wide, wide), dims, is_double), number)
    mean = None
    if is_centred:
        total = _sum(g, wide, dims, is_double)
        spread = g.node("Sub", spread, g.node("Mul", total, total))
        mean = g.node("Div", total, number)
    shifted = g.node("Add", spread, g.scalar(epsilon * square, _WIDE))
    root = g.node("Sqrt", g.node("Max", shifted, g.scalar(SMALLEST_VARIANCE * square, _WIDE)))
    factor = g.node("Div", g.scalar(gain * count, _WIDE), root)
    finish = _scale_and_shift if folds(site.rank, dims, weight, bias, bits) else _in_steps
    return _rounded(g, finish(g, q, factor, mean, weight, bias), low, high)


def _scale_and_shift(
    g: OnnxGraph, q: str, factor: str, mean: str | None, weight: Tensor | None, bias: Tensor | None
) -> str:
    if weight is not None:
        factor = g.node("Mul", factor, g.constant(weight, _WIDE, "weight"))
    scale = g.cast(factor, torch.float32)
    value = g.node("Mul", q, scale)
    if mean is not None:
        shift = g.node("Neg", g.node("Mul", mean, g.cast(scale, _WIDE)))
        if bias is not None:
            shift = g.node("Add", shift, g.constant(bias, _WIDE, "bias"))
        return g.node("Add", value, g.cast(shift, torch.float32))
    return value if bias is None else g.node("Add", value, g.constant(bias, hint="bias"))


def _in_steps(g: OnnxGraph, q: str, factor: str, mean: str | None, weight: Tensor | None, bias: Tensor | None) -> str:
    value = q if mean is None else g.node("Sub", q, g.cast(mean, torch.float32))
    value = g.node("Mul", value, g.cast(factor, torch.float32))
    if weight is not None:
        value = g.node("Mul", value, g.constant(weight, hint="weight"))
    return value if bias is None else g.node("Add", value, g.constant(bias, hint="bias"))


def _exponentials(g: OnnxGraph, q: str, dim: int, hidden: str | None, table: Tensor) -> tuple[str, str]:
    entries = g.table(table)
    if hidden is None:
        steps = g.node("Sub", g.axes("ReduceMax", q, [dim], True), q)
        return steps, g.node("Gather", entries, g.cast(steps, torch.int32), axis=0)
    shown = g.node("Where", hidden, g.scalar(LOWEST, torch.float32), q)
    zero = g.scalar(0.0, torch.float32)
    steps = g.node("Where", hidden, zero, g.node("Sub", g.axes("ReduceMax", shown, [dim], True), q))
    return steps, g.node("Where", hidden, zero, g.node("Gather", entries, g.cast(steps, torch.int32), axis=0))


def _total(g: OnnxGraph, entries: str, dim: int, is_double: bool) -> str:
    total = _sum(g, g.cast(entries, _WIDE) if is_double else entries, [dim], is_double)
    return g.node("Max", total, g.scalar(1.0, _WIDE))


@lowers("softmax", data="q hidden")
def softmax(
    g: OnnxGraph, site: Site, q: str, dim: int, hidden: str | None, table: Tensor, gain: float, is_double: bool,
    low: int, high: int,
) -> str:  # fmt: skip
    _, entries = _exponentials(g, q, dim, hidden, table)
    factor = g.node("Div", g.scalar(gain, _WIDE), _total(g, entries, dim, is_double))
    return _rounded(g, g.node("Mul", entries, g.cast(factor, torch.float32)), low, high)


@lowers("log_softmax")
def log_softmax(
    g: OnnxGraph, site: Site, q: str, dim: int, table: Tensor, logarithms: Tensor, factor: float, gain: float,
    is_double: bool, low: int, high: int,
) -> str:  # fmt: skip
    steps, entries = _exponentials(g, q, dim, None, table)
    logs = g.node(
        "Mul", _logarithm(g, _total(g, entries, dim, is_double), site.rank, logarithms), g.scalar(gain, _WIDE)
    )
    scaled = g.node("Mul", steps, g.scalar(factor, torch.float32))
    return _rounded(g, g.node("Sub", scaled, g.cast(logs, torch.float32)), low, high)


def _logarithm(g: OnnxGraph, total: str, rank: int, table: Tensor) -> str:
    octaves = torch.arange(OCTAVES + 1, dtype=_WIDE)
    bounds = torch.ldexp(torch.full_like(octaves[1:], table.numel()), octaves[1:])
    apart = g.node("Unsqueeze", total, g.constant([rank], torch.int64, "axes"))
    is_reached = g.node("GreaterOrEqual", apart, g.constant(bounds, hint="bounds"))
    octave = g.axes("ReduceSum", g.cast(is_reached, torch.int32), [rank], False)
    least = g.scalar(table.numel(), _WIDE)
    shrink = g.node("Gather", g.constant(torch.ldexp(torch.ones_like(octaves), -octaves)), octave, axis=0)
    mantissa = g.node("Floor", g.node("Mul", g.node("Max", total, least), shrink))
    entry = g.node("Gather", g.constant(table), g.cast(g.node("Sub", mantissa, least), torch.int32), axis=0)
    return g.node("Add", g.node("Mul", g.cast(octave, _WIDE), g.scalar(LOG_2, _WIDE)), entry)
