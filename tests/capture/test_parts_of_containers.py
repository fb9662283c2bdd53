"""Slices of containers are traced through; modules that the model does not have are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import TraceError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert_fx, prepare_qat_fx
from tests.routes import assert_one_arithmetic, calibrate, qconfig

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class _Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.features = nn.Sequential(
            nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        )

    def forward(self, x: Tensor) -> Tensor:
        low = self.features[:3](self.quant(x))
        return self.dequant(self.features[3:](low) + low)


def test_slices_of_a_sequential(tmp_path: Any) -> None:
    set_march(March.NASH_M)
    net = _Sliced().eval()
    qat = calibrate(prepare_qat_fx(net, {"": qconfig()}), (X,))
    assert_one_arithmetic(qat, (X,), tmp_path)
    assert type(qat.features[0]).__name__ == "ConvReLU2d"  # parts are fused as ever
    with torch.no_grad():
        assert float((qat(X) - net(X)).norm() / net(X).norm()) < 0.03


class _Unregistered(_Sliced):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Conv2d(4, 4, 1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.layers[0](self.quant(x)))


def test_a_module_in_a_plain_list_is_named() -> None:
    set_march(March.NASH_M)
    message = r"test_parts_of_containers.py:\d+: `Conv2d` is not a part of the model.*nn.ModuleList"
    with pytest.raises(TraceError, match=message) as caught:
        prepare_qat_fx(_Unregistered().eval(), {"": qconfig()})
    assert "values of tensors" not in str(caught.value)


@dataclass
class Found:
    boxes: Tensor
    scores: Any


class _GivesADataclass(nn.Module):
    """The outputs are quantized, as a network for the chip without DeQuantStubs gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Found:
        x = self.conv(self.quant(x))
        return Found(x, {"scores": [x.sigmoid()]})


def test_quantized_outputs_in_a_dataclass() -> None:
    set_march(March.NASH_M)
    net = _GivesADataclass().eval()
    qat = calibrate(prepare_qat_fx(net, {"": qconfig()}), (X,))
    with torch.no_grad():
        found, integers, want = qat(X), convert_fx(qat)(X), net(X)
    assert isinstance(found, Found) and isinstance(integers, Found)
    for a, b, c in (
        (found.boxes, integers.boxes, want.boxes),
        (found.scores["scores"][0], integers.scores["scores"][0], want.scores["scores"][0]),
    ):
        assert torch.equal(a.int_repr(), b.int_repr())
        assert float((a.dequantize() - c).norm() / c.norm()) < 0.03
