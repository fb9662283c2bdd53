"""Rows for operators that only move or select values: they keep the scale of their input and need no module of ours.

`QTensor` runs them; the table says which they are, and on which chips.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.operator_table import Call, Operator, ScaleRule, register
from horizon_plugin_pytorch.qtensor import keeps_scale


def _as_it_is(*args: Any, **kwargs: Any) -> Call | None:
    """Nothing to replace."""
    return None


# name: torch's module classes, then the names of functions (of torch and torch.nn.functional) and tensor methods.
_ROWS: dict[str, tuple[tuple[type, ...], str]] = {
    "identity": ((nn.Identity,), "clone contiguous detach to type_as cpu cuda"),
    "dropout": (
        (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
        "dropout dropout1d dropout2d dropout3d",
    ),
    "reshape": (
        (nn.Flatten, nn.Unflatten),
        "reshape view flatten unflatten squeeze unsqueeze reshape_as view_as",
    ),
    "permute": ((), "permute transpose swapaxes swapdims movedim moveaxis t"),
    "expand": ((), "expand expand_as broadcast_to repeat tile"),
    "split": ((), "split split_with_sizes chunk tensor_split unbind"),
    "slice": ((), "__getitem__ narrow select index_select"),
    "flip": ((), "flip roll"),
    "pad": (
        (nn.ConstantPad2d, nn.ZeroPad2d, nn.ReplicationPad2d, nn.ReflectionPad2d, nn.CircularPad2d),
        "pad",
    ),
    "max_pool": ((nn.MaxPool2d, nn.MaxPool1d, nn.AdaptiveMaxPool2d), "max_pool2d max_pool1d adaptive_max_pool2d"),
    "amax": ((), "amax"),
    "pixel_shuffle": (
        (nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
        "pixel_shuffle pixel_unshuffle channel_shuffle",
    ),
}


def _functions(names: list[str]) -> dict[Callable, Any]:
    spelled = [getattr(owner, name, None) for name in names for owner in (torch, F)]
    found: dict[Callable, Any] = {f: _as_it_is for f in spelled if callable(f) and keeps_scale(f)}
    return found | ({operator.getitem: _as_it_is} if "__getitem__" in names else {})


for _name, (_modules, _names) in _ROWS.items():
    _spelled = _names.split()
    register(
        Operator(
            _name,
            ScaleRule.INHERIT,
            modules=_modules,
            functions=_functions(_spelled),
            methods={n: _as_it_is for n in _spelled if hasattr(Tensor, n)},
        )
    )
