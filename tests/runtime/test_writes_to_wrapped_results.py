"""Assignments into tensors that wrapped code gave, in code that tracing enters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    calibrate,
    convert,
    get_default_qconfig,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.utils.fx_helper import wrap
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import run_onnx


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(4, 4, 1)

    @wrap()
    def features(self, x: Tensor) -> Tensor:
        return self.conv(x) + x

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(self.quant(x))
        out = y.clone()
        out[:, :2] = y[:, :2] * 0.5
        out[:, -1] = y[:, 0]
        out[..., :1] = y[..., :1]
        return self.dequant(out + y)


def test_writes_are_seen_by_what_reads_later(tmp_path: Path) -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 4, 6, 6)
    prepared = prepare_qat_fx(net, {"": get_default_qconfig(activation_qkwargs={"dtype": "qint16"})})
    calibrate(prepared, [x], progress=False)
    out, want = prepared(x), net(x)
    assert (out - want).norm() / want.norm() < 0.005
    quantized = convert(prepared)
    assert torch.equal(quantized(x), out)
    file = export_quantized_onnx(quantized, (x,), tmp_path / "net.onnx")
    assert torch.equal(run_onnx(file, [x])[0], out)
