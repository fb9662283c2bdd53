"""A network with several inputs, a dictionary of outputs, fused operators and a topk; and its calibrated forms."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.side = QuantStub(), QuantStub()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.add, self.relu2 = nn.Conv2d(8, 8, 3, padding=1), FloatFunctional(), nn.ReLU()
        self.pool, self.norm, self.fc = nn.AdaptiveAvgPool2d(1), nn.LayerNorm(8), nn.Linear(8, 5)
        self.scores, self.features = DeQuantStub(), DeQuantStub()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        x, y = self.quant(x), self.side(y)
        a = self.relu1(self.bn1(self.conv1(x)))
        b = self.relu2(self.add.add(self.conv2(a), a))
        p = self.norm(self.pool(b).flatten(1)) + y
        values, positions = self.scores(self.fc(p)).topk(2, -1)
        return {"score": values.sigmoid(), "position": positions, "features": [self.features(b)]}


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 3, 8, 8, generator=generator), torch.randn(2, 8, generator=generator)) for _ in range(count)
    ]


def float_net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def calibrated(net: nn.Module, way: str, setter: Any = default_calibration_qconfig_setter) -> nn.Module:
    """A calibrated form, in the VALIDATION state."""
    set_march(March.NASH_E)
    if way == "fx":
        model = prepare_qat_fx(copy.deepcopy(net), {"": get_default_qconfig()})
    else:
        model = prepare(copy.deepcopy(net), example_inputs=batches(1)[0], qconfig_setter=setter, out_dir=None)
    set_fake_quantize(model.eval(), FakeQuantState.CALIBRATION)
    for batch in batches():
        model(*batch)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model
