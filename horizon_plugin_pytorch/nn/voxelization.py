"""Point clouds cut into pillars or voxels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn.boxes import require_real
from horizon_plugin_pytorch.nn.input_checks import is_count, refused_input
from horizon_plugin_pytorch.runtime.leaf import own_leaf


@own_leaf
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
        features: ``[1, C, M, max_points_per_voxel]``, an image of the M voxels of all samples for a Conv2d; zeros where
            a voxel has fewer points.
        coords: ``[M, 4]`` (int64): sample, z, y, x.

    >>> cloud = torch.tensor([[0.5, 0.5, 0.0, 9.0], [1.5, 0.5, 0.0, 8.0], [0.7, 0.1, 0.0, 7.0]])
    >>> features, coords = point_pillars_preprocess([cloud], [0, 0, -1, 2, 1, 1], [1, 1, 2], 10, 2)
    >>> features.shape, features[0, 3], coords
    (torch.Size([1, 4, 2, 2]), tensor([[9., 7.],
            [8., 0.]]), tensor([[0, 0, 0, 0],
            [0, 0, 0, 1]]))
    """
    require_real("point_pillars_preprocess", points_list)
    if isinstance(points_list, Tensor) or not points_list:
        raise OperatorInputError("`point_pillars_preprocess` takes a list of clouds [n, C], one for each sample.")
    features, coords = [], []
    for sample, points in enumerate(points_list):
        grouped, cells, _ = _voxelize(
            "point_pillars_preprocess", points, pc_range, voxel_size, max_voxels, max_points_per_voxel, use_max
        )
        number = torch.where(cells[:, :1] < 0, -1, sample)
        features.append(_normalized(grouped, norm_range, norm_dims))
        coords.append(torch.cat([number, cells.flip(1)], dim=1))
    return torch.cat(features).permute(2, 0, 1).unsqueeze(0).contiguous(), torch.cat(coords)


@own_leaf
def _voxelization(
    points: Tensor,
    voxel_size: Sequence[float],
    pc_range: Sequence[float],
    max_points_per_voxel: int,
    max_voxels: int,
    use_max: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Group the points of one cloud by voxel.

    No document defines it: name and arguments are those of public code, the results those of other toolkits' function
    of this name. `point_pillars_preprocess` says what the arguments mean.

    Returns:
        voxels: ``[M, max_points_per_voxel, C]``, zeros where a voxel has fewer points.
        coords: ``[M, 3]`` (int64): z, y, x; -1 for the missing voxels of `use_max`.
        num_points_per_voxel: ``[M]`` (int64).

    >>> cloud = torch.tensor([[0.5, 0.5, 0.0, 9.0], [1.5, 0.5, 0.0, 8.0], [0.7, 0.1, 0.0, 7.0]])
    >>> voxels, coords, counts = _voxelization(cloud, [1, 1, 2], [0, 0, -1, 2, 1, 1], 2, 10)
    >>> voxels.shape, coords, counts
    (torch.Size([2, 2, 4]), tensor([[0, 0, 0],
            [0, 0, 1]]), tensor([2, 1]))
    """
    require_real("_voxelization", points)
    grouped, cells, counts = _voxelize(
        "_voxelization", points, pc_range, voxel_size, max_voxels, max_points_per_voxel, use_max
    )
    return _normalized(grouped, None, None), cells.flip(1), counts


def _voxelize(
    who: str,
    points: Tensor,
    pc_range: Sequence[float],
    voxel_size: Sequence[float],
    most: int,
    per_voxel: int,
    use_max: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Points by voxel ``[M, per_voxel, C]`` with NaN for none, cells ``[M, 3]`` (x, y, z) with -1 for none, counts."""
    if points.dim() != 2 or points.shape[1] < 3 or not points.is_floating_point():
        raise OperatorInputError(
            f"`{who}` takes clouds [n, C] of floating-point numbers with x, y and z first, got shape "
            f"{tuple(points.shape)} of {points.dtype}."
        )
    if len(pc_range) != 6 or len(voxel_size) != 3:
        raise OperatorInputError(
            f"`{who}` takes a pc_range of six numbers and a voxel_size of three, got {list(pc_range)} and "
            f"{list(voxel_size)}."
        )
    is_grid = all(lo < h for lo, h in zip(pc_range[:3], pc_range[3:], strict=True)) and min(voxel_size) > 0
    if not is_grid or not is_count(most, 1) or not is_count(per_voxel, 1):
        raise refused_input(
            who, "a pc_range of minima below maxima, a positive voxel_size, and at least one voxel with one point",
            pc_range=str(list(pc_range)), voxel_size=str(list(voxel_size)), max_voxels=most,
            max_points_per_voxel=per_voxel,
        )  # fmt: skip
    low, high, size = ([float(v) for v in values] for values in (pc_range[:3], pc_range[3:], voxel_size))
    shape = [round((h - lo) / s) for lo, h, s in zip(low, high, size, strict=True)]
    places = points[:, :3] if points.dtype is torch.float64 else points[:, :3].float()  # half has too few digits
    cells = ((places - places.new_tensor(low)) / places.new_tensor(size)).floor()
    inside = ((cells >= 0) & (cells < cells.new_tensor(shape))).all(1).nonzero()[:, 0]
    points, cells = points[inside], cells[inside].long()
    index = (cells[:, 2] * shape[1] + cells[:, 1]) * shape[0] + cells[:, 0]
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
    found, counts = cells.new_full((count, 3), -1), lengths.new_zeros(count)
    found[: len(chosen)] = cells[first[chosen]]
    counts[: len(chosen)] = lengths[chosen].clamp(max=per_voxel)
    return grouped, found, counts


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
        if not all(0 <= dim < grouped.shape[-1] for dim in dims):
            raise refused_input(
                "point_pillars_preprocess", f"norm_dims among the {grouped.shape[-1]} numbers of a point",
                norm_dims=str(dims),
            )  # fmt: skip
        low, high = (grouped.new_tensor(list(v)) for v in (norm_range[:count], norm_range[count:]))
        grouped[..., dims] = (grouped[..., dims] - low) / (high - low)
    return torch.nan_to_num(grouped, 0.0, torch.inf, -torch.inf)
