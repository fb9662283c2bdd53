"""Sampling against plain Python integers, at borders, far outside, on images of one pixel; errors and limits."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.errors import OperatorInputError, UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.operator_table import row_named
from horizon_plugin_pytorch.operators.support import TensorFact, Use
from horizon_plugin_pytorch.quantization import check_model, convert_fx, prepare_qat_fx
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.operators.cases import bench
from tests.operators.cases.base import Body
from tests.routes import as_numbers, assert_one_arithmetic, mismatches, prepared, qconfig, run_onnx


def _reference(image: list[list[int]], x: int, y: int, bits: int) -> int:
    """Four pixels times four weights in Python integers, rounded half up; zeros around the image."""
    unit = 1 << bits
    i, j = y >> bits, x >> bits
    down, right = y - (i << bits), x - (j << bits)

    def pixel(row: int, column: int) -> int:
        return image[row][column] if 0 <= row < len(image) and 0 <= column < len(image[0]) else 0

    total = (
        (pixel(i, j) * (unit - right) + pixel(i, j + 1) * right) * (unit - down)
        + (pixel(i + 1, j) * (unit - right) + pixel(i + 1, j + 1) * right) * down
    )  # fmt: skip
    return (total + (1 << (2 * bits - 1))) >> (2 * bits) if bits else pixel(i, j)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([0, 8, 16]), st.integers(1, 9), st.integers(1, 9))
def test_sampling_is_integer_arithmetic(data: Any, bits: int, height: int, width: int) -> None:
    top = 128 if bits == 8 else 32768
    extreme = st.sampled_from([-top, top - 1, 0, 1]) | st.integers(-top, top - 1)
    image = data.draw(st.lists(st.lists(extreme, min_size=width, max_size=width), min_size=height, max_size=height))
    unit = 1 << bits
    points = data.draw(
        st.lists(
            st.tuples(st.integers(-2 * unit, (width + 1) * unit), st.integers(-2 * unit, (height + 1) * unit)),
            min_size=1, max_size=20,
        )
    )  # fmt: skip
    flow = torch.tensor(points, dtype=torch.float32).reshape(1, 1, -1, 2)
    one = torch.ones(2, dtype=torch.float64)
    base = torch.stack([torch.arange(len(points)) * unit, torch.zeros(len(points), dtype=torch.long)], -1)
    found = fp.grid_sample(
        torch.tensor(image, dtype=torch.float32)[None, None], (flow - base).float(), one, one * 0, False, True, bits,
        "zeros", False,
    )  # fmt: skip
    assert found.flatten().tolist() == [_reference(image, x, y, bits) for x, y in points]


@pytest.mark.in_turns("dtype", "size", "padding_mode", "align_corners")
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (64, 1), (3, 17), (33, 64)])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align_corners", [False, True])
def test_borders_and_far_outside(
    dtype: str, size: tuple[int, int], padding_mode: str, align_corners: bool, tmp_path: Any
) -> None:
    """Points exactly on corners, edges and centres, and so far outside that the grid saturates."""
    places = torch.tensor([-1e6, -3.0, -1.5, -1.0, -1 + 1 / 64, -0.5, 0.0, 0.5, 1 - 1 / 64, 1.0, 1.5, 3.0, 1e6])
    grid = torch.stack(torch.meshgrid(places, places, indexing="xy"), -1)[None]
    image = torch.randn(1, 3, *size)
    model = bench(horizon_nn.GridSample("bilinear", padding_mode, align_corners), 2)
    qat = prepared(model, (image, grid.clamp(-3, 3)), dtype)
    assert_one_arithmetic(qat, (image, grid.clamp(-3, 3)), tmp_path, [(image, grid)])
    exact = qat(image, grid)[0]
    place = qat.quant_1(grid).dequantize().double()
    real = qat.quant_0(image).dequantize().double()
    wanted = F.grid_sample(real, place, "bilinear", padding_mode, align_corners)
    assert float((exact.dequantize() - wanted).abs().max()) / float(exact.scale) <= 1.5


def test_numbers_that_are_not_finite_in_a_real_grid(tmp_path: Any) -> None:
    """NaN counts as -1, as torch documents it; infinities are far outside."""
    image = torch.randn(1, 2, 4, 5)
    grid = torch.tensor([math.nan, math.inf, -math.inf, 0.3, -1.0, 1.0]).reshape(1, 1, 3, 2)
    model = bench(horizon_nn.GridSample("bilinear", "border", False), 1, 2)
    qat = prepared(model, (image, torch.zeros(1, 1, 3, 2)))
    quantized = assert_one_arithmetic(qat, (image, torch.zeros(1, 1, 3, 2)), tmp_path, [(image, grid)])
    integers = quantized(image, grid)[0].int_repr()
    corner = quantized.quant_0(image).int_repr()
    assert integers[0, :, 0, 0].tolist() == corner[0, :, 3, 0].tolist()
    assert integers[0, :, 0, 2].tolist() == corner[0, :, 3, 0].tolist()


def test_positions_keep_what_an_int16_grid_says() -> None:
    """One step of a qint16 grid over 1,024 pixels is 1/64 pixel; positions have 1/256 or finer."""
    ramp = torch.arange(1024.0).mul(31).expand(1, 1, 2, 1024)
    steps = torch.arange(-32768, 32767, 97, dtype=torch.float32)
    scale = torch.tensor([2 / 65535])
    grid = torch.stack([steps, torch.zeros_like(steps)], -1)[None, None]
    for bits in (8, 16):
        factor, offset = fp.choose_affine(
            *(torch.tensor(v).double() for v in fp.grid_factors(2, 1024, float(scale), bits, True, False))
        )
        position = (steps.double() * factor[0] + offset[0] + 0.5).floor() / 2**bits
        wanted = (steps.double() * float(scale) + 1) / 2 * 1023
        assert float((position - wanted).abs().max()) <= 0.5 / 2**bits + 1e-4
    out = fp.grid_sample(ramp, grid, factor, offset, False, False, 16, "border", True).flatten()
    assert float((out - wanted.clamp(0, 1023) * 31).abs().max()) <= 0.51


@pytest.mark.parametrize("opset", [13, 20])
def test_every_opset(opset: int, tmp_path: Any) -> None:
    inputs = (torch.randn(2, 3, 5, 6), torch.rand(2, 4, 4, 2) * 3 - 1.5)
    for padding_mode in ("zeros", "reflection"):
        quantized = convert_fx(prepared(bench(horizon_nn.GridSample("bilinear", padding_mode), 2), inputs))
        model = export_quantized_onnx(quantized, inputs, tmp_path / "model.onnx", opset_version=opset)
        assert mismatches(as_numbers(quantized(*inputs)), run_onnx(model, inputs, "on")) == 0


def test_a_batch_of_nothing() -> None:
    inputs = (torch.randn(2, 3, 5, 6), torch.rand(2, 4, 4, 2))
    quantized = convert_fx(prepared(bench(horizon_nn.GridSample(), 2), inputs))
    assert quantized(torch.zeros(0, 3, 5, 6), torch.zeros(0, 4, 4, 2))[0].shape == (0, 3, 4, 4)


def test_a_constant_grid_gets_no_stub_and_trains() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = nn.Parameter(torch.rand(1, 4, 4, 2) - 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return F.grid_sample(x, self.grid, align_corners=False)

    qat = prepared(bench(Model()), (torch.randn(1, 2, 5, 6),))
    assert not any("_generated_quant" in name for name, _ in qat.named_modules())
    qat(torch.randn(1, 2, 5, 6))[1].square().sum().backward()
    assert torch.isfinite(qat.body.grid.grad).all() and float(qat.body.grid.grad.abs().sum()) > 0


def test_modes_without_an_integer_form_are_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match="'bicubic' has no quantized form; use 'bilinear'"):
        prepare_qat_fx(bench(Body(lambda x, g: F.grid_sample(x, g, "bicubic")), 2), {"": qconfig()})
    with pytest.raises(UnsupportedOperatorError, match="'bicubic' has no quantized form"):
        prepare_qat_fx(bench(horizon_nn.GridSample("bicubic"), 2), {"": qconfig()})


def test_volumes_are_refused_with_their_shapes() -> None:
    inputs = (torch.randn(1, 2, 3, 4, 5), torch.zeros(1, 2, 2, 2, 3))
    with pytest.raises(OperatorInputError, match=r"GridSample.*\(1, 2, 3, 4, 5\).*image \[N, C, H, W\]"):
        prepared(bench(horizon_nn.GridSample(), 2), inputs)(*inputs)


def test_bernoulli2_has_no_grid_sample() -> None:
    set_march(March.BERNOULLI2)
    with pytest.raises(UnsupportedOperatorError, match="bayes"):
        prepare_qat_fx(bench(horizon_nn.GridSample(), 2), {"": qconfig()})


@pytest.mark.parametrize(
    ("shape", "format", "broken"),
    [((1, 4, 720, 1024), "qint8", 0), ((1, 4, 721, 1024), "qint8", 1), ((1, 4, 1, 1025), "qint8", 1),
     ((1, 4, 8, 8), "qint16", 1)],
)  # fmt: skip
def test_published_limits(shape: tuple[int, ...], format: str, broken: int) -> None:
    row = row_named("grid_sample")
    assert row is not None
    use = Use("grid_sample", "", (TensorFact(shape, format), TensorFact((1, 2000, 2000, 2), "qint16")))
    assert sum(not limit.holds(use) for limit in row.marches["bayes"].limits) == broken


def test_check_model_names_a_broken_limit(capsys: Any) -> None:
    inputs = (torch.randn(1, 1, 1, 1025), torch.zeros(1, 1, 1, 2))
    quantized = convert_fx(prepared(bench(horizon_nn.GridSample(), 2), inputs))
    assert check_model(quantized, inputs, march=March.BAYES) != 0
    assert "1 <= H, W <= 1024" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "size", "dtype", "is_told"),
    [("nearest", 64, "qint8", True), ("nearest", 64, "qint16", False), ("nearest", 12, "qint8", False),
     ("bilinear", 96, "qint8", True), ("bilinear", 32, "qint8", False)],
)  # fmt: skip
def test_a_grid_whose_positions_are_far_apart_is_told(mode: str, size: int, dtype: str, is_told: bool) -> None:
    image, grid = torch.randn(1, 2, size, size), torch.rand(1, 9, 9, 2) * 2 - 1
    qat = prepared(bench(horizon_nn.GridSample(mode, "zeros", False), 2), (image, grid), dtype)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        convert_fx(qat)(image, grid)
    told = [str(w.message) for w in record if "qint8 grid has a position every" in str(w.message)]
    assert len(told) == is_told and all("`body`" in text and "qint16" in text for text in told), told
