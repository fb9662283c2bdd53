"""Sums of products of two images, one displaced."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.rescaling import rescale_


@dataclass(frozen=True)
class Windows:
    """Which parts of two padded images meet: the same window of the first, and one of the second per displacement."""

    height: int
    width: int
    start: int
    displacements: list[tuple[int, int]]


def correlation_windows(
    size: tuple[int, int], kernel_size: int, max_displacement: int, stride1: int, stride2: int, pad_size: int
) -> Windows:
    """The windows for images of this size, before padding.

    >>> correlation_windows((5, 6), 1, 1, 1, 1, 0).displacements[:2]
    [(-1, -1), (-1, 0)]
    """
    border = max_displacement + kernel_size // 2
    sides = [-(-(side + 2 * (pad_size - border)) // stride1) for side in size]
    if min(sides) < 1:
        raise RuntimeError(f"no place is left between borders of {border} pixels; use a larger pad_size")
    reach = max_displacement // stride2 * stride2
    steps = range(-reach, reach + 1, stride2)
    height, width = ((side - 1) * stride1 + kernel_size for side in sides)
    return Windows(height, width, max_displacement, [(down, across) for down in steps for across in steps])


@operator(
    "correlation(Tensor a, Tensor b, int kernel_size, int max_displacement, int stride1, int stride2, int pad_size, "
    "Tensor factor, bool is_double, int low, int high) -> Tensor"
)
def correlation(
    a: Tensor,
    b: Tensor,
    kernel_size: int,
    max_displacement: int,
    stride1: int,
    stride2: int,
    pad_size: int,
    factor: Tensor,
    is_double: bool,
    low: int,
    high: int,
) -> Tensor:
    """``clamp((sum of products over channels and patch * M + 2**(n-1)) >> n)``, a channel for each displacement."""
    at = correlation_windows((a.shape[2], a.shape[3]), kernel_size, max_displacement, stride1, stride2, pad_size)
    left, right = (F.pad(x.double() if is_double else x, [pad_size] * 4) for x in (a, b))
    patch = left[:, :, at.start : at.start + at.height, at.start : at.start + at.width]
    product = torch.empty(patch.shape, dtype=patch.dtype, device=patch.device)
    total = product.new_empty((a.shape[0], len(at.displacements), at.height, at.width))
    for index, (down, across) in enumerate(at.displacements):
        top, start = at.start + down, at.start + across
        torch.mul(patch, right[:, :, top : top + at.height, start : start + at.width], out=product)
        torch.sum(product, 1, out=total[:, index])
    if kernel_size > 1:
        total = F.avg_pool2d(total, kernel_size, stride1, divisor_override=1)
    elif stride1 > 1:
        total = total[:, :, ::stride1, ::stride1].contiguous()
    return rescale_(total, factor, low, high)
