"""Operators that only move or select values: they keep the scale of their input and need no module of ours.

This is the one declaration of them: each `_Row` says how an operator is spelled, what a `QTensor` does with it, what it
gives, and what each chip takes. From it come the rows of the operator table and the handlers of `QTensor`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.fake_quant.route import is_written
from horizon_plugin_pytorch.function_handlers import described, handle
from horizon_plugin_pytorch.operators import casts as casts  # it registers handlers
from horizon_plugin_pytorch.operators.arguments import arguments_by_name
from horizon_plugin_pytorch.operators.max_pool import max_pool2d, max_pool_bytes, trained_max_pool2d
from horizon_plugin_pytorch.operators.scale_keeping import keep_scale, only_qtensor, warn_beyond
from horizon_plugin_pytorch.operators.support import (
    EVERYWHERE,
    FROM_BAYES,
    INT8,
    WIDE,
    Limit,
    Marches,
    Support,
    Use,
    at_most,
    between,
    on,
)
from horizon_plugin_pytorch.operators.table import Call, Kind, Operator, ScaleRule, Trait, advise, is_pair, register
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.torch_functions import REAL, pad_circular
from horizon_plugin_pytorch.untraced import is_recorded

Handler = Callable[[Callable, tuple, dict], Any]
_VALUES = (Kind.QUANTIZED,)
_VALUES_AND_POSITIONS = (Kind.QUANTIZED, Kind.INDEX)
_POSITIONS = (Kind.INDEX,)


@dataclass(frozen=True)
class _Row:
    """One declaration.

    Args:
        names: functions of torch and `torch.nn.functional`, and tensor methods, that have these names.
        handler: what a QTensor does; None where `QTensor` knows by itself.
        marches, modules, results, takes, signature: as in `Operator`.
        others: functions that have the name of something else in `torch`.
    """

    names: str
    handler: Handler | None = keep_scale
    marches: Marches = field(default_factory=lambda: EVERYWHERE)
    modules: tuple[type, ...] = ()
    results: tuple[Kind, ...] = _VALUES
    takes: Callable[..., bool] | None = None
    others: tuple[Callable, ...] = ()
    signature: str = ""
    traits: Trait = Trait.NONE


def _with_zero(x: Any) -> Any:
    """The operator may have added zeros."""
    if not isinstance(x, QTensor):  # `torch.zeros_like(x, dtype=torch.bool)`
        return x
    low, high = x.range
    x.set_range(min(low, 0), max(high, 0))
    return x


# What `empty_like` gives is written before it is read, and until then is in nobody's range: zeros are on every grid.
_ZEROS_FOR: dict[Callable, Callable] = {torch.empty_like: torch.zeros_like, Tensor.new_empty: Tensor.new_zeros}


def _keep_with_zeros(func: Callable, args: tuple, kwargs: dict) -> Any:
    if kwargs.get("dtype") in REAL:  # they are integers of the same scale all the same
        kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}
    return _with_zero(keep_scale(_ZEROS_FOR.get(func, func), args, kwargs))


def _without_writing(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``x.squeeze_()`` as ``x.squeeze()``; the result is written to `x` afterwards."""
    return _with_zero(keep_scale(getattr(Tensor, func.__name__.removesuffix("_")), args, kwargs))


_PAD = arguments_by_name("input, pad, mode='constant', value=None")


def _pad(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    """Padding with a constant puts that constant on the grid first."""
    call = _PAD(*args, **kwargs)
    x = only_qtensor(func, (call["input"],), {})
    padding, mode, value = call["pad"], call["mode"], call["value"]
    if mode == "circular":
        return pad_circular(x, padding)
    if not value or not x.is_rounded:  # zero is on every grid; while calibrating there is none
        return _keep_with_zeros(F.pad, (x, padding, mode, value), {})
    if math.isnan(value):
        raise NotImplementedError(f"{described(func)} with NaN: no integer stands for it; pad with a number.")
    rounded = torch.round(torch.as_tensor(float(value), device=x.device) / x.scale.detach())
    if math.isfinite(value) and not x.dtype.min - 1 <= float(rounded) <= x.dtype.max + 1:
        warn_beyond(func, x, value)
    steps = float(rounded.clamp(x.dtype.min, x.dtype.max))
    real = F.pad(x.plain(), padding, mode, steps if x.is_integer else steps * float(x.scale))
    known = None if x.is_integer else x.grid
    out = x.like(real, None if known is None else F.pad(known, padding, mode, steps))
    out.set_range(min(x.range[0], int(steps)), max(x.range[1], int(steps)))
    return out


def _relu(func: Callable, args: tuple, kwargs: dict) -> Any:
    return keep_scale(torch.relu, args[:1] or (kwargs["input"],), {})


def _pooled_bytes(x: QTensor, args: tuple, kwargs: dict) -> QTensor | None:
    """Max pooling of integers that are here as bytes, if there is a way on bytes."""
    if not x.has_bytes:
        return None
    call = _POOLING(*args, **kwargs)
    del call["input"]
    out = max_pool_bytes(x.as_bytes(), **call)
    return None if out is None else x.with_bytes(out)


def _max_pool(func: Callable, args: tuple, kwargs: dict) -> Any:
    x = args[0] if args else kwargs["input"]
    is_in_file = x.is_integer or is_written()  # the file has torch's operator
    is_trained = torch.is_grad_enabled() and x.requires_grad
    if isinstance(x, QTensor) and not is_recorded() and (pooled := _pooled_bytes(x, args, kwargs)) is not None:
        return pooled
    pooled = keep_scale(func if is_in_file else trained_max_pool2d if is_trained else max_pool2d, args, kwargs)
    if not is_recorded() and _pair(_POOLING(*args, **kwargs)["dilation"]) != (1, 1):
        _require_pixels(func, x, pooled[0] if isinstance(pooled, tuple) else pooled)
    return pooled


def _require_pixels(func: Callable, x: QTensor, pooled: QTensor) -> None:
    """Refuse windows that step over the whole image."""
    if bool((pooled.plain() == -math.inf).any()):
        raise OperatorInputError(
            f"{described(func)} has windows that read nothing but padding, where float gives -inf, for which no "
            f"integer stands: on an image of {tuple(x.shape[-2:])} pixels its dilation steps over all of them. Use "
            "less dilation or padding, or a larger image."
        )


_FOLD = arguments_by_name("input, output_size, kernel_size, dilation=1, padding=0, stride=1")
_OVERLAP = (
    "it adds overlapping windows (windows that lie side by side, with a stride of the kernel's size, are only moved); "
    "write it as a `ConvTranspose2d` with a fixed kernel of ones and zeros, or move it after the DeQuantStub"
)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _lies_side_by_side(*args: Any, **kwargs: Any) -> bool:
    call = _FOLD(*args, **kwargs)
    return _pair(call["stride"]) == _pair(call["kernel_size"]) and _pair(call["dilation"]) == (1, 1)


def _fold(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``F.fold`` of windows side by side: they are put where they belong, and none is added to another."""
    if not _lies_side_by_side(*args, **kwargs):
        raise NotImplementedError(f"{described(func)}: {_OVERLAP}.")
    call = _FOLD(*args, **kwargs)
    (height, width), (rows, columns) = _pair(call["output_size"]), _pair(call["kernel_size"])
    top, left = _pair(call["padding"])
    down, across = (height + 2 * top) // rows, (width + 2 * left) // columns
    x = call["input"]
    parts = x.reshape(-1, x.shape[-2] // (rows * columns), rows, columns, down, across).permute(0, 1, 4, 2, 5, 3)
    whole = parts.reshape(*x.shape[:-2], parts.shape[1], down * rows, across * columns)
    inner = whole[..., top : top + height, left : left + width]
    return F.pad(inner, (0, width - inner.shape[-1], 0, height - inner.shape[-2]))  # what no window covers is zero


_DROPOUT = arguments_by_name("input, p=0.5, training=True, inplace=False")
_ALPHA_DROPOUT = arguments_by_name("input, p=0.5, training=False, inplace=False")


def _dropout(func: Callable, args: tuple, kwargs: dict, read: Any = _DROPOUT) -> QTensor:
    """Dropout trains on real values; once training is over it is not there."""
    call = read(*args, **kwargs)
    x = only_qtensor(func, (call["input"],), {})
    if not call["training"] or x.is_integer:
        return x
    return x.unrounded(func(x.plain(), call["p"], True))  # what is left was divided by 1 - p


def _alpha_dropout(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    return _dropout(func, args, kwargs, _ALPHA_DROPOUT)


def _getitem(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Positions may be computed by the model; a mask that is computed from quantized values would give any length."""
    x, index = args
    if not isinstance(x, QTensor):
        return keep_scale(func, args, kwargs)
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, QTensor):
            raise NotImplementedError(
                "indexing by a quantized mask gives as many values as the mask has ones, which no chip can plan for. "
                "Keep the shape: `torch.where(mask, x, y)`, `x.masked_fill(~mask, value)` or `x * mask`."
            )
        part = torch.tensor(part, device=x.device) if isinstance(part, list) else part
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool
        parts += part.nonzero(as_tuple=True) if is_mask else (part,)  # type: ignore[union-attr] # positions instead
    x, parts = _with_axes(x, parts)
    return keep_scale(func, (x, tuple(parts)), kwargs)


def _with_axes(x: QTensor, parts: list[Any]) -> tuple[QTensor, list[Any]]:
    """Select by computed positions without an axis (``x[:, i]``) first: torch would read them as numbers, which no
    graph shows.
    """
    parts = list(parts)
    for place, part in enumerate(parts):
        is_position = isinstance(part, Tensor) and part.dim() == 0 and not part.is_floating_point()
        if not is_position:
            continue
        has_ellipsis = any(other is Ellipsis for other in parts[:place])
        around = parts[place + 1 :] if has_ellipsis else parts[:place]
        count = sum(other is not None for other in around)
        axis = x.dim() - 1 - count if has_ellipsis else count
        x = keep_scale(torch.index_select, (x, axis, part.reshape(1) % x.shape[axis]), {})
        parts[place] = 0
    return x, parts


_POOLING = arguments_by_name(
    "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False"
)
_TOPK = arguments_by_name("input, k, dim=-1, largest=True, sorted=True")


def _select(x: QTensor, values: Tensor, dim: int, positions: Tensor) -> QTensor:
    """The chosen values of a tensor; `values` are their integers."""
    if x.is_integer:
        return x.like(values)
    if x.is_deferred:
        return x.with_grid(values)
    return x.like(torch.gather(x.plain(), dim, positions), None if x.grid is None else values)


def _topk(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Of equal values the one with the lowest position comes first: `torch.topk` does not promise any order."""
    call = _TOPK(*args, **kwargs)
    x, dim = only_qtensor(func, (call["input"],), {}), call["dim"]
    if not x.is_rounded:
        return keep_scale(torch.topk, (x, call["k"], dim, call["largest"], True), {})
    values, positions = fp.topk(x.as_grid(), call["k"], dim, call["largest"])
    return torch.return_types.topk((_select(x, values, dim, positions), positions))


_KTH = arguments_by_name("input, k, dim=-1, keepdim=False")


def _kthvalue(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The last of the `k` smallest, as `topk` orders them."""
    call = _KTH(*args, **kwargs)
    k, dim, keepdim = call["k"], call["dim"], call["keepdim"]
    values, positions = _topk(func, (call["input"], k, dim, False), {})
    last = slice(k - 1, k) if keepdim else k - 1
    index = (slice(None),) * (dim % max(values.dim(), 1)) + (last,)
    return torch.return_types.kthvalue((values[index], positions[index]))


def _median(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The lower of the two middle values."""
    call = arguments_by_name("input, dim=None, keepdim=False")(*args, **kwargs)
    x, dim = call["input"], call["dim"]
    if dim is None:
        return _kthvalue(func, (x.flatten(), (x.numel() + 1) // 2), {}).values
    return torch.return_types.median(tuple(_kthvalue(func, (x, (x.shape[dim] + 1) // 2, dim, call["keepdim"]), {})))


_SORT = arguments_by_name("input, dim=-1, descending=False, *, stable=True")


def _sort(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Always stable: of equal values the one with the lowest position comes first."""
    kwargs = {k: v for k, v in kwargs.items() if k != "stable"}
    if args[1:] and isinstance(args[1], bool):  # x.sort(True, ...) would be `stable`
        args = (args[0], *args[2:])
    call = _SORT(*args, **kwargs)
    stable = {"stable": True, "dim": call["dim"], "descending": call["descending"]}
    return keep_scale(torch.sort, (call["input"],), stable)


def _argsort(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    return _sort(func, args, kwargs).indices


def _msort(func: Callable, args: tuple, kwargs: dict) -> QTensor:
    return _sort(func, (*args, 0), kwargs).values


def _gives_values(*args: Any, return_indices: Any = False, **kwargs: Any) -> bool:
    """Max pooling without positions."""
    return not return_indices


def _has_dim(*args: Any, **kwargs: Any) -> bool:
    return ("dim" in kwargs or "axis" in kwargs or len(args) > 1) and not is_pair(*args, **kwargs)


def _has_no_dim(*args: Any, **kwargs: Any) -> bool:
    return not _has_dim(*args, **kwargs) and not is_pair(*args, **kwargs)


def _axis_size(use: Use) -> int:
    """How many values an argmax chooses from."""
    shape, dim = use.inputs[0].shape, use.attributes.get("dim")
    return shape[dim] if isinstance(dim, int) and shape else math.prod(shape)


def _moves_batch(use: Use) -> bool:
    rank = len(use.inputs[0].shape)
    if rank != 4:
        return False
    if "dims" in use.attributes:
        return use.attributes["dims"][0] % rank != 0
    swapped = [use.attributes[name] % rank for name in ("dim0", "dim1") if name in use.attributes]
    return 0 in swapped and len(set(swapped)) > 1


_AXIS = Limit(
    "an axis of at most 32767",
    lambda use: _axis_size(use) <= 32767,
    lambda use: str(_axis_size(use)),
    "choose in two steps",
)
_FIRST = Limit("the batch axis stays first", lambda use: not _moves_batch(use), advice="permute the other axes only")
_AS_OUTPUT = Limit(
    "only as output of the model",
    lambda use: not any(x.is_read for x in use.outputs),
    lambda use: "read by another operator",
    "return it from the model, and go on from there outside",
)
_POSITIONS_AS_OUTPUT = Limit(
    "positions only as output of the model",
    lambda use: not any(x.is_read for x in use.outputs if not x.format.startswith("q")),
    lambda use: "positions read by another operator",
    "return them from the model, or use `topk`",
)
_EXTREME_LIMITS = (at_most("N", 4096), *(at_most(axis, 65535) for axis in "CHW"), _POSITIONS_AS_OUTPUT)
_ON_OUTPUT = Support(INT8, INT8, limits=(_AS_OUTPUT,), note="value and position are two channels of one tensor")
_MAX = on(bernoulli2=_ON_OUTPUT, bayes=Support(limits=_EXTREME_LIMITS))
_MIN = on(bayes=Support(limits=_EXTREME_LIMITS))
_ARG = on(
    bernoulli2=_ON_OUTPUT,
    bayes=Support(limits=_EXTREME_LIMITS),
    nash=Support(limits=(_AXIS,)),
)
_ANY_INTEGER = Support(WIDE, WIDE)
_MOVES_FROM_BAYES = on(bayes=_ANY_INTEGER)
_MOVES_EVERYWHERE = on(bernoulli2=_ANY_INTEGER, bayes=_ANY_INTEGER)
# `Tensor.select`, and an index of one number, are in the list of what the J5 does not have.
_SELECTS = on(
    bernoulli2=_ANY_INTEGER, bayes=Support(WIDE, WIDE, note="slice rather than select one position"), nash=_ANY_INTEGER
)
_SIZES = Limit(
    "rank <= 10, every size < 65536",
    lambda use: all(len(x.shape) <= 10 and all(s < 65536 for s in x.shape) for x in (*use.inputs, *use.outputs)),
    advice="split the tensor",
)
_NO_REFLECT = Limit(
    "mode is not reflect",
    lambda use: use.attributes.get("mode") != "reflect",
    lambda use: "reflect",
    "pad with `replicate` or a constant",
)
_REFLECTS = Limit("no reflect padding", lambda use: False, lambda use: "reflect", "pad with `replicate` or a constant")
_BYTES_ON_BERNOULLI = on(bernoulli2=Support(INT8, INT8), bayes=Support())

_SMALLER = "use a smaller window, or several pools in a row"
_MAX_POOL = on(
    bernoulli2=Support(INT8, INT8, limits=(between("kernel_size", 1, 64, _SMALLER), between("stride", 1, 256))),
    bayes=Support(
        INT8,
        INT8,
        limits=(
            at_most("H", 8192), at_most("W", 8192), at_most("C", 8192), between("kernel_size", 1, 256, _SMALLER),
            between("stride", 1, 256), at_most("padding", 255),
        ),
    ),
)  # fmt: skip
_OTHER_MAX_POOLS = on(bayes=Support(INT8, INT8, note="not in the published tables"))

_GONE = Trait.NOTHING | Trait.UNREAD  # in a deployed model

_ROWS: dict[str, _Row] = {
    "identity": _Row("clone contiguous detach detach_", keep_scale, _MOVES_EVERYWHERE, (nn.Identity,), traits=_GONE),
    "to": _Row("to type type_as cpu cuda", None, _MOVES_EVERYWHERE, traits=Trait.CAST | Trait.UNREAD),
    "dropout": _Row(
        "dropout dropout1d dropout2d dropout3d",
        _dropout,
        _MOVES_EVERYWHERE,
        (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
        traits=_GONE,
    ),
    "alpha_dropout": _Row(
        "alpha_dropout feature_alpha_dropout",
        _alpha_dropout,
        _MOVES_EVERYWHERE,
        (nn.AlphaDropout, nn.FeatureAlphaDropout),
        traits=_GONE,
    ),
    "reshape": _Row(
        "reshape view flatten unflatten squeeze unsqueeze squeeze_ unsqueeze_ reshape_as view_as ravel",
        marches=on(bernoulli2=Support(note="only height and width"), bayes=Support(limits=(_SIZES,))),
        modules=(nn.Flatten, nn.Unflatten),
    ),
    "permute": _Row("permute", marches=on(bayes=Support(WIDE, WIDE, limits=(_FIRST,))), signature="input *dims"),
    "transpose": _Row(
        "transpose swapaxes swapdims movedim moveaxis t adjoint transpose_ swapaxes_ swapdims_ t_",
        marches=on(bayes=Support(WIDE, WIDE, limits=(_FIRST,))),
        signature="input dim0 dim1",
    ),
    "zeros": _Row("zeros_like new_zeros empty_like new_empty", _keep_with_zeros, _MOVES_EVERYWHERE),
    "expand": _Row("expand expand_as broadcast_to repeat tile repeat_interleave", marches=FROM_BAYES),
    "split": _Row("split split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind", traits=Trait.SEVERAL),
    "slice": _Row("__getitem__", _getitem, _SELECTS),
    "select": _Row("narrow select diagonal", marches=_SELECTS),
    "gather": _Row("gather take_along_dim index_select take", marches=_MOVES_FROM_BAYES),
    "flip": _Row("flip fliplr flipud rot90 roll", marches=FROM_BAYES),
    "tril": _Row("tril triu tril_ triu_", _keep_with_zeros, FROM_BAYES),
    "unfold": _Row("unfold", _keep_with_zeros, FROM_BAYES, (nn.Unfold,)),
    "fold": _Row("fold", _fold, FROM_BAYES, (nn.Fold,), takes=_lies_side_by_side),
    "pad": _Row("pad", _pad, on(bayes=Support(limits=(_NO_REFLECT,))), signature="input pad mode value"),
    "pad_module": _Row(
        "",
        None,
        _BYTES_ON_BERNOULLI,
        (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d,
         nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d,
         nn.CircularPad3d),
    ),
    "reflection_pad": _Row(
        "",
        None,
        on(bayes=Support(limits=(_REFLECTS,))),
        (nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    ),
    "max_pool": _Row(
        "max_pool2d",
        handler=_max_pool,
        marches=_MAX_POOL,
        modules=(nn.MaxPool2d,),
        others=(F._max_pool2d,),  # type: ignore[attr-defined]
        takes=_gives_values,
        signature="input kernel_size stride padding dilation ceil_mode return_indices",
    ),
    "other_max_pools": _Row(
        "max_pool1d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
        marches=_OTHER_MAX_POOLS,
        modules=(nn.MaxPool1d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        others=(F._max_pool1d, F._max_pool3d, F._adaptive_max_pool1d, F._adaptive_max_pool2d,  # type: ignore[attr-defined]
                F._adaptive_max_pool3d),  # type: ignore[attr-defined]
        takes=_gives_values,
    ),
    "max": _Row("max", marches=_MAX, takes=_has_no_dim),
    "max_dim": _Row("max", marches=_MAX, results=_VALUES_AND_POSITIONS, takes=_has_dim),
    "min": _Row("min", marches=_MIN, takes=_has_no_dim),
    "min_dim": _Row("min", marches=_MIN, results=_VALUES_AND_POSITIONS, takes=_has_dim),
    "amax": _Row("amax", marches=_MAX),
    "amin": _Row("amin", marches=_MIN),
    "aminmax": _Row("aminmax", marches=_MIN, results=(Kind.QUANTIZED, Kind.QUANTIZED)),
    "argmax": _Row("argmax", marches=_ARG, results=_POSITIONS, signature="input dim keepdim"),
    "argmin": _Row("argmin", marches=_ARG, results=_POSITIONS, signature="input dim keepdim"),
    "topk": _Row("topk", _topk, _MOVES_FROM_BAYES, results=_VALUES_AND_POSITIONS),
    "sort": _Row("sort", _sort, FROM_BAYES, results=_VALUES_AND_POSITIONS),
    "argsort": _Row("argsort", _argsort, FROM_BAYES, results=_POSITIONS),
    "msort": _Row("msort", _msort, FROM_BAYES),
    "kthvalue": _Row("kthvalue", _kthvalue, FROM_BAYES, results=_VALUES_AND_POSITIONS),
    "median": _Row("median", _median, FROM_BAYES, takes=_has_no_dim),
    "median_dim": _Row("median", _median, FROM_BAYES, results=_VALUES_AND_POSITIONS, takes=_has_dim),
    "pixel_shuffle": _Row("pixel_shuffle pixel_unshuffle", modules=(nn.PixelShuffle, nn.PixelUnshuffle)),
    "channel_shuffle": _Row("channel_shuffle", marches=_BYTES_ON_BERNOULLI, modules=(nn.ChannelShuffle,)),
}  # fmt: skip


def _as_it_is(*args: Any, **kwargs: Any) -> Call | None:
    """Nothing to replace."""
    return None


def _found(owners: tuple[Any, ...], names: list[str]) -> list[Callable]:
    found = (getattr(owner, name, None) for name in names for owner in owners)
    return [function for function in found if callable(function)]


def _register(name: str, row: _Row) -> None:
    names = row.names.split()
    functions = [*_found((torch, F), names), *row.others]
    if row.handler is not None:
        for spelled in names:
            is_written = spelled.endswith("_") and not spelled.endswith("__")
            handler = _without_writing if is_written else row.handler
            handle(*_found((torch, F, Tensor), [spelled]), keeps=row.results == _VALUES)(handler)
        handle(*row.others, keeps=row.results == _VALUES)(row.handler)
    if "__getitem__" in names:
        functions.append(operator.getitem)
    register(
        Operator(
            name,
            ScaleRule.INHERIT if Kind.QUANTIZED in row.results else ScaleRule.NONE,
            modules=row.modules,
            functions=dict.fromkeys(functions, _as_it_is),
            methods={method: _as_it_is for method in names if hasattr(Tensor, method)},
            marches=row.marches,
            results=row.results,
            takes=row.takes,
            signature=row.signature,
            traits=row.traits,
        )
    )


for _name, _row in _ROWS.items():
    _register(_name, _row)


def _register_attributes(name: str, attributes: tuple[str, ...], limit: Limit) -> None:
    """A row of attributes that are views; in a graph they are read with `getattr`."""
    readers = [getattr(Tensor, attribute).__get__ for attribute in attributes]
    register(
        Operator(
            name,
            ScaleRule.INHERIT,
            functions=dict.fromkeys([getattr, *readers], _as_it_is),
            marches=on(bayes=Support(WIDE, WIDE, limits=(limit,))),
            takes=lambda x, attribute=attributes[0], *default: attribute in attributes,
        )
    )


_register_attributes("transposed", ("mT", "mH"), _FIRST)
_register_attributes("reversed", ("T", "H"), replace(_FIRST, holds=lambda use: len(use.inputs[0].shape) != 4))
# Rows of `nn.qat.relu`; in eager mode, and where a composite calls them, a QTensor keeps its scale.
handle(torch.relu, Tensor.relu, keeps=True)(keep_scale)
handle(F.relu, torch.relu_, Tensor.relu_, keeps=True)(_relu)

advise(
    "leave out return_indices: what needs the positions of max pooling (MaxUnpool) has no quantized form either",
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d,
    F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices,
)  # fmt: skip
advise("use upsampling or a transposed convolution", F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
advise(
    "the number of results depends on the values, which no chip can plan for. Keep the shape: `torch.where`, "
    "`masked_fill`, or a multiplication by the mask; or move it after the DeQuantStub",
    torch.masked_select, "masked_select", torch.nonzero, "nonzero", torch.unique, "unique",
)  # fmt: skip
advise(
    "it would write values of one scale into a tensor of another. Build the tensor from its parts with `torch.cat`, "
    "choose with `torch.where`, or move it after the DeQuantStub",
    torch.scatter, "scatter", "scatter_", torch.scatter_add, "scatter_add", "scatter_add_", torch.index_put,
    "index_put", "index_put_", torch.index_add, "index_add", "index_add_", torch.index_copy, "index_copy",
    "index_copy_", torch.masked_scatter, "masked_scatter", "masked_scatter_",
)  # fmt: skip
advise(_OVERLAP, F.fold)
advise(
    "a product over an axis leaves every range. Multiply the slices with `*` (each product has a scale of its own), "
    "add logarithms, or move it after the DeQuantStub",
    torch.prod, "prod", torch.cumprod, "cumprod",
)  # fmt: skip
