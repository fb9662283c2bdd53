"""Files do not depend on the types and devices of tensors that torch makes where nobody says which."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert_fx
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx, export_to_onnx
from tests.defaults import default
from tests.operators.cases import CASES
from tests.routes import prepared

DEFAULTS = [torch.float64, torch.bfloat16, torch.float16, "meta"]


class _Layers(nn.Module):
    """Layers whose files have tables, matrices and positions of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.norm, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.LayerNorm(8), nn.Linear(8, 8)
        self.pool, self.up = nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.silu = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.silu(self.conv(self.quant(x)))
        y = y + self.up(self.pool(y))
        y = F.interpolate(F.adaptive_avg_pool2d(y, 4), size=(8, 8), mode="nearest")
        y = F.grid_sample(y, y[:, :2].permute(0, 2, 3, 1), align_corners=False)
        z = self.norm(self.fc(y))
        z = torch.softmax(z @ z.transpose(-1, -2), -1) @ z
        return self.dequant((z / 3.5).mean((2, 3)) + 0.5)


class _Real(nn.Module):
    """Float code whose files have matrices and numbers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.lstm = nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), nn.LSTM(8, 8)
        self.norm = nn.GroupNorm(2, 4, affine=False)

    def forward(self, x: Tensor) -> Any:
        y = F.interpolate(self.norm(self.pool(x)), size=(8, 8), mode="bicubic", align_corners=False)
        y = F.adaptive_avg_pool2d(y, 3) + F.adaptive_avg_pool2d(F.avg_pool2d(x, 2, divisor_override=3), 3)
        ends = torch.where(x > 0.5, x, 0.25).clamp(min=0.125).amax(-1)
        return F.gelu(y) * 0.3 + 1.5, torch.roll(ends, 1), x.flatten().median(), self.lstm(x[0])[0]


def _images() -> Tensor:
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float32)


def _written(export: Callable[..., Any], model: nn.Module, inputs: Any, **settings: Any) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    export(model, inputs, file, **settings)
    return file.getvalue()


@pytest.mark.parametrize("what", DEFAULTS, ids=str)
@pytest.mark.parametrize("settings", [{}, {"opset_version": 11}, {"dynamic_axes": {"input": [0]}}, {"fast": True}],
                         ids=["plain", "opset 11", "open", "fast"])  # fmt: skip
def test_a_converted_model_has_the_same_file(what: torch.dtype | str, settings: dict[str, Any]) -> None:
    quantized = convert_fx(prepared(_Layers(), [_images()]))
    wanted = _written(export_quantized_onnx, quantized, (_images(),), **settings)
    images = (_images(),)
    with default(what):
        assert _written(export_quantized_onnx, quantized, images, **settings) == wanted


@pytest.mark.parametrize("what", DEFAULTS, ids=str)
@pytest.mark.parametrize("stage", ["float", "qat"])
def test_float_and_prepared_models_have_the_same_file(what: torch.dtype | str, stage: str) -> None:
    model = _Real().eval() if stage == "float" else prepared(_Layers(), [_images()])
    images = _images()
    wanted = _written(export_to_onnx, model, images)
    with default(what):
        assert _written(export_to_onnx, model, images) == wanted


@pytest.mark.parametrize("what", [torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.others is None][::40], ids=lambda case: case.name)
def test_operators_have_the_same_file(case: Any, what: torch.dtype | str) -> None:
    inputs = case.inputs()
    quantized = convert_fx(prepared(case.model(), inputs, case.formats[0]))
    wanted = _written(export_quantized_onnx, quantized, inputs)
    with default(what):
        assert _written(export_quantized_onnx, quantized, inputs) == wanted
