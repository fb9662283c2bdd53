"""Run-length encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator


def _shape(q: Tensor) -> Tensor:
    return q.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


@operator("rle(Tensor q) -> Tensor", shape=_shape)
def rle(q: Tensor) -> Tensor:
    """``[runs, value, length, value, length, ...]`` of whole numbers, as int64; the tensor is read row by row."""
    values, lengths = q.to(torch.int64).flatten().unique_consecutive(return_counts=True)
    runs = torch.stack([values, lengths], dim=1).flatten()
    return torch.cat([runs.new_tensor([len(values)]), runs])
