"""Features of boxes and cost volumes against their definitions, written as loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.errors import OperatorInputError, UnsupportedOperatorError
from horizon_plugin_pytorch.nn.functional import roi_align
from horizon_plugin_pytorch.nn.operator_table import row_named
from horizon_plugin_pytorch.operators.support import TensorFact, Use
from horizon_plugin_pytorch.quantization import convert_fx, prepare_qat_fx
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.operators.cases import bench
from tests.operators.cases.base import Body
from tests.routes import as_numbers, assert_one_arithmetic, mismatches, prepared, qconfig, run_onnx


def _sample(image: Tensor, y: float, x: float) -> float:
    """Zero more than a pixel outside, the border up to there."""
    height, width = image.shape
    if y < -1 or y > height or x < -1 or x > width:
        return 0.0
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    i, j = int(y), int(x)
    k, m = min(i + 1, height - 1), min(j + 1, width - 1)
    v, u = y - i, x - j
    top = float(image[i, j]) * (1 - u) + float(image[i, m]) * u
    return top * (1 - v) + (float(image[k, j]) * (1 - u) + float(image[k, m]) * u) * v


def _roi_align(image: Tensor, box: list[float], size: int, scale: float, ratio: int, aligned: bool) -> list[float]:
    off = 0.5 if aligned else 0.0
    x1, y1, x2, y2 = (c * scale - off for c in box)
    wide, tall = x2 - x1, y2 - y1
    if not aligned:
        wide, tall = max(wide, 1.0), max(tall, 1.0)
    nx, ny = (ratio, ratio) if ratio > 0 else (max(math.ceil(wide / size), 1), max(math.ceil(tall / size), 1))
    out = []
    for i in range(size):
        for j in range(size):
            samples = [
                _sample(image, y1 + tall / size * (i + (a + 0.5) / ny), x1 + wide / size * (j + (b + 0.5) / nx))
                for a in range(ny) for b in range(nx)
            ]  # fmt: skip
            out.append(sum(samples) / len(samples))
    return out


BOXES = [
    [0.0, 0.0, 7.0, 5.0],
    [2.3, 1.1, 4.9, 9.7],
    [-6.0, -8.0, 3.0, 30.0],
    [5.0, 5.0, 5.0, 5.0],
    [40.0, 1.0, 60.0, 3.0],
]


@pytest.mark.parametrize("ratio", [1, 2, 3, -1])
@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align_is_the_mean_of_samples(ratio: int, aligned: bool) -> None:
    image = torch.randn(6, 8, dtype=torch.float64)
    found = roi_align(image[None, None], [torch.tensor(BOXES)], 2, 0.75, ratio, aligned)
    wanted = [_roi_align(image, box, 2, 0.75, ratio, aligned) for box in torch.tensor(BOXES).tolist()]
    torch.testing.assert_close(found.flatten(1), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-9)


def test_boxes_can_name_their_image() -> None:
    maps = torch.randn(2, 3, 6, 8)
    boxes = torch.tensor(BOXES)
    listed = roi_align(maps, [boxes[:2], boxes[2:]], 2, 1.0, 2)
    index = torch.tensor([0.0, 0, 1, 1, 1]).unsqueeze(1)
    assert torch.equal(roi_align(maps, torch.cat((index, boxes), 1), 2, 1.0, 2), listed)


def test_a_box_goes_to_the_map_that_fits_its_area() -> None:
    maps = [torch.full((1, 1, 2048, 2048), float(i)) for i in range(4)]
    sides = [1.0, 111.0, 112.0, 223.0, 224.0, 447.0, 448.0, 5000.0]
    boxes = torch.tensor([[0.0, 0.0, side, side] for side in sides])
    found = horizon_nn.MultiScaleRoIAlign(1, [4, 8, 16, 32])(maps, [boxes])
    assert found.flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_boxes_of_nothing_and_boxes_that_are_not_finite(tmp_path: Any) -> None:
    model = bench(Body(lambda x, boxes: roi_align(x, [boxes], 2, 1.0, 2)), 1, 2)
    inputs = (torch.randn(1, 2, 5, 6), torch.tensor(BOXES))
    bad = torch.tensor(BOXES)
    bad[0, 0], bad[1, 2], bad[2, 3] = math.nan, math.inf, -math.inf
    quantized = assert_one_arithmetic(prepared(model, inputs), inputs, tmp_path, [(inputs[0], bad)])
    assert quantized(inputs[0], torch.zeros(0, 4))[0].shape == (0, 2, 2, 2)


def test_samples_that_depend_on_the_boxes_are_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match="sampling_ratio must be above 0"):
        prepare_qat_fx(bench(Body(lambda x, b: roi_align(x, [b], 2)), 1, 2), {"": qconfig()})
    with pytest.raises(UnsupportedOperatorError, match="sampling_ratio must be above 0"):
        prepare_qat_fx(bench(horizon_nn.RoIAlign(2), 1, 2), {"": qconfig()})


@pytest.mark.parametrize("arguments", [(1, 1, 1, 1, 0), (3, 2, 2, 1, 3), (1, 3, 1, 2, 2), (3, 4, 3, 2, 6)])
def test_correlation_is_the_mean_of_products(arguments: tuple[int, ...]) -> None:
    kernel, reach, stride1, stride2, pad = arguments
    a, b = torch.randn(1, 2, 6, 7), torch.randn(1, 2, 6, 7)
    found = horizon_nn.Correlation(*arguments)(a, b)
    left, right = (torch.nn.functional.pad(x, [pad] * 4)[0] for x in (a, b))
    half, steps = kernel // 2, range(-(reach // stride2) * stride2, reach + 1, stride2)
    rows, columns = (range(reach + half, side - reach - half, stride1) for side in left.shape[1:])
    wanted = [
        [[float((left[:, y - half : y + half + 1, x - half : x + half + 1]
                 * right[:, y + i - half : y + i + half + 1, x + j - half : x + j + half + 1]).mean())
          for x in columns] for y in rows]
        for i in steps for j in steps
    ]  # fmt: skip
    torch.testing.assert_close(found[0], torch.tensor(wanted), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_correlation_of_wide_sums_and_every_opset(tmp_path: Any) -> None:
    """1,200 channels of 8-bit products pass 2**24, so the sums are in float64."""
    inputs = (torch.ones(1, 1200, 3, 3), -torch.ones(1, 1200, 3, 3))
    quantized = assert_one_arithmetic(prepared(bench(horizon_nn.Correlation(), 2), inputs), inputs, tmp_path)
    for opset in (13, 20):
        model = export_quantized_onnx(quantized, inputs, tmp_path / "model.onnx", opset_version=opset)
        assert mismatches(as_numbers(quantized(*inputs)), run_onnx(model, inputs)) == 0


def test_correlation_says_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="must be odd, got 2"):
        horizon_nn.Correlation(kernel_size=2)
    with pytest.raises(ValueError, match="products only"):
        horizon_nn.Correlation(is_multiply=False)
    small = (torch.ones(1, 2, 4, 4), torch.ones(1, 2, 4, 4))
    with pytest.raises(OperatorInputError, match="use a larger pad_size"):
        prepared(bench(horizon_nn.Correlation(max_displacement=4), 2), small)


def test_published_limits_of_correlation() -> None:
    row = row_named("correlation")
    assert row is not None
    geometry = dict(kernel_size=1, max_displacement=4, stride1=1, stride2=1, pad_size=0)

    def broken(shape: tuple[int, ...]) -> int:
        use = Use("correlation", "", (TensorFact(shape, "qint8"),) * 2, attributes=geometry)
        return sum(not limit.holds(use) for limit in row.marches["bayes"].limits)

    assert [broken(s) for s in ((1, 1024, 9, 9), (1, 1025, 9, 9), (1, 4, 8, 9))] == [0, 1, 1]


def test_multi_scale_maps_and_opsets(tmp_path: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.align = horizon_nn.MultiScaleRoIAlign(2, [4, 8], 2, 16, 3)

        def forward(self, a: Tensor, b: Tensor, boxes: Tensor) -> Tensor:
            return self.align((a, b), [boxes])

    inputs = (torch.randn(1, 3, 8, 8), 3 * torch.randn(1, 3, 4, 4), torch.tensor(BOXES) * 3)
    quantized = convert_fx(prepared(bench(Model(), 2, 3), inputs))
    converted = convert_fx(prepared(bench(Model(), 2, 3), (inputs[0], inputs[1], inputs[2].unsqueeze(0))))
    assert mismatches(as_numbers(quantized(*inputs)), as_numbers(converted(*inputs))) == 0
    for opset in (13, 20):
        model = export_quantized_onnx(quantized, inputs, tmp_path / "model.onnx", opset_version=opset)
        assert mismatches(as_numbers(quantized(*inputs)), run_onnx(model, inputs, "on")) == 0


def test_boxes_of_images_that_are_not_there_are_refused() -> None:
    """They would be zeros in float, and an index beyond the map in a file."""
    boxes = [torch.tensor([[0.0, 0.0, 2.0, 2.0]])] * 2
    maps = torch.rand(1, 3, 8, 8)
    with pytest.raises(OperatorInputError, match="boxes of 2 images meet a feature map of 1"):
        roi_align(maps, boxes, 2)
    with pytest.raises(OperatorInputError, match="boxes of 2 images meet a feature map of 1"):
        horizon_nn.MultiScaleRoIAlign(2, [4], 3, 32, 3)([maps], boxes)
    assert roi_align(maps, boxes[:1], 2).shape == (1, 3, 2, 2)
