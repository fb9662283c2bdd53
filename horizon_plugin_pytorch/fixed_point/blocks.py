"""Element by element, a block at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK = 1 << 17


def blockwise(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """``function(*operands)`` of an elementwise function, in blocks whose float64 temporaries stay in the cache.

    Temporaries of the size of an activation cost more than the arithmetic on them. Operands that are broadcast, and
    small ones, go in one piece.

    >>> blockwise(lambda a, b: (a.double() + b).float(), torch.ones(3), torch.ones(3))
    tensor([2., 2., 2.])
    """
    first = operands[0]
    if first.numel() <= _BLOCK or first.device.type != "cpu":
        return function(*operands)
    if any(x.shape != first.shape or not x.is_contiguous() for x in operands):
        return function(*operands)
    parts = zip(*(x.view(-1).split(_BLOCK) for x in operands), strict=True)
    start = function(*next(parts))
    out = torch.empty(first.shape, dtype=start.dtype)
    pieces = iter(out.view(-1).split(_BLOCK))
    next(pieces).copy_(start)
    for piece, part in zip(pieces, parts, strict=True):
        piece.copy_(function(*part))
    return out
