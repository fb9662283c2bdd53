"""Divisors that are small beside the largest: they count as 1/256 of it, and that is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.routes import qconfig


class Quotient(nn.Module):
    def __init__(self, is_function: bool) -> None:
        super().__init__()
        self.quant, self.other, self.dequant, self.f = QuantStub(), QuantStub(), DeQuantStub(), FloatFunctional()
        self.is_function = is_function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.quant(x), self.other(y)
        return self.dequant(x / y if self.is_function else self.f.div(x, y))


def _told(is_function: bool, smallest: float, dtype: str) -> list[Any]:
    set_march(March.NASH_M)
    qat = prepare_qat_fx(Quotient(is_function).eval(), {"": qconfig(dtype)}).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    divisor = torch.tensor([smallest, 0.0, 1.0, -2.0])
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(2):
            qat(torch.ones(4), divisor)
    return [w for w in caught if issubclass(w.category, QuantizationWarning) and "divides by" in str(w.message)]


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("is_function", [False, True])
def test_a_small_divisor_is_told_once_with_module_and_remedy(is_function: bool, dtype: str) -> None:
    (told,) = _told(is_function, 0.0005, dtype)
    path = "_generated_div_0" if is_function else "f"
    assert f"at `{path}` (test_division.py:" in str(told.message) and "y.clamp(min=...)" in str(told.message)
    assert "between 0.0005 and 2, and those below 1/256 of the largest count as that (0.00781)" in str(told.message)
    assert "15.6 times too small" in str(told.message)


@pytest.mark.parametrize("is_function", [False, True])
def test_nothing_is_said_of_divisors_that_count_as_what_they_are(is_function: bool) -> None:
    assert not _told(is_function, 0.008, "qint16")
