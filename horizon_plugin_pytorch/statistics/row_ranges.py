"""The ranges of rows with the least squared error, of the values themselves: weights with a scale for each channel."""

from __future__ import annotations

import torch
from torch import Tensor


def best_ranges(rows: Tensor, low: int, high: int, half: float, stride: int = 1) -> Tensor:
    """The end of each row's range with the least squared error of quantizing; a scale is that divided by `half`.

    First a hundred shares of the largest magnitude (every `stride`-th of them), and a little over one, where the
    largest value is not clipped; then the neighbourhood of the best. The fewer values there are, the more the error
    goes up and down there, and the more closely it is looked at.
    """
    shares = torch.arange(100, 0, -stride, dtype=rows.dtype, device=rows.device) / 100
    shares = torch.cat([shares.new_tensor([half / high]), shares])
    largest = rows.abs().amax(1, keepdim=True)
    found = least_error(rows, largest * shares, low, high, half).unsqueeze(1)
    reach = largest * (2 * stride / 100)
    near = torch.linspace(-1, 1, max(24, int(1600 / rows.shape[1] ** 0.5)), dtype=rows.dtype, device=rows.device)
    near = torch.maximum(found + reach * near, found / 8)
    return least_error(rows, torch.cat([found, near], 1), low, high, half)


@torch.no_grad()
def least_error(rows: Tensor, ends: Tensor, low: int, high: int, half: float) -> Tensor:
    """Of the candidates for the end of each row's range, the one with the least squared error of quantizing.

    Args:
        ends: of shape [rows, candidates].
        half: what an end is divided by to get its scale.
    """
    found = []
    at_once = max((1 << 17) // (rows.shape[1] * ends.shape[1]), 1)  # rows whose candidates fit into the cache or nearly
    for part, candidates in zip(rows.split(at_once), ends.split(at_once), strict=True):
        scales = (candidates / half).clamp_(min=1e-30).unsqueeze(2)
        values = part.unsqueeze(1)
        error = (values / scales).round_().clamp_(low, high).mul_(scales).sub_(values).square_().sum(2)
        found.append(candidates.gather(1, error.argmin(1, keepdim=True)).squeeze(1))
    return torch.cat(found)
