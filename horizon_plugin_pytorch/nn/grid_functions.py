"""Functions of one variable that stay on the grid of their input: abs, neg, clamp and hardtanh.

Their results are integers of the input's scale, up to the one integer that has no counterpart: -(-128) is 127. So they
need no module and no scale of their own, and a `QTensor` runs them also in eager mode.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.fake_quant.rounding import round_to_grid
from horizon_plugin_pytorch.function_handlers import handle
from horizon_plugin_pytorch.nn.qat.module import attach_gradient
from horizon_plugin_pytorch.operators.scale_keeping import only_qtensor, warn_beyond
from horizon_plugin_pytorch.operators.support import FROM_BAYES
from horizon_plugin_pytorch.operators.table import Call, Operator, ScaleRule, register
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.untraced import as_number, untraced

Map = Callable[[Tensor], Tensor]


def _on_grid(x: QTensor, steps: Map, values: Map, low: int, high: int) -> QTensor:
    """Apply a function in its two forms: on integers, exactly, and on real values, with a gradient.

    Args:
        low, high: the range that the integers of the result can take.
    """
    if x.is_integer:
        out = x.like(steps(x.plain()))
    elif x.grid is None:
        out = x.like(values(x.plain()))
    else:
        grid = steps(x.grid)
        out = x.with_grid(grid)
        if torch.is_grad_enabled() and x.requires_grad:
            out = x.like(attach_gradient(values(x.plain()), out.plain()), grid)
    out.set_range(max(low, x.dtype.min), min(high, x.dtype.max))
    return out


def _abs(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    x = only_qtensor(func, args, kwargs)
    low, high = x.range
    return _on_grid(x, lambda q: q.abs().clamp_(max=x.dtype.max), torch.abs, 0, max(-low, high))


def _neg(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    x = only_qtensor(func, args, kwargs)
    low, high = x.range
    return _on_grid(x, lambda q: torch.rsub(q, 0).clamp_(max=x.dtype.max), torch.neg, -high, -low)


def _as_it_is(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    """Integers are never NaN or infinite."""
    return only_qtensor(func, args, kwargs)


def _clamp(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    call = dict(zip(("input", "min", "max"), args, strict=False)) | kwargs
    return _limited(func, only_qtensor(func, (call["input"],), {}), call.get("min"), call.get("max"))


def _clamp_max(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    call = dict(zip(("input", "max"), args, strict=False)) | kwargs
    return _limited(func, only_qtensor(func, (call["input"],), {}), None, call["max"])


def _hardtanh(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    call = dict(zip(("input", "min_val", "max_val"), args, strict=False)) | kwargs
    return _limited(func, only_qtensor(func, (call["input"],), {}), call.get("min_val", -1.0), call.get("max_val", 1.0))


def _limited(func: Callable, x: QTensor, low: Any, high: Any) -> QTensor:
    """``min(max(x, low), high)``; limits are numbers, tensors or None, and are first put on the grid."""
    for limit, sign in ((low, 1), (high, -1)):
        is_number = limit is not None and not isinstance(limit, Tensor) and math.isfinite(limit)
        if is_number and x.is_rounded and sign * limit > as_number(x.scale) * (x.dtype.max + 2):
            warn_beyond(func, x, limit)  # a limit that leaves the range on its other side changes nothing
    low_steps, high_steps = (_steps(x, limit) for limit in (low, high))

    def steps(q: Tensor) -> Tensor:
        for limit, select in ((low_steps, torch.maximum), (high_steps, torch.minimum)):
            if isinstance(limit, Tensor):
                q = select(q, limit)
        numbers = [None if isinstance(limit, Tensor) else limit for limit in (low_steps, high_steps)]
        return q if numbers == [None, None] else q.clamp(*numbers)

    def values(v: Tensor) -> Tensor:
        if low is not None:
            v = v.clamp(min=_value(x, low, low_steps))
        return v if high is None else v.clamp(max=_value(x, high, high_steps))

    if isinstance(low_steps, Tensor) or isinstance(high_steps, Tensor):
        return _on_grid(x, steps, values, x.dtype.min, x.dtype.max)
    return _on_grid(x, steps, values, *_range(x, low_steps, high_steps))


@untraced
def _range(x: QTensor, low: int | None, high: int | None) -> tuple[int, int]:
    """The smallest and largest integer between limits."""
    bounds = torch.tensor(x.range).clamp(low, high) if (low, high) != (None, None) else x.range
    return int(bounds[0]), int(bounds[1])


def _steps(x: QTensor, limit: Any) -> Any:
    """A limit in steps of the grid: a number, or integers in a tensor."""
    if limit is None:
        return None
    smallest, largest = x.dtype.min, x.dtype.max
    if isinstance(limit, QTensor):
        if limit.dtype == x.dtype and torch.equal(limit.scale, x.scale):
            return limit.as_grid()
        ratio = limit.scale.detach().double() / x.scale.detach().double()
        factor = fp.choose_factor(ratio, smallest, largest, float(-limit.dtype.min))
        return fp.requantize(limit.as_grid(), factor, -1, smallest, largest)
    if isinstance(limit, Tensor):
        return fp.quantize(limit.detach().float(), x.scale, -1, smallest, largest)
    return max(smallest, min(largest, round(min(max(limit / as_number(x.scale), smallest), largest))))


def _value(x: QTensor, limit: Any, steps: Any) -> Any:
    """A limit in real numbers, on the grid if the values are; a tensor keeps its gradient."""
    if isinstance(limit, Tensor):
        real = limit.as_real() if isinstance(limit, QTensor) else limit
        return round_to_grid(real, x.scale, -1, x.dtype.min, x.dtype.max, saturate=False) if x.is_rounded else real
    return steps * as_number(x.scale) if x.is_rounded else limit


def _leave(*args: Any, **kwargs: Any) -> Call | None:
    """Nothing to replace."""
    return None


def _register(name: str, handlers: dict[str, Callable], modules: tuple[type, ...] = ()) -> None:
    """A row, from names of torch and of tensors and what a `QTensor` does with each; also in place."""
    functions: set[Callable] = set()
    methods: set[str] = set()
    for names, handler in handlers.items():
        spelled = [n + end for n in names.split() for end in ("", "_")]
        found = {f for owner in (torch, F, operator) for n in spelled if callable(f := getattr(owner, n, None))}
        own = {n for n in spelled if hasattr(Tensor, n)}
        handle(*found, *(getattr(Tensor, n) for n in own), keeps=True)(handler)
        functions |= found
        methods |= own
    register(
        Operator(
            name,
            ScaleRule.INHERIT,
            modules=modules,
            functions=dict.fromkeys(functions, _leave),
            methods=dict.fromkeys(methods, _leave),
            marches=FROM_BAYES,
        )
    )


_register("abs", {"abs absolute": _abs})
_register("neg", {"neg negative": _neg})
_register("clamp", {"clamp clip clamp_min": _clamp, "clamp_max": _clamp_max})
_register("hardtanh", {"hardtanh": _hardtanh}, (nn.Hardtanh,))
_register("nan_to_num", {"nan_to_num": _as_it_is})
