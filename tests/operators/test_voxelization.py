"""Point clouds in pillars: against a plain loop, in each floating-point type, and as the image of a Conv2d."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import PointPillarsScatter
from horizon_plugin_pytorch.nn.functional import point_pillars_preprocess
from horizon_plugin_pytorch.nn.quantized.functional_impl import _voxelization
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import PrepareMethod, QuantStub, calibrate, convert, prepare
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.quantization.stubs import DeQuantStub


def _voxels(points: Tensor, pc_range: Any, size: Any, most: int, per_voxel: int) -> dict[tuple[int, ...], list[Any]]:
    found: dict[tuple[int, ...], list[Any]] = {}
    for p in points.tolist():
        cell = tuple(math.floor((p[a] - pc_range[a]) / size[a]) for a in range(3))
        limit = [round((pc_range[3 + a] - pc_range[a]) / size[a]) for a in range(3)]
        if any(not 0 <= c < m for c, m in zip(cell, limit, strict=True)):
            continue
        if cell not in found and len(found) == most:
            continue
        if len(found.setdefault(cell, [])) < per_voxel:
            found[cell].append(p)
    return found


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 5), st.integers(0, 1000))
def test_voxels_are_those_of_a_plain_loop(count: int, most: int, per_voxel: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    clouds = [torch.rand(n, 4, generator=generator) * 5 - 0.5 for n in (count, 7)]
    pc_range, size = (0.0, 0.0, 0.0, 4.0, 3.0, 2.0), (1.0, 1.0, 2.0)
    features, coords = point_pillars_preprocess(clouds, pc_range, size, most, per_voxel)
    row = 0
    for sample, cloud in enumerate(clouds):
        for (x, y, z), points in _voxels(cloud, pc_range, size, most, per_voxel).items():
            assert coords[row].tolist() == [sample, z, y, x]
            assert torch.equal(features[0, :, row, : len(points)].T, torch.tensor(points))
            assert not features[0, :, row, len(points) :].any()
            row += 1
    assert row == len(coords) and features.shape == (1, 4, row, per_voxel)
    padded, places = point_pillars_preprocess(clouds, pc_range, size, most, per_voxel, use_max=True)
    assert padded.shape == (1, 4, 2 * most, per_voxel)
    real = places[:, 0] >= 0
    assert torch.equal(padded[:, :, real], features) and torch.equal(places[real], coords)
    assert not padded[:, :, ~real].any() and bool((places[~real] == -1).all())
    voxels, cells, counts = _voxelization(
        clouds[0], voxel_size=size, pc_range=pc_range, max_points_per_voxel=per_voxel, max_voxels=most, use_max=True
    )
    assert torch.equal(voxels, padded[0, :, :most].permute(1, 2, 0)) and torch.equal(cells, places[:most, 1:])
    lengths = [len(v) for v in _voxels(clouds[0], pc_range, size, most, per_voxel).values()]
    assert counts.tolist() == lengths + [0] * (most - len(lengths))


def test_points_are_normalised() -> None:
    cloud = torch.tensor([[1.0, 2.0, 0.5, 100.0]])
    arguments = ([cloud], (0, 0, 0, 4, 4, 1), (1, 1, 1), 4, 2, False)
    features, _ = point_pillars_preprocess(*arguments, (0, 0, 0, 0, 4, 4, 1, 200), (0, 1, 2, 3))
    assert features.squeeze().T.tolist() == [[0.25, 0.5, 0.5, 0.5], [0.0] * 4]
    partly, _ = point_pillars_preprocess(*arguments, norm_range=(0, 200), norm_dims=(3,))
    assert partly[0, :, 0, 0].tolist() == [1.0, 2.0, 0.5, 0.5]
    with pytest.raises(ValueError, match="1 minima and 1 maxima"):
        point_pillars_preprocess(*arguments, norm_range=(0, 1, 2, 3), norm_dims=(3,))


RANGE, SIZE = (0.0, -10.0, -2.0, 40.0, 10.0, 2.0), (0.16, 0.16, 4.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_clouds_of_every_type_have_the_cells_of_their_numbers(dtype: torch.dtype) -> None:
    cloud = (torch.rand(500, 4, generator=torch.Generator().manual_seed(1)) * 40 - 5).to(dtype)
    features, coords = point_pillars_preprocess([cloud], RANGE, SIZE, 400, 3)
    exact, cells = point_pillars_preprocess([cloud.double()], RANGE, SIZE, 400, 3)
    assert features.dtype is dtype and torch.equal(features.double(), exact) and torch.equal(coords, cells)


def test_no_points_and_no_points_inside() -> None:
    for cloud in (torch.zeros(0, 4), torch.full((3, 4), 1e6), torch.full((3, 4), torch.nan)):
        features, coords = point_pillars_preprocess([cloud], RANGE, SIZE, 5, 3)
        assert features.shape == (1, 4, 0, 3) and coords.shape == (0, 4)
        features, coords = point_pillars_preprocess([cloud, cloud], RANGE, SIZE, 5, 3, use_max=True)
        assert features.shape == (1, 4, 10, 3) and not features.any() and bool((coords == -1).all())
        voxels, coords, counts = _voxelization(cloud, SIZE, RANGE, 3, 5)
        assert voxels.shape == (0, 3, 4) and coords.shape == (0, 3) and counts.shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], RANGE, SIZE, 5, 3), "a list of clouds"),
        ((torch.rand(4, 4), RANGE, SIZE, 5, 3), "a list of clouds"),
        (([torch.rand(4, 2)], RANGE, SIZE, 5, 3), r"got shape \(4, 2\)"),
        (([torch.ones(4, 4, dtype=torch.int32)], RANGE, SIZE, 5, 3), "of torch.int32"),
        (([torch.rand(4, 4)], SIZE, RANGE, 5, 3), "pc_range of six numbers"),
        (([QTensor(torch.zeros(1, 4), 1.0, "qint8")], RANGE, SIZE, 5, 3), "DeQuantStub"),
    ],
)
def test_what_is_no_cloud_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(OperatorInputError, match=message):
        point_pillars_preprocess(*arguments)


class Pillars(nn.Module):
    """Pillars as networks of others use them: an image of points, a 1x1 convolution, the best of each pillar."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.pool = nn.Conv2d(4, 8, 1), nn.MaxPool2d((1, 3))
        self.scatter = PointPillarsScatter((1, 8, 125, 250))

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        best = self.pool(self.conv(self.quant(features)))
        rows = best.squeeze(3).squeeze(0).permute(1, 0)
        return self.dequant(self.scatter(rows, coords))


@pytest.mark.parametrize("method", [PrepareMethod.JIT_STRIP, PrepareMethod.SYMBOLIC], ids=str)
@torch.no_grad()
def test_pillars_go_through_a_network(method: PrepareMethod) -> None:
    set_march(March.NASH_E)
    torch.manual_seed(0)
    cloud = torch.rand(60, 4) * 10
    data = point_pillars_preprocess([cloud], RANGE, SIZE, 40, 3, norm_range=(0, -10, -2, 0, 40, 10, 2, 10))
    net = Pillars().eval()
    model = prepare(net, data, default_calibration_qconfig_setter, method=method, out_dir=None)
    calibrate(model, [data], progress=False)
    assert torch.equal(convert(model)(*data), model(*data))
    assert float((model(*data) - net(*data)).norm() / net(*data).norm()) < 0.03
