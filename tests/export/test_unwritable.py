"""What no ONNX file can hold is said at prepare, with its line."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, PrepareMethod, QuantStub, convert_fx, prepare
from horizon_plugin_pytorch.quantization.qconfig_template import default_qat_qconfig_setter
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx


class Net(nn.Module):
    def __init__(self, after: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 4, 1)
        self.lstm, self.bilinear = nn.LSTM(4, 3), nn.Bilinear(4, 4, 2)
        self.register_buffer("camera", torch.eye(4) + 0.1)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.dequant(self.conv(self.quant(x))))


WRITTEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "softmax": lambda net, y: F.softmax(y, 1),
    "topk": lambda net, y: y.flatten(1).topk(3)[1],
    "constant-inverse": lambda net, y: y @ torch.linalg.inv(net.camera),
    "gather": lambda net, y: y.gather(1, y.argmax(1, keepdim=True)),
    "constant-index": lambda net, y: y[:, torch.tensor([2, 0])],
    "lstm": lambda net, y: net.lstm(y[0])[0],
    "pooling": lambda net, y: F.max_pool2d(y, 2, return_indices=True)[0],
    "in-place": lambda net, y: y.clone().mul_(2).clamp_(0, 1),
    "resize": lambda net, y: F.interpolate(y, scale_factor=2, mode="bilinear"),
}
REFUSED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "inverse": lambda net, y: torch.linalg.inv(y + net.camera),
    "bessel": lambda net, y: torch.special.bessel_j0(y),
    "norm": lambda net, y: y.norm(p=3),
    "mask": lambda net, y: y[y > 0],
    "distances": lambda net, y: torch.cdist(y, y + 1),
}


def _told(net: nn.Module, method: str, out_dir: str | None) -> tuple[nn.Module, list[str]]:
    set_march(March.NASH_E)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared = prepare(net, (_data(),), default_qat_qconfig_setter, method, out_dir=out_dir)
    return prepared, [str(w.message) for w in caught if "ONNX file" in str(w.message)]


def _data() -> Tensor:
    return torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [*WRITTEN, *REFUSED])
def test_prepare_says_what_export_will_refuse(name):
    prepared, told = _told(Net({**WRITTEN, **REFUSED}[name]), "jit-strip", None)
    prepared(_data())
    try:
        export_quantized_onnx(convert_fx(prepared.eval()), _data(), io.BytesIO())
    except ExportError:
        assert name in REFUSED
    else:
        assert name in WRITTEN
    assert len(told) == (name in REFUSED)
    assert all(re.search(r"in the top module \(test_unwritable.py:\d+\)", text) for text in told)


@pytest.mark.parametrize("out_dir", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("method", [m.value for m in PrepareMethod])
def test_every_method_says_it_once(method, out_dir, tmp_path):
    net = Net(lambda net, y: torch.special.bessel_j0(y) + torch.special.bessel_j0(y * 2))
    _, told = _told(net, method, str(tmp_path) if out_dir else None)
    assert len(told) == 1
    assert told[0].count("bessel") == 1


def test_nothing_is_computed_otherwise():
    net = Net(lambda net, y: F.dropout(y, 0.5, training=True))
    before = torch.get_rng_state()
    _told(net, "jit-strip", None)
    assert torch.equal(before, torch.get_rng_state())
