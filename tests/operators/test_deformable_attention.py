"""Deformable attention against its definition, written as loops; its masks, states and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.errors import ConversionError
from horizon_plugin_pytorch.nn.multi_scale_deform_attn import deformable_attention
from horizon_plugin_pytorch.quantization import convert_fx
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.operators.cases import bench
from tests.routes import as_numbers, assert_one_arithmetic, mismatches, prepared, run_onnx

SHAPES = [(3, 4), (2, 2)]


class Model(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.attention = horizon_nn.MultiScaleDeformableAttention(8, 2, 2, 3, **arguments)
        for layer in (self.attention.sampling_offsets, self.attention.attention_weights):
            nn.init.uniform_(layer.weight, -0.5, 0.5)

    def forward(self, query: Tensor, value: Tensor, reference: Tensor) -> Tensor:
        return self.attention(query, value=value, reference_points=reference, spatial_shapes=torch.tensor(SHAPES))


def _pixel(image: Tensor, y: float, x: float) -> Tensor:
    """Bilinear, with zeros around: [H, W, D] at a place in pixels."""
    i, j = int(y // 1), int(x // 1)
    out = torch.zeros(image.shape[-1], dtype=image.dtype)
    for row, down in ((i, 1 - (y - i)), (i + 1, y - i)):
        for column, across in ((j, 1 - (x - j)), (j + 1, x - j)):
            if 0 <= row < image.shape[0] and 0 <= column < image.shape[1]:
                out = out + image[row, column] * (down * across)
    return out


@pytest.mark.parametrize("numbers", [2, 4])
def test_a_query_is_the_weighted_sum_of_samples(numbers: int) -> None:
    value = torch.randn(1, 16, 2, 3, dtype=torch.float64)
    offsets = torch.randn(1, 5, 2, 2, 3, 2, dtype=torch.float64)
    weights = torch.rand(1, 5, 2, 2, 3, dtype=torch.float64)
    reference = torch.rand(1, 5, 2, numbers, dtype=torch.float64)
    wanted = torch.zeros(5, 2, 3, dtype=torch.float64)
    for query in range(5):
        for head in range(2):
            for level, (height, width) in enumerate(SHAPES):
                start = 0 if level == 0 else 12
                image = value[0, start : start + height * width, head].reshape(height, width, 3)
                for point in range(3):
                    x, y = (float(v) for v in offsets[0, query, head, level, point])
                    place = [float(v) for v in reference[0, query, level]]
                    if numbers == 2:
                        x, y = place[0] * width + x, place[1] * height + y
                    else:
                        x = (place[0] + x / 3 * place[2] / 2) * width
                        y = (place[1] + y / 3 * place[3] / 2) * height
                    wanted[query, head] += _pixel(image, y - 0.5, x - 0.5) * weights[0, query, head, level, point]
    found = deformable_attention(value, offsets, weights, reference, SHAPES)
    torch.testing.assert_close(found[0], wanted.flatten(1), rtol=0, atol=1e-12)


def test_at_first_heads_look_in_their_directions_with_equal_weights() -> None:
    attention = horizon_nn.MultiScaleDeformableAttention(32, 4, 1, 2)
    bias = attention.sampling_offsets.bias.reshape(4, 2, 2)
    torch.testing.assert_close(bias[:, 0], torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]]), rtol=0, atol=1e-6)
    assert torch.equal(bias[:, 1], 2 * bias[:, 0])
    assert float(attention.sampling_offsets.weight.detach().abs().max()) == 0
    assert float(attention.attention_weights.weight.detach().abs().max()) == 0


@pytest.mark.slow
def test_queries_first_in_every_opset_and_far_references(tmp_path: Any) -> None:
    inputs = (torch.randn(5, 2, 8), torch.randn(16, 2, 8), torch.rand(2, 5, 2, 2))
    far = torch.rand(2, 5, 2, 2) * 1e9
    far[0, 0, 0, 0], far[1, 2, 1, 1] = float("nan"), float("-inf")
    qat = prepared(bench(Model(), 2, 3), inputs)
    quantized = assert_one_arithmetic(qat, inputs, tmp_path, [(*inputs[:2], far)])
    for opset in (13, 20):
        model = export_quantized_onnx(quantized, inputs, tmp_path / "model.onnx", opset_version=opset)
        assert mismatches(as_numbers(quantized(*inputs)), run_onnx(model, inputs, "on")) == 0


@pytest.mark.slow
def test_quantized_references(tmp_path: Any) -> None:
    """Reference points that the model computes have a scale; they are taken as real numbers."""
    inputs = (torch.randn(2, 5, 8), torch.randn(2, 16, 8), torch.rand(2, 5, 2, 2))
    assert_one_arithmetic(prepared(bench(Model(batch_first=True), 3), inputs), inputs, tmp_path)


def test_parts_and_formats() -> None:
    inputs = (torch.randn(2, 5, 8), torch.randn(2, 16, 8), torch.rand(2, 5, 2, 2))
    quantized = convert_fx(prepared(bench(Model(batch_first=True), 2, 3), inputs))
    attention = quantized.body.attention
    formats = {name: str(part.out_dtype) for name, part in attention.named_children() if hasattr(part, "out_dtype")}
    assert formats["sampling_offsets"] == formats["attention_weights"] == "qint16"
    assert formats["value_proj"] == formats["sampling"] == formats["output_proj"] == "qint8"


def test_a_float_query_is_refused() -> None:
    inputs = (torch.randn(2, 5, 8), torch.randn(2, 16, 8), torch.rand(2, 5, 2, 2))
    qat = prepared(bench(Model(batch_first=True), 2, 3), inputs)
    with pytest.raises(ConversionError, match="put a QuantStub before it"):
        qat.body.attention(inputs[0], value=qat.quant_1(inputs[1]), reference_points=inputs[2], spatial_shapes=SHAPES)


def test_heads_must_divide_the_features() -> None:
    with pytest.raises(ValueError, match=r"embed_dims \(10\) must be a multiple of num_heads \(4\)"):
        horizon_nn.MultiScaleDeformableAttention(10, 4)
