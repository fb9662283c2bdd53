"""Linear layers whose inputs are quantized while the model runs.

Each block of values along the last axis has a scale of its own, of its largest magnitude; the blocks' sums of integers
become real numbers, which are added:

    s_b = max(max(|x_b|) / 127.5, 2**-60)
    y   = sum_b(sum(clamp(round(x_b / s_b)) * w_b) * s_b) * weight_scale + bias

All in float32 and in this order, so that every route gives the same numbers; only the inner sums, of integers, may be
formed in any order: they are exact, in float32 below 2**24, else in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator, signature, unflatten
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32

SMALLEST_SCALE = 2.0**-60  # of a block of zeros


@dataclass(frozen=True)
class Blocks:
    """How many values share a scale, and the range of the integers."""

    size: int
    low: int
    high: int


def block_scale(x: Tensor, dim: int, low: int, high: int) -> Tensor:
    """One scale for each slice along `dim`, which stays as an axis of size 1.

    >>> block_scale(torch.tensor([[0.0, -255.0], [51.0, 5.0]]), -1, -128, 127)
    tensor([[2.0000],
            [0.4000]])
    """
    largest = x.abs().amax(dim, keepdim=True)
    # A tensor: a GPU would multiply by the inverse of a number.
    return torch.div(largest, largest.new_full((), (high - low) / 2)).clamp_(min=SMALLEST_SCALE)


def sum_dtype(weight: Tensor, blocks: Blocks) -> torch.dtype:
    """The type in which the sums over blocks of these integer weights are exact."""
    reach = max(float(part.abs().sum(1).max()) for part in weight.double().split(blocks.size, 1)) * -blocks.low
    return torch.float32 if reach <= EXACT_FLOAT32 else torch.float64


@operator(f"dynamic_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, {signature(Blocks)}) -> Tensor")
def dynamic_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *constants: Any) -> Tensor:
    """Real numbers to real numbers, through integers; the type of the integer `weight` is that of the sums."""
    (blocks,) = unflatten(constants, Blocks)
    out = None
    for part, columns in zip(x.split(blocks.size, -1), weight.split(blocks.size, 1), strict=True):
        step = block_scale(part, -1, blocks.low, blocks.high)
        integers = torch.div(part, step).round_().clamp_(blocks.low, blocks.high)
        term = F.linear(integers.to(weight.dtype), columns).float().mul_(step)
        out = term if out is None else out.add_(term)
    assert out is not None
    out.mul_(scale).add_(0.0)  # zero has no sign
    return out if bias is None else out.add_(bias)
