"""Rows that go to cells of a grid: pillars of points, and camera features lifted into a bird's eye view."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.rescaling import EXACT_FLOAT32, rescale_


def cells_of(coords: Tensor, batch: int, height: int, width: int) -> Tensor:
    """The cell of each row; one past the last cell for rows that are outside, or not the last of their cell."""
    coords = coords.long()
    n, y, x = coords[:, 0], coords[:, -2], coords[:, -1]
    is_inside = (n >= 0) & (n < batch) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    nowhere = batch * height * width
    cell = torch.where(is_inside, (n * height + y) * width + x, nowhere)
    order = torch.arange(len(cell), device=cell.device)
    last = torch.full((nowhere + 1,), -1, device=cell.device).scatter_reduce_(0, cell, order, "amax")
    return torch.where(last[cell] == order, cell, nowhere)


@operator("scatter_rows(Tensor q, Tensor coords, int batch, int height, int width) -> Tensor")
def scatter_rows(q: Tensor, coords: Tensor, batch: int, height: int, width: int) -> Tensor:
    """Rows [M, C] at ``(n, ..., y, x)`` of an image [N, C, H, W]; zero elsewhere, the last of a cell wins."""
    return scatter(q, cells_of(coords, batch, height, width), batch, height, width)


def scatter(rows: Tensor, cells: Tensor, batch: int, height: int, width: int) -> Tensor:
    """Rows at their cells, each but the last of which occurs once."""
    canvas = rows.new_zeros((batch * height * width + 1, rows.shape[1])).index_put((cells,), rows)
    return canvas[:-1].reshape(batch, height, width, -1).permute(0, 3, 1, 2).contiguous()


@operator(
    "bev_pool(Tensor depth, Tensor feat, Tensor ranks_depth, Tensor ranks_feat, Tensor ranks_bev, "
    "Tensor interval_starts, Tensor interval_lengths, int cells, int bits, Tensor factor, int low, int high) -> Tensor",
    shape=lambda depth, feat, *rest: feat.new_empty((rest[5], feat.shape[1])),
)
def bev_pool(
    depth: Tensor,
    feat: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    interval_starts: Tensor,
    interval_lengths: Tensor,
    cells: int,
    bits: int,
    factor: Tensor,
    low: int,
    high: int,
) -> Tensor:
    """``clamp((sum over a cell's points of depth * feat * M + 2**(n-1)) >> n)``: [cells, C].

    Args:
        depth, feat: the depths, flat, and the rows of features.
        bits: a product lies below ``2**bits``.
    """
    longest = int(interval_lengths.max()) if interval_lengths.numel() else 0
    dtype = torch.float32 if longest << bits < EXACT_FLOAT32 else torch.float64
    total = pool_intervals(depth.to(dtype), feat.to(dtype), ranks_depth, ranks_feat, interval_starts, interval_lengths)
    out = feat.new_zeros((cells, feat.shape[1]))
    return out.index_copy_(0, ranks_bev.long()[interval_starts.long()], rescale_(total.double(), factor, low, high))


def pool_intervals(
    depth: Tensor, feat: Tensor, ranks_depth: Tensor, ranks_feat: Tensor, starts: Tensor, lengths: Tensor
) -> Tensor:
    """The sum of ``depth * feat`` over the points of each interval; intervals lie one after the other."""
    starts, lengths = starts.long(), lengths.long()
    if not torch.equal(starts[1:], (starts + lengths)[:-1]):
        raise RuntimeError("intervals must lie one after the other: each starts where the one before ends")
    if starts.numel() == 0:
        return feat.new_zeros((0, feat.shape[1]))
    first, end = int(starts[0]), int(starts[-1] + lengths[-1])
    if end > len(ranks_feat):
        raise RuntimeError(f"intervals must end with the points: the last one ends at {end} of {len(ranks_feat)}")
    weights = depth[ranks_depth.long()[first:end]]
    return F.embedding_bag(ranks_feat.long()[first:end], feat, starts - first, mode="sum", per_sample_weights=weights)
