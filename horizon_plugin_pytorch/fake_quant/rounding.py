"""Putting values on a grid of integers, with the gradient that training takes for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.compiled.passes import NO_LIMITS, is_plain, is_serial
from horizon_plugin_pytorch.fake_quant.route import is_written
from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.statistics.ends import ends_of_rows
from horizon_plugin_pytorch.statistics.observer_base import is_asynchronous
from horizon_plugin_pytorch.untraced import applied, is_traced, untraced

_AT_ONCE = 1 << 17  # values that stay in the cache from one of several passes to the next
_WORTH_A_LOOK = 1 << 16  # so many values take longer to mask than to look for the rows that need it


def on_grid(x: Tensor, step: Any, ends: tuple[Any, Any]) -> Tensor:
    """The nearest multiples of the step, between the outermost ones."""
    if type(step) is float and is_plain(x) and is_serial(x):
        compiled = passes()
        if compiled is not None:
            return compiled.round(x, step, *ends)
        if x.numel() >= 2 * _AT_ONCE and not (x.requires_grad and torch.is_grad_enabled()):
            out = torch.empty_like(x)
            for part, into in zip(*in_pieces(x.view(-1), out.view(-1)), strict=True):
                torch.div(part, step, out=into).round_().clamp_(*ends).mul_(step)
            return out
    elif type(step) is Tensor and _is_for_rows(step, x) and (compiled := passes()) is not None:
        return compiled.round_rows(x, step, *ends)
    return torch.div(x, step).round_().clamp_(*ends).mul_(step)


def in_pieces(*flat: Tensor) -> list[Sequence[Tensor]]:
    """Tensors of one axis and one length, each as pieces that stay in the cache.

    All but the last have the same length, a power of two: pieces that do not begin at the start of a cache line take
    longer. `Tensor.split` would give the same by way of Python, in about twice the time.
    """
    whole, rest = divmod(flat[0].numel(), _AT_ONCE)
    sizes = [_AT_ONCE] * whole + [rest] * (rest > 0)
    return [t.split_with_sizes(sizes) for t in flat]


def _is_for_rows(step: Tensor, x: Tensor) -> bool:
    """Is there a step for each place on the first axis, and can a pass take them?"""
    is_row = x.dim() > 1 and step.dim() == x.dim() and 1 < step.numel() == step.shape[0] == x.shape[0]
    return is_row and is_plain(x) and is_plain(step) and is_serial(x)


@operator("fake_quantize(Tensor x, Tensor scale, int axis, float low, float high) -> Tensor")
def fake_quantize(x: Tensor, scale: Tensor, axis: int, low: float, high: float) -> Tensor:
    """``clamp(round(x / scale), low, high) * scale``: a rounding of the training route, where that is written down.

    Args:
        scale: one number, or one for each channel.
        axis: of the channels; -1 with one scale.
    """
    if scale.numel() == 1:
        return on_grid(x, scale.reshape(()), (low, high))
    shape = [1] * x.dim()
    shape[axis] = -1
    return on_grid(x, scale.reshape(shape), (low, high))


def inside(values: Tensor, x: Tensor, edges: tuple[Any, Any] | None) -> Tensor:
    """The values where `x` lies in the open interval, else 0."""
    if edges is None:
        return values
    lower, upper = edges
    if isinstance(lower, float) and isinstance(upper, float):
        return torch.ops.aten.hardtanh_backward(values, x, lower, upper)
    rows = rows_outside(values, x, edges)
    return torch.where((x > lower) & (x < upper), values, 0.0) if rows is None else inside_rows(values, x, edges, rows)


def rows_outside(values: Tensor, x: Tensor, edges: tuple[Any, Any] | None) -> Tensor | None:
    """The rows of `x` that do not lie in their open intervals as a whole; None if these are most, or not known.

    Weights that training lets grow leave their range in a few rows, and masks for all of them take many times longer
    than to look for these.
    """
    lower, upper = edges or NO_LIMITS
    if not isinstance(lower, Tensor) or not isinstance(upper, Tensor) or torch.is_grad_enabled():
        return None
    if x.numel() < _WORTH_A_LOOK or values.shape != x.shape:
        return None
    if not (_is_for_rows(lower, x) and _is_for_rows(upper, x) and is_plain(values)):
        return None
    smallest, largest = ends_of_rows(x.detach().flatten(1))
    is_inside = (smallest > lower.view(-1)) & (largest < upper.view(-1))  # False where there is NaN
    rows = is_inside.logical_not_().nonzero().view(-1)
    return rows if 2 * rows.numel() <= x.shape[0] else None


def inside_rows(values: Tensor, x: Tensor, edges: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
    """`inside`, where only these rows need it."""
    if not rows.numel():
        return values
    lower, upper, part = edges[0][rows], edges[1][rows], x[rows]
    kept = torch.where((part > lower) & (part < upper), values[rows], 0.0)
    return values.clone().index_copy_(0, rows, kept)


class Rounded(torch.autograd.Function):
    """``clamp(round(x / s), low, high) * s`` with a straight-through gradient inside the open interval `edges`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Any, ends: tuple[Any, Any], edges: tuple[Any, Any] | None) -> Tensor:
        ctx.edges = edges
        if edges is not None:
            ctx.save_for_backward(x)
        return on_grid(x, step, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        if ctx.edges is None:
            return grad, None, None, None
        (x,) = ctx.saved_tensors
        return inside(grad, x, ctx.edges), None, None, None


@untraced
def grid_edges(
    x: Tensor,
    scale: Tensor,
    ch_axis: int,
    low: int,
    high: int,
    limits: tuple[float, float] = NO_LIMITS,
    saturate: bool = True,
) -> tuple[Any, tuple[Any, Any], tuple[Any, Any] | None]:
    """The step as `x` can be divided by it, the outermost integers, and the open interval that passes gradients."""
    step: Any
    if scale.numel() > 1:
        shape = [1] * x.dim()
        shape[ch_axis] = -1
        step = scale.reshape(shape)
    else:
        step = scale if is_asynchronous(x) else float(scale)
    lower: Any = -math.inf
    upper: Any = math.inf
    ends: tuple[Any, Any] = (low, high)
    if saturate:
        # The value that set the scale lies at 127.5 steps and rounds to the last integer: it must keep its gradient,
        # so the open interval that passes gradients ends a little beyond the outermost integers.
        lower, upper = (low - 0.5) * step, (high + 1) * step
    if limits != NO_LIMITS:
        lower = _tighter(lower, limits[0], max)
        upper = _tighter(upper, limits[1], min)
        ends = (_limits_later if is_asynchronous(x) else integer_limits)(scale, low, high, limits)
    has_edges = saturate or limits != NO_LIMITS
    return step, ends, (lower, upper) if has_edges else None


def round_to_grid(
    x: Tensor,
    scale: Tensor,
    ch_axis: int,
    low: int,
    high: int,
    limits: tuple[float, float] = NO_LIMITS,
    saturate: bool = True,
) -> Tensor:
    """``clamp(round(x / scale), low, high) * scale`` with a straight-through gradient.

    Args:
        limits: real range of a fused activation; outside it there is no gradient.
        saturate: give no gradient outside the integers' range either.
    """
    if is_written():
        ends = integer_limits(scale, low, high, limits)
        return fake_quantize(x, scale.detach(), ch_axis if scale.numel() > 1 else -1, *map(float, ends))
    step, ends, edges = grid_edges(x, scale, ch_axis, low, high, limits, saturate)
    return applied(Rounded, x, step, ends, edges)


def clamped(x: Tensor, limits: tuple[float, float], owned: bool) -> Tensor:
    """The values inside the limits, in the memory of `x` if it is ours and no gradient needs it."""
    return x.clamp_(*limits) if owned and not x.requires_grad and not is_traced() else x.clamp(*limits)


def clamped_ends(x: Tensor, limits: tuple[float, float]) -> tuple[float, float] | None:
    """Clamp the values in their place by a compiled pass; the smallest and the largest one of before, all finite.

    None if there is no such pass, or if it found NaN or infinity: these are still there.
    """
    compiled = passes()
    if compiled is None or x.requires_grad or not is_plain(x) or not is_serial(x):
        return None
    return compiled.clamp_(x, *limits)


def _tighter(edge: Any, limit: float, choose: Any) -> Any:
    if not math.isfinite(limit):
        return edge
    if isinstance(edge, Tensor):
        return edge.clamp(min=limit) if choose is max else edge.clamp(max=limit)
    return float(choose(edge, limit))


@untraced
def integer_limits(scale: float | Tensor, low: int, high: int, limits: tuple[float, float]) -> tuple[int, int]:
    """The integers that an activation with real limits (ReLU6: 0 and 6) can take.

    >>> integer_limits(0.1, -128, 127, (0.0, 6.0))
    (0, 60)
    """
    step = float(scale) if not isinstance(scale, Tensor) or scale.numel() == 1 else float(scale.max())
    if not 0 < step < math.inf:  # there are no integers; while training the values show it
        return low, high
    if math.isfinite(limits[0]):
        low = max(low, round(limits[0] / step))
    if math.isfinite(limits[1]):
        high = min(high, round(limits[1] / step))
    return low, max(low, high)


def _limits_later(scale: Tensor, low: int, high: int, limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """`integer_limits` as tensors, without waiting for the device."""
    step = scale.detach().amax().double()
    lower = (limits[0] / step).round_().clamp_(low, high)
    upper = (limits[1] / step).round_().clamp_(low, high)
    return lower.to(scale.dtype), torch.maximum(lower, upper).to(scale.dtype)
