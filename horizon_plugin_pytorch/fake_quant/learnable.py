"""Scales that are trained with the weights: LSQ and PACT."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.compiled.passes import NO_LIMITS, is_plain, is_serial
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning, listed, require_module, warn
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.rounding import (
    grid_edges,
    in_pieces,
    inside,
    inside_rows,
    on_grid,
    round_to_grid,
    rows_outside,
)
from horizon_plugin_pytorch.fake_quant.route import is_written
from horizon_plugin_pytorch.statistics.cache import Cache
from horizon_plugin_pytorch.statistics.observer_base import is_asynchronous
from horizon_plugin_pytorch.statistics.processes import is_distributed
from horizon_plugin_pytorch.untraced import is_traced, untraced

_SMALLEST, _LARGEST = 2.0**-40, 2.0**40
_FAR_BELOW = 16
_AT_ONCE = 1 << 17  # values that stay in the cache of a core


class _Learned(torch.autograd.Function):
    """``clamp(round(x / s), low, high) * s`` with gradients for x (straight through) and for s.

    With ``y`` the result, the scale's gradient is ``sum(gy * d) / s``, where ``d`` is ``y`` for a value outside the
    range, and for one inside it ``y - x`` (LSQ) or 0 (PACT). The difference is taken before the sum: ``sum(gy * y)``
    and ``sum(gy * x)`` are nearly equal, and what float32 keeps of their difference is noise.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, step: Any, ends: tuple, edges: tuple | None, factor: float, is_clip: bool
    ) -> Tensor:
        y = on_grid(x, step, ends)
        ctx.save_for_backward(x, y, scale)
        ctx.step, ctx.ends, ctx.edges, ctx.factor, ctx.is_clip = step, ends, edges, factor, is_clip
        is_data = scale.numel() == 1 and not ctx.needs_input_grad[0] and not x.is_inference()
        ctx.rounded_data = RoundedData(x, scale, edges, factor, is_clip, x._version) if is_data else None
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        x, y, scale = ctx.saved_tensors
        if y.dtype in (torch.float16, torch.bfloat16):  # too coarse for the difference
            x, grad = x.float(), grad.float()
            y = on_grid(x, ctx.step, ctx.ends)
        if scale.numel() == 1 and not is_asynchronous(x) and not torch.is_grad_enabled():
            to_x, total = _in_pieces(grad, x, y, ctx.edges, ctx.is_clip)
            moved = torch.full(scale.shape, total, dtype=torch.float64)  # which may be too large for float32
        else:
            rows = rows_outside(grad, x, ctx.edges)
            to_x = inside(grad, x, ctx.edges) if rows is None else inside_rows(grad, x, ctx.edges, rows)
            moved = torch.zeros_like(scale) if ctx.is_clip else _sum(y, x, to_x, scale)
            if rows is not None and rows.numel():
                moved.index_add_(0, rows, _sum(grad[rows], to_x[rows], y[rows], scale[rows]))
            elif rows is None and ctx.edges is not None:
                moved = moved + _sum(grad, to_x, y, scale)
        return to_x, (moved / scale * ctx.factor).to(scale.dtype), None, None, None, None, None


@dataclass(frozen=True)
class RoundedData:
    """What a trained scale rounds where nothing before it is trained, such as the images of a model's input."""

    x: Tensor
    scale: Tensor
    edges: tuple | None
    factor: float
    is_clip: bool
    version: int


def rounded_data(y: Tensor) -> RoundedData | None:
    """What `y` was rounded from, if only a trained scale is waiting for its gradient."""
    node: Any = y.grad_fn
    while type(node).__name__ == "AliasBackward0":
        node = node.next_functions[0][0]
    data = getattr(node, "rounded_data", None)
    # Data that were written to since are autograd's to complain of.
    return None if data is None or data.x._version != data.version else data


class LayerOfData(torch.autograd.Function):
    """A layer on data that a trained scale has rounded: the scale's gradient comes by way of the weight.

    A layer is linear in its weight ``W`` as in its input: with ``d`` the derivative of the input by the scale and
    ``gx`` the input's gradient, ``sum(gx * d)`` is ``sum(W * gW)``, where ``gW`` is the gradient of a weight that had
    seen ``d``. For the few channels of an image that takes a fourth of the time of ``gx``, which nothing else needs.
    Hooks on the rounded data get None from this layer. Gradients that shall have gradients go by way of the input.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, x: Tensor, data: RoundedData,
        layer: Callable[..., Tensor], gradients: Callable[..., tuple],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(y, weight, scale, x)
        ctx.edges, ctx.factor, ctx.is_clip, ctx.gradients = data.edges, data.factor, data.is_clip, gradients
        return layer(y, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        saved_y, saved_weight, scale, saved_x = ctx.saved_tensors
        grad, y, weight, x = (t.float() for t in (grad, saved_y, saved_weight, saved_x))
        wanted = ctx.needs_input_grad[1:3]
        if torch.is_grad_enabled():
            return *ctx.gradients(grad, y, weight, (True, *wanted)), *[None] * 5
        _, to_weight, to_bias = ctx.gradients(grad, y, weight, (False, *wanted))
        slope = y - inside(y if ctx.is_clip else x, x, ctx.edges)
        moved = (ctx.gradients(grad, slope, weight, (False, True, False))[1] * weight).sum()
        to_scale = (moved / scale * ctx.factor).to(scale.dtype).reshape(scale.shape)
        return None, to_weight, to_bias, to_scale, *[None] * 4


def _in_pieces(grad: Tensor, x: Tensor, y: Tensor, edges: tuple | None, is_clip: bool) -> tuple[Tensor, float]:
    """The gradient of `x`, and the sum for one scale, piece by piece: what is made for a piece stays in the cache."""
    compiled = passes()
    if compiled is not None and is_serial(x) and all(map(is_plain, (grad, x, y))):
        return compiled.learned(grad, x, y, edges, is_clip)
    lower, upper = edges or NO_LIMITS
    if x.numel() <= _AT_ONCE and all(t.is_contiguous() for t in (grad, x, y)):
        to_x = grad if edges is None else torch.ops.aten.hardtanh_backward(grad, x, lower, upper)
        moved = torch.ops.aten.hardtanh_backward(y if is_clip else x, x, lower, upper)
        return to_x, torch.dot(grad.view(-1), torch.sub(y, moved, out=moved).view(-1)).item()
    order = sorted(range(x.dim()), key=x.stride, reverse=True)  # as the values lie in memory
    to_x = grad if edges is None else torch.empty([x.shape[d] for d in order], dtype=x.dtype)
    pieces = in_pieces(*(t.permute(order).reshape(-1) for t in (grad, x, y)))
    pieces.append(pieces[0] if edges is None else in_pieces(to_x.view(-1))[0])
    room = torch.empty_like(pieces[0][0])
    select = torch.ops.aten.hardtanh_backward.grad_input
    total = 0.0
    for g, v, r, to_v in zip(*pieces, strict=True):
        moved = room if g.numel() == room.numel() else room[: g.numel()]
        if edges is not None:
            select(g, v, lower, upper, grad_input=to_v)
        select(r if is_clip else v, v, lower, upper, grad_input=moved)
        total += torch.dot(g, torch.sub(r, moved, out=moved)).item()
    if edges is not None:
        to_x = to_x.permute([order.index(d) for d in range(x.dim())])
    return to_x, total


def _sum(a: Tensor, b: Tensor, factor: Tensor, scale: Tensor) -> Tensor:
    """``sum((a - b) * factor)`` for each scale; on a CPU for as many channels at once as stay in the cache."""
    if scale.numel() == 1:
        return torch.sub(a, b).mul_(factor).sum().reshape(scale.shape)
    axis = scale.shape.index(scale.numel())
    axes = [d for d in range(a.dim()) if d != axis]
    count = scale.numel()
    if not is_asynchronous(a):
        count = max(_AT_ONCE * count // max(a.numel(), 1), 1)
    if count >= scale.numel():
        return torch.sub(a, b).mul_(factor).sum(axes, keepdim=True)
    parts = zip(*(t.split(count, axis) for t in (a, b, factor)), strict=True)
    return torch.cat([torch.sub(p, q).mul_(f).sum(axes, keepdim=True) for p, q, f in parts], axis)


class LearnableFakeQuantize(FakeQuantize):
    """A fake quantizer whose scale is trained (LSQ).

    Calibration, or the first batch of training, gives the scale that training begins with. Whatever step an optimizer
    takes, the scale stays positive and finite: a step that would take it to zero or beyond halves it, and one that is
    not a number leaves it as it was.

    Args:
        observer: gives the scale to begin with.
        use_grad_scaling: divide the scale's gradient by the root of the number of values times the largest integer, so
            that scales learn at the pace of weights.

    Other arguments are those of `FakeQuantize`.

    >>> fq = LearnableFakeQuantize(use_grad_scaling=True)
    >>> fq(torch.tensor([-1.0, 0.3, 2.55], requires_grad=True)).dequantize().sum().backward()
    >>> fq.scale.grad.shape
    torch.Size([1])
    """

    _is_clip = False

    def __init__(self, *args: Any, use_grad_scaling: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_grad_scaling = use_grad_scaling
        scale = self._buffers.pop("scale")
        self.scale = nn.Parameter(scale, requires_grad=not self.is_fixed)  # type: ignore[assignment, arg-type]
        self._good = self.scale.detach().clone()
        self._checked = Cache()

    def observe(self, x: Tensor, limits: tuple[float, float] = NO_LIMITS) -> None:
        if self.is_quantizing and self.has_statistics:
            return  # once there is a scale, training has it
        observer = self.activation_post_process
        is_shared = observer.is_sync_quantize
        # Processes that train together share gradients, not parameters: they must begin with the same.
        is_first_step = self.is_quantizing and torch.is_grad_enabled() and is_distributed()
        observer.is_sync_quantize = is_shared or is_first_step
        try:
            super().observe(x, limits)
        finally:
            observer.is_sync_quantize = is_shared

    def round(self, x: Tensor, limits: tuple[float, float] = NO_LIMITS) -> Tensor:
        self._follow_optimizer()
        return self._learned(x, self.sound_scale(), limits, self.saturate)

    def round_weight(self, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is None:
            self._follow_optimizer()
            scale = self.sound_scale()
        return self._learned(weight, scale, NO_LIMITS, self.saturate and not self.covers(weight, scale))

    def _learned(self, x: Tensor, scale: Tensor, limits: tuple[float, float], saturate: bool) -> Tensor:
        if not scale.requires_grad or self.is_exact or is_traced() or is_written():  # scales stay as they are
            scale = scale.detach()
            return round_to_grid(x, scale, self.ch_axis, self.quant_min, self.quant_max, limits, saturate)
        step, ends, edges = grid_edges(
            x, scale.detach(), self.ch_axis, self.quant_min, self.quant_max, limits, saturate
        )
        factor = 1.0
        if self.use_grad_scaling:
            factor = 1 / math.sqrt(max(x.numel() // scale.numel(), 1) * self.quant_max)
        shaped = scale if scale.numel() == 1 else scale.reshape(step.shape)
        return _Learned.apply(x, shaped, step, ends, edges, factor, self._is_clip)

    def _follow_optimizer(self) -> None:
        """Look at the scale anew where writes to `data`, as some optimizers make, would not be noticed."""
        if torch.is_grad_enabled() and is_asynchronous(self.scale):  # on a CPU its numbers are compared
            self.forget_scale()

    def sound_scale(self) -> Tensor:
        """The scale, repaired if a step of the optimizer has left it negative, too small, or no number."""
        scale = self.scale
        if not self._checked.holds((scale,)):
            self._repair()
            self._checked.get((scale,), lambda: True)  # after the write, which would count as another change
        return scale

    @untraced
    def _repair(self) -> None:
        scale = self.scale.detach()  # shares its count of writes, unlike `data`
        if is_asynchronous(scale) or not _is_sound(scale):
            good = self._good.to(scale.device).expand_as(scale)
            repaired = torch.where(scale.isfinite(), torch.where(scale > 0, scale, good / 2), good)
            scale.copy_(repaired.clamp_(_SMALLEST, _LARGEST))
        self.__dict__["_good"] = scale.clone()

    def current_scale(self) -> Tensor:
        self.sound_scale()
        return super().current_scale()

    def enable_fake_quant(self, enabled: bool = True) -> None:
        super().enable_fake_quant(enabled)
        self._drop_gradient(enabled)

    def enable_observer(self, enabled: bool = True) -> None:
        super().enable_observer(enabled)
        self._drop_gradient(enabled)

    def _drop_gradient(self, is_trained: bool) -> None:
        """Without a gradient no optimizer moves the scale, not even by the momentum of earlier steps."""
        if not is_trained:
            self.scale.grad = None

    def set_state(self, state: FakeQuantState) -> None:
        super().set_state(state)
        self.sound_scale()  # the last step of an optimizer may have been too large

    @torch.no_grad()
    def _pull_range(self) -> None:
        if self.is_fixed or self.finest_scale or not self.has_statistics or self._follows_range:
            return
        observer = self.activation_post_process
        largest = self.sound_scale().detach() * observer.half_range
        before = torch.maximum(observer.min_val.neg(), observer.max_val)
        if before.shape == largest.shape and bool((before.isfinite() & (before > 0)).all()):
            observer.min_val, observer.max_val = (r * (largest / before) for r in (observer.min_val, observer.max_val))
        else:
            observer.min_val, observer.max_val = -largest, largest.clone()

    def forget_scale(self) -> None:
        super().forget_scale()
        self._checked.clear()

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        self.forget_scale()
        self.sound_scale()
        self._pull_range()  # it is the range of the trained scale that others are to go on from
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _resize(self, like: Tensor) -> None:
        self.scale.data = torch.ones_like(like, device=self.scale.device)  # an optimizer may hold the parameter
        self.zero_point = torch.zeros_like(self.scale, dtype=torch.long)


def _is_sound(scale: Tensor) -> bool:
    smallest, largest = torch.aminmax(scale)  # NaN, if any is
    return float(smallest) >= _SMALLEST and float(largest) <= _LARGEST


class PACTFakeQuantize(LearnableFakeQuantize):
    """A fake quantizer that trains where values are clipped (PACT): only clipped values move the scale."""

    _is_clip = True


def parameter_groups(model: nn.Module, lr: float, scale_lr: float = 1e-3, **options: Any) -> list[dict[str, Any]]:
    """Groups for an optimizer in which trained scales have rates of their own, relative to their sizes.

    Adam and its kin move every number by about the learning rate, however small it is. A scale of 0.01, let alone one
    of an int16 tensor, would be gone after a few steps of the weights' rate.

    The scales of a tensor's channels are one parameter, with one rate: that of the smallest. Channels with less than a
    sixteenth of the median scale do not count, as they would stop the others, and keep their scales: from here on their
    gradient is 0.

    Args:
        model: a prepared model that has been calibrated.
        lr: the rate of everything but scales.
        scale_lr: the share of a scale that a step of Adam may move, of every channel.
        options: for everything but scales, such as `weight_decay`; scales have no decay.

    >>> model = nn.Sequential(nn.Linear(2, 2), LearnableFakeQuantize())
    >>> model[1].set_qparams(0.01)
    >>> [(len(group["params"]), group["lr"]) for group in parameter_groups(model, lr=0.1)]
    [(2, 0.1), (1, 7.8125e-06)]
    """
    require_module(model, "parameter_groups")
    named = {n: m for n, m in model.named_modules() if isinstance(m, LearnableFakeQuantize) and m.scale.requires_grad}
    trained = list(named.values())
    sizes = [_smallest_scale(quantizer) for quantizer in trained if quantizer.has_statistics]
    unknown = [name for name, quantizer in named.items() if not quantizer.has_statistics]
    if trained and not sizes:
        raise CalibrationError(
            "parameter_groups: rates are relative to scales, and none is known yet; calibrate first."
        )
    if unknown:
        warn(
            f"parameter_groups: no data have reached {listed((f'`{name}`' for name in unknown), most=5)}: their "
            "scales are not known, and have the rate of the median of the others.",
            CalibrationWarning,
        )
    known = {id(quantizer.scale) for quantizer in trained}
    groups = [{"params": [p for p in model.parameters() if id(p) not in known], "lr": lr, **options}]
    by_size: dict[float, list[Tensor]] = {}
    for quantizer in trained:
        size = _smallest_scale(quantizer) if quantizer.has_statistics else median(sizes)
        by_size.setdefault(2.0 ** math.floor(math.log2(size)), []).append(quantizer.scale)
    return groups + [
        {"params": alike, "lr": scale_lr * size, "weight_decay": 0.0} for size, alike in sorted(by_size.items())
    ]


def _smallest_scale(quantizer: LearnableFakeQuantize) -> float:
    """The smallest scale of a tensor's channels; those that are far below the others stay, and do not count."""
    scale = quantizer.sound_scale().detach()
    observer = quantizer.activation_post_process
    is_used = torch.ones_like(scale, dtype=torch.bool)
    if observer.max_val.shape == scale.shape:
        is_used = (observer.min_val != 0) | (observer.max_val != 0)  # a channel of zeros has no size yet
    if not bool(is_used.any()):
        return float(scale.min())
    rests = is_used & (scale < scale[is_used].median() / _FAR_BELOW)
    if bool(rests.any()):
        quantizer.scale.register_hook(lambda grad: grad.masked_fill(rests.to(grad.device), 0))
    return float(scale[is_used & ~rests].min())


_LearnableFakeQuantize = LearnableFakeQuantize

show_at(
    "quantization.learnable_fake_quantize",
    RoundedData,
    rounded_data,
    LayerOfData,
    LearnableFakeQuantize,
    PACTFakeQuantize,
    parameter_groups,
)
