"""Point clouds cut into pillars or voxels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horizon_plugin_pytorch.nn.boxes import require_real
from horizon_plugin_pytorch.nn.leaf import leaf


@leaf
def point_pillars_preprocess(
    points_list: Sequence[Tensor],
    pc_range: Sequence[float],
    voxel_size: Sequence[float],
    max_voxels: int,
    max_points_per_voxel: int,
    use_max: bool = False,
    norm_range: Sequence[float] | None = None,
    norm_dims: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Group the points of clouds by voxel, and normalise them.

    Voxels are numbered by their first point; of more than `max_voxels` the first are taken, and so are the first points
    of a voxel. The grid has ``round((max - min) / voxel_size)`` cells on each axis.

    Args:
        points_list: a cloud ``[n, C]`` for each sample; the first three numbers of a point are x, y and z.
        pc_range: ``x_min, y_min, z_min, x_max, y_max, z_max``; a point outside is left out.
        voxel_size: in x, y and z.
        max_voxels: voxels of a sample.
        max_points_per_voxel: points of a voxel.
        use_max: give exactly `max_voxels` voxels a sample, as deployment needs; the missing ones have zeros for points
            and -1 for coordinates.
        norm_range: minima, then maxima, of the numbers in `norm_dims`; these become ``(v - min) / (max - min)``.
        norm_dims: positions in a point of what is normalised; None with a `norm_range`: the first ones.

    Returns:
        features: ``[M, max_points_per_voxel, C]``, zeros where a voxel has fewer points.
        coords: ``[M, 4]`` (int64): sample, z, y, x.

    >>> cloud = torch.tensor([[0.5, 0.5, 0.0, 9.0], [1.5, 0.5, 0.0, 8.0], [0.7, 0.1, 0.0, 7.0]])
    >>> features, coords = point_pillars_preprocess([cloud], [0, 0, -1, 2, 1, 1], [1, 1, 2], 10, 2)
    >>> features[..., 3], coords
    (tensor([[9., 7.],
            [8., 0.]]), tensor([[0, 0, 0, 0],
            [0, 0, 0, 1]]))
    """
    require_real("point_pillars_preprocess", points_list)
    features, coords = [], []
    for sample, points in enumerate(points_list):
        grouped, cells = _voxelize(points, pc_range, voxel_size, max_voxels, max_points_per_voxel, use_max)
        number = torch.where(cells[:, :1] < 0, -1, sample)
        features.append(_normalized(grouped, norm_range, norm_dims))
        coords.append(torch.cat([number, cells.flip(1)], dim=1))
    return torch.cat(features), torch.cat(coords)


def _voxelize(
    points: Tensor, pc_range: Sequence[float], voxel_size: Sequence[float], most: int, per_voxel: int, use_max: bool
) -> tuple[Tensor, Tensor]:
    """Points by voxel ``[M, per_voxel, C]`` with NaN for none, and cells ``[M, 3]`` (x, y, z) with -1 for none."""
    low, high, size = (points.new_tensor(list(v)) for v in (pc_range[:3], pc_range[3:], voxel_size))
    grid = ((high - low) / size).round().long()
    cells = ((points[:, :3] - low) / size).floor()
    inside = ((cells >= 0) & (cells < grid)).all(1).nonzero()[:, 0]
    points, cells = points[inside], cells[inside].long()
    index = (cells[:, 2] * grid[1] + cells[:, 1]) * grid[0] + cells[:, 0]
    by_voxel, order = index.sort(stable=True)
    lengths = by_voxel.unique_consecutive(return_counts=True)[1]
    starts = lengths.cumsum(0) - lengths
    first = order[starts]  # sorting is stable, so this is each voxel's first point
    chosen = first.argsort()[:most]
    number = torch.full_like(first, -1)
    number[chosen] = torch.arange(len(chosen), device=points.device)
    voxel = number.repeat_interleave(lengths)
    rank = torch.arange(len(order), device=points.device) - starts.repeat_interleave(lengths)
    kept = ((voxel >= 0) & (rank < per_voxel)).nonzero()[:, 0]
    count = most if use_max else len(chosen)
    grouped = points.new_full((count, per_voxel, points.shape[1]), torch.nan)
    grouped[voxel[kept], rank[kept]] = points[order[kept]]
    places = cells.new_full((count, 3), -1)
    places[: len(chosen)] = cells[first[chosen]]
    return grouped, places


def _normalized(grouped: Tensor, norm_range: Sequence[float] | None, norm_dims: Sequence[int] | None) -> Tensor:
    """Normalise the points; then what has none becomes zero."""
    if norm_range is not None:
        count = len(norm_range) // 2
        dims = list(range(count)) if norm_dims is None else list(norm_dims)
        if len(norm_range) != 2 * len(dims):
            raise ValueError(
                f"point_pillars_preprocess: norm_range needs {len(dims)} minima and {len(dims)} maxima for norm_dims "
                f"{dims}, got {len(norm_range)} numbers."
            )
        low, high = (grouped.new_tensor(list(v)) for v in (norm_range[:count], norm_range[count:]))
        grouped[..., dims] = (grouped[..., dims] - low) / (high - low)
    return torch.nan_to_num(grouped, 0.0, torch.inf, -torch.inf)
