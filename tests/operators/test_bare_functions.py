"""Functions that keep the range of their input, on quantized tensors in eager mode: they keep its scale, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import horizon_plugin_pytorch.nn.functional as operators
from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import bare_functions
from horizon_plugin_pytorch.nn.grid_sample import autocasted_grid_sample_outer
from horizon_plugin_pytorch.qtensor import QTensor, integer_qtensor
from horizon_plugin_pytorch.quantization import DeQuantStub, FakeQuantState, QuantStub, prepare_qat, set_fake_quantize
from tests.routes import assert_one_arithmetic, calibrate, qconfig

X = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
PLACES = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0], [0, 0, 3, 3]])
GRID = torch.rand(1, 5, 5, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool1d": lambda x: F.avg_pool1d(x[0], 3, 2, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "avg_pool2d, padded": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x[0], 3),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)),
    "interpolate, nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "interpolate, bilinear": lambda x: F.interpolate(x, size=(5, 11), mode="bilinear", align_corners=False),
    "interpolate, corners": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True),
    "upsample": lambda x: F.upsample(x, scale_factor=2),
    "grid_sample": lambda x: F.grid_sample(x, GRID, align_corners=False),
    "grid_sample, border": lambda x: F.grid_sample(x, GRID, padding_mode="border", align_corners=True),
    "autocasted_grid_sample_outer": lambda x: autocasted_grid_sample_outer(x, GRID),
    "warp": lambda x: operators.warp(x, GRID),
    "roi_align": lambda x: operators.roi_align(x, [torch.tensor([[0.0, 0, 6, 5]])], (2, 2), sampling_ratio=2),
    "point_pillars_scatter": lambda x: operators.point_pillars_scatter(x[0, 0, :3], PLACES, (1, 8, 4, 4)),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "relu": lambda x: F.relu(x),
    "one after the other": lambda x: F.avg_pool2d(F.interpolate(F.relu(x), scale_factor=2.0, mode="bilinear"), 4),
}


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.quant, self.conv, self.dequant = QuantStub(), nn.Conv2d(4, 4, 1), DeQuantStub()
        self.function, self.last = function, None

    def forward(self, x: Tensor) -> Any:
        x = self.conv(self.quant(x))
        self.last = x, self.function(x)
        return self.dequant(self.last[1])


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)


@pytest.mark.in_turns("dtype", "name")
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_result_is_on_the_grid_of_the_input(name: str, dtype: str, tmp_path: Any) -> None:
    net = Net(FUNCTIONS[name]).eval()
    net.qconfig = qconfig(dtype)
    qat = prepare_qat(net)
    net.last = qat.last = None
    calibrate(qat, (X,))
    qat(X)
    x, y = qat.last
    assert isinstance(y, QTensor) and torch.equal(y.q_scale(), x.q_scale()) and y.dtype == x.dtype
    wanted = FUNCTIONS[name](x.dequantize())
    tolerance = 16 if "sample" in name or "align" in name or name == "warp" else 2  # positions are rounded as well
    assert float((y.dequantize() - wanted).abs().max()) < tolerance * float(x.q_scale())
    net.last = qat.last = None
    assert_one_arithmetic(qat, (X,), tmp_path)


@pytest.mark.parametrize("state", [FakeQuantState.QAT, FakeQuantState.VALIDATION, FakeQuantState.CALIBRATION])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_float(name: str, state: FakeQuantState) -> None:
    net = Net(FUNCTIONS[name]).eval()
    net.qconfig = qconfig("qint16")
    qat = prepare_qat(net)
    qat.last = None
    calibrate(qat, (X,))
    set_fake_quantize(qat, state)
    weight = torch.randn_like(net(X))
    (net(X) * weight).sum().backward()
    (qat(X) * weight).sum().backward()
    assert torch.allclose(qat.conv.weight.grad, net.conv.weight.grad, rtol=0.05, atol=0.05)


def test_what_has_no_form_on_the_grid_says_so() -> None:
    net = Net(lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic")).eval()
    net.qconfig = qconfig()
    with pytest.raises(Exception, match="bicubic.*no quantized form"):
        calibrate(prepare_qat(net), (X,))


def test_new_scales_are_followed() -> None:
    net = Net(FUNCTIONS["avg_pool2d"]).eval()
    net.qconfig = qconfig()
    qat = prepare_qat(net)
    for factor in (1.0, 10.0, 0.1):
        qat.conv.activation_post_process.set_qparams(0.01 * factor)
        set_fake_quantize(qat, FakeQuantState.VALIDATION)
        qat(X * factor)
        assert float(qat.last[1].q_scale()) == pytest.approx(0.01 * factor)


def _resized(size: int) -> Tensor:
    grid = torch.randint(-128, 128, (1, 1, 64, 64), generator=torch.Generator().manual_seed(2)).float()
    return F.avg_pool2d(integer_qtensor(grid, torch.tensor([0.1]), qint8), size, count_include_pad=False).int_repr()


def test_modules_of_calls_are_bounded_in_number_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_march(March.NASH_M)
    kept = bare_functions._Modules()
    monkeypatch.setattr(bare_functions, "_MODULES", kept)
    monkeypatch.setattr(bare_functions, "_MOST", 6)
    wanted = [_resized(size) for size in range(1, 9)]
    assert len(kept) == 6
    monkeypatch.setattr(bare_functions, "_MOST_BYTES", 0)
    monkeypatch.setattr(bare_functions, "_BETWEEN_LOOKS", 1)
    assert all(torch.equal(_resized(size + 1), out) for size, out in enumerate(wanted))
    assert len(kept) == 1


def test_a_tensor_among_the_settings_is_known_by_its_number() -> None:
    """As text both are 0.0625."""
    set_march(March.NASH_M)
    grid = torch.randint(-128, 128, (1, 2, 64, 64), generator=torch.Generator().manual_seed(3)).float()
    x, boxes = integer_qtensor(grid, torch.tensor([0.1]), qint8), [torch.tensor([[0.0, 0, 900, 900]])]

    def align(scale: Any) -> Tensor:
        return operators.roi_align(x, boxes, (4, 4), spatial_scale=scale, sampling_ratio=2).int_repr()

    scale = torch.tensor(0.0625)
    results = [align(scale), align(torch.tensor(0.06254))]
    scale.fill_(0.05)
    for number, out in zip((0.0625, 0.06254), (align(torch.tensor(0.0625)), results[1]), strict=True):
        assert torch.equal(out, align(float(torch.tensor(number)))), number
    assert not torch.equal(*results)
