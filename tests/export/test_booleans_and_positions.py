"""Operators on booleans and whole numbers that a quantized model computes, in files of old and new opsets."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.quantization import convert_fx
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.operators.cases.base import Body, bench
from tests.routes import as_numbers, prepared, run_onnx

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {  # of a mask
    "amax": lambda m: m.amax(1),
    "amin": lambda m: m.amin((1, 2), keepdim=True),
    "max-dim": lambda m: m.max(2),
    "min-dim": lambda m: m.min(2, keepdim=True),
    "max-all": lambda m: m.max(),
    "aminmax": lambda m: torch.aminmax(m, dim=1),
    "maximum": lambda m: torch.maximum(m, m.flip(1)),
    "max-of-two": lambda m: torch.max(m, m.flip(1)),
    "minimum": lambda m: torch.minimum(m, m.flip(1)),
    "maximum-of-integers": lambda m: torch.maximum(m.long() * 3, m.flip(1).long() + 1),
    "argmax": lambda m: m.int().argmax(1),
    "topk": lambda m: m.int().topk(2, 1)[0],
    "sort": lambda m: m.sort(1)[0],
    "clamp-to-fractions": lambda m: m.long().clamp(0.5, 1.5),
    "clamp-max": lambda m: m.long().clamp(max=0),
    "clamp-by-tensors": lambda m: m.long().clamp(torch.tensor(0), torch.tensor(1)),
    "relu": lambda m: (m.long() - 1).relu(),
    "sqrt": lambda m: m.long().sqrt(),
    "rsqrt": lambda m: (m.long() + 1).rsqrt(),
    "reciprocal": lambda m: (m.long() + 1).reciprocal(),
    "floor": lambda m: m.long().floor(),
    "round": lambda m: m.long().round(),
    "neg": lambda m: -m.long(),
    "exp": lambda m: m.exp(),
    "sin": lambda m: m.long().sin(),
    "max-pool": lambda m: F.max_pool2d(m.long(), 2),
    "max-pool-padded": lambda m: F.max_pool2d(m.long(), 2, 1, 1),
}
X = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_files_have_the_numbers_and_types_of_the_model(name: str, opset: int) -> None:
    quantized = convert_fx(prepared(bench(Body(lambda x: FUNCTIONS[name](x > 0.1)), 1), (X,)))
    file = export_quantized_onnx(quantized, (X,), io.BytesIO(), opset_version=opset)
    other = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    for x, optimization in ((X, "off"), (X, "on"), (other, "on")):
        with torch.no_grad():
            wanted = as_numbers(quantized(x))
        for found, number in zip(run_onnx(file, [x], optimization), wanted, strict=True):
            torch.testing.assert_close(found, number, rtol=1e-6 if number.is_floating_point() else 0, atol=0)
