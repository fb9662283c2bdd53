"""A small matrix on the channels of an image: colour conversion, normalisation and requantization in one step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator

_BITS = 23  # of all terms of a sum together: one less than float32 holds, for their rounding


@operator("mix_channels(Tensor q, Tensor matrix, Tensor offset, Tensor low, Tensor high) -> Tensor")
def mix_channels(q: Tensor, matrix: Tensor, offset: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``clamp((sum_j M[i, j] * q[j] + B[i] + 2**(n-1)) >> n)`` with limits for each channel.

    ``matrix = M / 2**n`` and ``offset = (B + 2**(n-1)) / 2**n``, as `choose_mix` gives them.
    """
    if q.device.type != "cpu":  # whose float32 products may not be exact
        q, matrix, offset = q.double(), matrix.double(), offset.double()
    out = F.conv2d(q, matrix[:, :, None, None], offset).floor_().float()
    return torch.clamp(out, low.reshape(-1, 1, 1), high.reshape(-1, 1, 1), out=out)


def choose_mix(weights: Tensor, offset: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Matrix and offset on a power of two for each output channel, such that every sum is exact in float32.

    Args:
        weights: real numbers, ``[outputs, inputs]``.
        offset: real numbers, one for each output.
        bound: largest magnitude of an input.

    >>> choose_mix(torch.tensor([[1.0, -0.5]]), torch.tensor([3.0]), 128)
    (tensor([[ 1.0000, -0.5000]]), tensor([3.5000]))
    """
    weights, offset = weights.double(), offset.double()
    reach = weights.abs().sum(1) * bound + offset.abs() + 1
    shift = (_BITS - torch.frexp(reach)[1]).double()
    scaled = torch.round(torch.ldexp(weights, shift.unsqueeze(1)))
    biases = torch.round(torch.ldexp(offset, shift))
    return torch.ldexp(scaled, -shift.unsqueeze(1)).float(), (torch.ldexp(biases, -shift) + 0.5).float()
