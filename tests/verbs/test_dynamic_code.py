"""Code that runs otherwise than when the model was prepared follows, or an error names the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import UnknownCallError
from horizon_plugin_pytorch.nn import operator_table
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert
from horizon_plugin_pytorch.quantization.prepare import prepare
from tests.routes import as_numbers, calibrate, mismatches, qconfig

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Stubbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(4, 4, 1)


def _calibrated(model: nn.Module, *inputs: Any) -> nn.Module:
    torch.manual_seed(0)
    return calibrate(prepare(model.eval(), inputs, qconfig_dict={"": qconfig()}, out_dir=None), inputs)


class Axes(Stubbed):
    """One line, several axes."""

    def forward(self, x: Tensor, dims: tuple = (1, 2)) -> Tensor:
        x = self.conv(self.quant(x))
        for dim in dims:
            x = F.softmax(x, dim)
        return self.dequant(x)


class Sizes(Stubbed):
    """Sizes that are read from tensors."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        small = F.avg_pool2d(x, 2)
        return self.dequant(F.interpolate(small, size=x.shape[2:]) + x)


class Windows(Stubbed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        return self.dequant(F.avg_pool2d(x, tuple(x.shape[2:])))


class Weights(Stubbed):
    """One line, several layers written as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        for weight in self.weights:
            x = F.conv2d(x, weight)
        return self.dequant(x)


def test_a_line_with_several_axes_has_a_module_for_each() -> None:
    qat = _calibrated(Axes(), X)
    assert [n for n, _ in qat.named_children() if "softmax" in n] == ["_generated_softmax_0", "_generated_softmax_1"]
    quantized = convert(qat)
    with torch.no_grad():
        for dims in ((1, 2), (2, 1), (2,), (1, 1)):
            assert mismatches(as_numbers(qat(X, dims)), as_numbers(quantized(X, dims))) == 0
        wanted = qat.conv(qat.quant(X)).dequantize().softmax(1).softmax(2)
        assert torch.allclose(qat(X), wanted, atol=0.01)


def test_an_axis_that_was_not_met_is_named() -> None:
    qat = _calibrated(Axes(), X)
    for model in (qat, convert(qat)):
        with pytest.raises(
            UnknownCallError, match=r"`softmax` .*\(test_dynamic_code.py:\d+\).*dim is 3 and was 1.*Prepare"
        ):
            model(X, (3,))


def test_a_size_is_followed_where_the_operator_takes_it_and_named_where_not() -> None:
    larger = torch.randn(1, 4, 12, 12)
    qat = _calibrated(Sizes(), X)
    with torch.no_grad():
        assert mismatches(as_numbers(qat(larger)), as_numbers(convert(qat)(larger))) == 0
    with pytest.raises(UnknownCallError, match=r"kernel_size is \(12, 12\) and was \(8, 8\)"):
        _calibrated(Windows(), X)(larger)


def test_a_line_with_several_weights_has_a_layer_for_each() -> None:
    model = Weights().eval()
    qat = _calibrated(model, X)
    quantized = convert(qat)
    with torch.no_grad():
        found = as_numbers(qat(X))
        assert mismatches(found, as_numbers(quantized(X))) == 0
        assert torch.allclose(found[0], model(X), atol=1)  # of about 20
    assert {"_generated_conv2d_0", "_generated_conv2d_1"} <= dict(qat.named_children()).keys()
    assert qat._generated_conv2d_1.weight is qat.weights[1]


def test_running_makes_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    qat = _calibrated(Axes(), X)
    monkeypatch.setattr(operator_table.Call, "make", lambda self: pytest.fail("made a module"))
    qat(X)
