"""Pillars and bird's eye views against loops; places taken twice, points outside, intervals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.errors import OperatorInputError
from horizon_plugin_pytorch.nn.functional import point_pillars_scatter
from horizon_plugin_pytorch.quantization import convert_fx
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.operators.cases import bench
from tests.routes import as_numbers, assert_one_arithmetic, mismatches, prepared, run_onnx


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(-1, 3), st.integers(-1, 4)), min_size=1, max_size=30))
def test_the_last_pillar_of_a_place_stays(places: list[tuple[int, int, int]]) -> None:
    rows = torch.arange(2.0 * len(places)).reshape(-1, 2) + 1
    wanted = torch.zeros(2, 2, 3, 4)
    for row, (n, y, x) in zip(rows, places, strict=True):
        if 0 <= n < 2 and 0 <= y < 3 and 0 <= x < 4:
            wanted[n, :, y, x] = row
    assert torch.equal(point_pillars_scatter(rows, torch.tensor(places), (2, 2, 3, 4)), wanted)
    assert torch.equal(fp.scatter_rows(rows, torch.tensor(places), 2, 3, 4), wanted)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_places_of_any_type_in_every_opset(dtype: torch.dtype, tmp_path: Any) -> None:
    """Many pillars on few places: ONNX Runtime must keep the same ones."""
    coords = torch.randint(-1, 4, (300, 4)).to(dtype)
    inputs = (torch.randn(300, 3), coords)
    quantized = assert_one_arithmetic(
        prepared(bench(horizon_nn.PointPillarsScatter((2, 3, 3, 3)), 1, 2), inputs), inputs, tmp_path
    )
    for opset in (13, 20):
        model = export_quantized_onnx(quantized, inputs, tmp_path / "model.onnx", opset_version=opset)
        assert mismatches(as_numbers(quantized(*inputs)), run_onnx(model, inputs, "on")) == 0


def test_a_shape_given_to_the_call_and_one_pillar(tmp_path: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scatter = horizon_nn.PointPillarsScatter()

        def forward(self, x: Tensor, coords: Tensor) -> Tensor:
            return self.scatter(x, coords, output_shape=torch.tensor([1, 2, 2, 2]))

    inputs = (torch.tensor([[1.0, -2.0]]), torch.tensor([[0, 0, 1, 0]]))
    quantized = assert_one_arithmetic(prepared(bench(Model(), 1, 2), inputs), inputs, tmp_path)
    assert quantized(*inputs)[0].shape == (1, 2, 2, 2)


def test_gradients_reach_the_pillars_that_stay() -> None:
    rows = torch.ones(3, 1, requires_grad=True)
    coords = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 9, 9]])
    point_pillars_scatter(rows, coords, (1, 1, 2, 2)).sum().backward()
    assert rows.grad is not None and rows.grad.flatten().tolist() == [0, 1, 0]


def _points(count: int, cells: int) -> tuple[Tensor, ...]:
    bev = torch.randint(0, cells, (count,)).sort()[0]
    lengths = torch.bincount(bev, minlength=cells)
    lengths = lengths[lengths > 0]
    starts = lengths.cumsum(0) - lengths
    return torch.randint(0, 24, (count,)), torch.randint(0, 6, (count,)), bev, starts, lengths


def test_a_cell_is_the_sum_of_its_points() -> None:
    depth, feat = torch.randn(1, 1, 4, 2, 3, dtype=torch.float64), torch.randn(1, 1, 2, 3, 5, dtype=torch.float64)
    ranks_depth, ranks_feat, bev, starts, lengths = _points(60, 8)
    wanted = torch.zeros(8, 5, dtype=torch.float64)
    for p in range(60):
        wanted[bev[p]] += depth.flatten()[ranks_depth[p]] * feat.reshape(-1, 5)[ranks_feat[p]]
    found = horizon_nn.BevPoolV2()(depth, feat, ranks_depth, ranks_feat, bev, starts, lengths, (1, 1, 2, 4, 5))
    torch.testing.assert_close(found, wanted.reshape(1, 1, 2, 4, 5).permute(0, 4, 1, 2, 3), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_constant_ranks_and_many_points_in_a_cell(dtype: str, tmp_path: Any) -> None:
    """3,000 products of 8 bits in one cell pass 2**24."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = horizon_nn.BevPoolV2()
            for name, value in zip(("depth", "feat", "bev", "starts", "lengths"), _points(6000, 2), strict=True):
                self.register_buffer(f"ranks_{name}", value.int())

        def forward(self, depth: Tensor, feat: Tensor) -> Tensor:
            ranks = (self.ranks_depth, self.ranks_feat, self.ranks_bev, self.ranks_starts, self.ranks_lengths)
            return self.pool(depth, feat, *ranks, (1, 1, 1, 2, 5))

    inputs = (torch.rand(1, 1, 4, 2, 3) + 1, torch.rand(1, 1, 2, 3, 5) + 1)
    qat = prepared(bench(Model(), 2), inputs, dtype)
    quantized = assert_one_arithmetic(qat, inputs, tmp_path)
    assert int(quantized(*inputs)[0].int_repr().max()) > 100
    for opset in (13, 20):
        model = export_quantized_onnx(quantized, inputs, tmp_path / "model.onnx", opset_version=opset)
        assert mismatches(as_numbers(quantized(*inputs)), run_onnx(model, inputs, "on")) == 0


def test_intervals_with_gaps_are_refused() -> None:
    ranks_depth, ranks_feat, bev, starts, lengths = _points(60, 4)
    inputs = (torch.rand(1, 1, 4, 2, 3), torch.rand(1, 1, 2, 3, 5), ranks_depth, ranks_feat, bev, starts)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = horizon_nn.BevPoolV2()

        def forward(self, *tensors: Tensor) -> Tensor:
            return self.pool(*tensors, lengths, (1, 1, 1, 4, 5))

    quantized = convert_fx(prepared(bench(Model(), 2, 6), inputs))
    with pytest.raises(OperatorInputError, match="each starts where the one before ends"):
        quantized(*inputs[:5], starts + torch.arange(len(starts)))
