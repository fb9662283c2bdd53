"""Operators that keep the scale of their input: what they need of it, and how they run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch import sharing
from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.function_handlers import calling_line, described, name_of
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.torch_functions import SHAPED_LIKE, STAYING, plain_tensors
from horizon_plugin_pytorch.untraced import is_recorded

_WARNED: set[tuple] = set()
# What only shows a tensor otherwise, or copies it where its memory does not allow that: the same on bytes.
_VIEWS = frozenset(
    getattr(owner, name)
    for name in (
        "reshape flatten unflatten ravel view permute transpose swapaxes swapdims movedim moveaxis t squeeze unsqueeze "
        "select narrow unbind chunk split split_with_sizes tensor_split contiguous __getitem__"
    ).split()
    for owner in (torch, Tensor)
    if hasattr(owner, name)
)


def warn_beyond(func: Callable, x: QTensor, value: float) -> None:
    """Say, once for each line and number, that a number lies beyond the grid which the result inherits."""
    where = (described(func), value)
    if where in _WARNED:
        return
    _WARNED.add(where)
    warnings.warn(
        f"{described(func)}: {value:g} lies beyond the range of its input, whose scale is {float(x._scale):.4g}, and "
        "becomes the end of that range: the operator keeps the scale of its input. Give the input a scale that covers "
        "it (a QuantStub or qconfig with a fixed scale), or choose with `torch.where(mask, x, value)`, which has a "
        "scale of its own.",
        QuantizationWarning,
        stacklevel=3,
    )


def only_qtensor(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    """The QTensor that a function works on: its first argument, with one scale."""
    x = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if isinstance(x, QTensor):
        x._require_unchanged()
    else:
        raise NotImplementedError(
            f"{described(func)} works on an ordinary tensor, and another argument is a QTensor. Put a DeQuantStub "
            "before that one (for a mask or an index, before what it is made of), or a QuantStub before the first."
        )
    if x._axis >= 0 and x._scale.numel() > 1 and func not in STAYING:
        raise NotImplementedError(
            f"{described(func)} is not implemented for a per-channel QTensor (axis {x._axis}); "
            "quantize activations with one scale."
        )
    return x


def keep_scale(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run an operator that only moves or selects values: they keep the input's scale, positions are plain tensors."""
    is_shaped = getattr(func, "__name__", "") in SHAPED_LIKE
    if is_shaped and not isinstance(args[0], QTensor):  # an ordinary tensor takes after a QTensor
        with plain_tensors():
            return func(*args, **kwargs)
    x = only_qtensor(func, args, kwargs)
    others = (v for v in (*args, *kwargs.values()) if isinstance(v, QTensor) and v is not x)
    if not is_shaped and next(others, None) is not None:
        raise NotImplementedError(
            f"`{name_of(func)}`{calling_line()} is not implemented for two QTensors, which may have different scales; "
            "use the method of FloatFunctional that has this name, or `prepare_qat_fx`, which does."
        )

    places = None  # of the results, in what lies as the input does in float
    if func in _VIEWS and not is_recorded():
        laid = sharing.laid(x)
        places = None if laid is None else _view_of(laid, func, x, args, kwargs)
        if places is not None and places is laid:
            return _itself(func, x)
        values = x.as_bytes() if x.has_bytes else None
        if values is not None and places is not None:
            shown = places if values is laid else _view_of(values, func, x, args, kwargs)
            if shown is not None:
                return _each(x.with_bytes, shown, places)

    def run(has_grid: bool) -> Any:
        def payload(v: Any) -> Any:
            if not isinstance(v, QTensor):
                return v
            return v._grid if has_grid and v._grid is not None else v.plain()

        given = {id(v): payload(v) for v in (*args, *kwargs.values())}
        out = func(*(given[id(v)] for v in args), **{k: given[id(v)] for k, v in kwargs.items()})
        return x if out is given[id(x)] else out

    grid: Any = None if x._grid is None else run(True)
    out = grid if x._is_deferred else run(False)
    if out is x:
        out = _itself(func, x)
        return out if places is None or out is x else out.lying_as(places)
    parts = _each(lambda part, its_grid: _with_scale_of(x, part, its_grid), out, grid)
    return parts if places is None else _each(QTensor.lying_as, parts, places)


def _view_of(shown: Tensor, func: Callable, x: QTensor, args: tuple, kwargs: dict) -> Any:
    """What a function gives of an ordinary tensor instead of `x`; None if it is to be asked for float32 numbers."""
    given, named = [shown if v is x else v for v in args], {k: shown if v is x else v for k, v in kwargs.items()}
    if any(
        isinstance(v, (torch.dtype, torch.memory_format, Tensor)) for v in (*given, *named.values()) if v is not shown
    ):
        return None
    try:
        return func(*given, **named)
    except RuntimeError:  # `view` of what lies otherwise
        return None


def _each(make: Callable[[Any, Any], Tensor], out: Any, others: Any) -> Any:
    """One result, or several in the container that torch gave them in: a list, a tuple, or one with names."""
    if isinstance(out, Tensor):
        return make(out, others)
    parts = [make(*pair) for pair in zip(out, [None] * len(out) if others is None else others, strict=True)]
    if isinstance(out, list):
        return parts
    return type(out)(parts) if hasattr(out, "n_fields") else tuple(parts)


def _itself(func: Callable, x: QTensor) -> QTensor:
    """What a function gives that has nothing to do here.

    `x.contiguous()` may be a copy in float, whose memory is laid out otherwise: who reads one of them after a write to
    the other is refused.
    """
    return x.alias() if func is Tensor.contiguous and not is_recorded() else x


def _with_scale_of(x: QTensor, out: Tensor, grid: Tensor | None) -> Tensor:
    if not (out.is_floating_point() or (x._format == qbool and out.dtype == torch.bool)):
        return out
    if x._is_deferred:
        assert grid is not None
        return x.with_grid(grid)
    return x.like(out, grid)
