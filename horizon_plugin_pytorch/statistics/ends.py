"""The smallest and the largest value of tensors and of their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.compiled.choice import passes
from horizon_plugin_pytorch.compiled.passes import is_plain, is_serial

LARGEST_FLOAT32 = torch.finfo(torch.float32).max  # float64 has numbers beyond
_FEW, _MANY = 1 << 15, 1 << 23  # where two passes over memory take less than one that has both ends


def largest_of(kind: torch.dtype) -> float:
    """The largest number of a type; torch takes microseconds to say."""
    return LARGEST_FLOAT32 if kind is torch.float32 else torch.finfo(kind).max


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.aminmax(x)``; two passes take less where memory is near and dense, in channels last a tenth."""
    is_near = _FEW <= x.numel() <= _MANY and x.dtype is torch.float32 and x.is_cpu
    if is_near and (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
        return x.amin(), x.amax()
    return torch.aminmax(x)


def ends_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each row."""
    compiled = passes()
    if compiled is not None and rows.numel() and is_plain(rows) and is_serial(rows):
        return compiled.rows(rows)
    return rows.amin(1), rows.amax(1)  # aminmax over an axis is many times slower
