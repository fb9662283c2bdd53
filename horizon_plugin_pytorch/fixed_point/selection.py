"""Choosing among integers, with one rule for equal ones: the lowest position comes first."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32

_LARGEST = 1 << 15  # of 16-bit values


@operator("topk(Tensor q, int k, int dim, bool largest) -> (Tensor, Tensor)")
def topk(q: Tensor, k: int, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The `k` largest (or smallest) integers along an axis, in order, and their positions as int64.

    torch's own topk leaves open which of equal values it takes. Here value and position make one key,
    ``q * size - position`` (``+`` for the smallest), so that no two are equal.
    """
    size = q.shape[dim] if q.dim() else 1
    dtype = torch.float32 if _LARGEST * size < EXACT_FLOAT32 else torch.float64
    shape = [1] * q.dim()
    if q.dim():
        shape[dim] = size
    step = -1 if largest else 1
    position = torch.arange(0, step * size, step, dtype=dtype, device=q.device).reshape(shape)
    keys = torch.add(position, q, alpha=size)
    positions = torch.topk(keys, k, dim, largest, True).indices
    return torch.gather(q, dim, positions), positions
