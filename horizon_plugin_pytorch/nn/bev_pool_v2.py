"""Camera features lifted into a bird's eye view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.fake_quant.route import is_written
from horizon_plugin_pytorch.fixed_point.scattering import pool_intervals
from horizon_plugin_pytorch.nn.input_checks import differ, refused_input


def as_image(cells: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows of cells [B * Z * Y * X, C] as [B, C, Z, Y, X]."""
    return cells.reshape(*shape[:4], -1).permute(0, 4, 1, 2, 3).contiguous()


def require_view(depth: Any, feat: Any, shape: Sequence[int]) -> None:
    """Insist on features whose channels are those of the view."""
    is_sound = len(shape) == 5 and depth.dim() == 5 and feat.dim() == 5
    if not is_sound or differ(feat.shape[-1], shape[4] if type(shape[4]) is int else int(shape[4])):
        raise refused_input(
            "BevPoolV2", "depth [B, N, D, H, W], feat [B, N, H, W, C] and bev_feat_shape [B, Z, Y, X, C]",
            depth=depth, feat=feat, bev_feat_shape=str(list(shape)),
        )  # fmt: skip


def _running_sums(
    depth: Tensor, feat: Tensor, ranks_depth: Tensor, ranks_feat: Tensor, starts: Tensor, lengths: Tensor
) -> Tensor:
    """As `pool_intervals`, without reading where intervals lie: differences of running sums, in float64."""
    rows = feat[ranks_feat.long()].double() * depth[ranks_depth.long()].double().unsqueeze(1)
    running = F.pad(rows.cumsum(0), (0, 0, 1, 0))
    starts = starts.long()
    return (running[starts + lengths.long()] - running[starts]).to(feat.dtype)


class BevPoolV2(nn.Module):
    """The sum, in each cell of a bird's eye view, of features times the probability of their depth (BEVDet, LSS).

    Points are listed by cell: ``p`` adds ``depth[ranks_depth[p]] * feat[ranks_feat[p]]`` to the cell of its interval.

    >>> import torch
    >>> ranks = torch.tensor([0, 1])
    >>> depth, feat = torch.tensor([0.5, 0.25]).reshape(1, 1, 2, 1, 1), torch.full((1, 1, 1, 1, 3), 4.0)
    >>> BevPoolV2()(depth, feat, ranks, ranks * 0, ranks * 0 + 1, ranks[:1], ranks[:1] + 2, (1, 1, 1, 2, 3)).flatten(1)
    tensor([[0., 3., 0., 3., 0., 3.]])
    """

    def forward(
        self,
        depth: Tensor,
        feat: Tensor,
        ranks_depth: Tensor,
        ranks_feat: Tensor,
        ranks_bev: Tensor,
        interval_starts: Tensor,
        interval_lengths: Tensor,
        bev_feat_shape: Sequence[int],
    ) -> Tensor:
        """The view [B, C, Z, Y, X].

        Args:
            depth: probabilities [B, N, D, H, W] of N cameras.
            feat: features [B, N, H, W, C].
            ranks_depth, ranks_feat, ranks_bev: positions of each point's depth, feature and cell in the flat tensors.
            interval_starts, interval_lengths: the points of each cell, one interval after the other.
            bev_feat_shape: [B, Z, Y, X, C].
        """
        require_view(depth, feat, bev_feat_shape)
        pool = _running_sums if is_written() else pool_intervals  # a file may be given other intervals
        total = pool(depth.flatten(), feat.flatten(0, -2), ranks_depth, ranks_feat, interval_starts, interval_lengths)
        batch, z, y, x = bev_feat_shape[:4]
        place = ranks_bev.long()[interval_starts.long()]
        return as_image(feat.new_zeros((batch * z * y * x, feat.shape[-1])).index_put((place,), total), bev_feat_shape)
