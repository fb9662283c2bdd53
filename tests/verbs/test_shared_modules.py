"""A module that is called several times has one scale for all its results."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QConfig, QuantStub, prepare_qat_fx
from horizon_plugin_pytorch.quantization.fake_cast import default_fp16_fake_cast
from tests.routes import qconfig


class _Twice(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.quant, self.dequant, self.functional = QuantStub(), DeQuantStub(), FloatFunctional()
        self.silu, self.relu, self.pool, self.sigmoid = nn.SiLU(), nn.ReLU(), nn.MaxPool2d(1), nn.Sigmoid()
        self.alias = self.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.function(self, self.quant(x)))


@pytest.mark.parametrize(
    ("function", "path"),
    [
        (lambda m, x: m.silu(m.silu(x) * 8.0), "silu"),
        (lambda m, x: m.alias(m.silu(x) * 8.0), "silu"),
        (lambda m, x: m.functional.mul(m.functional.add(x, x), x), "functional"),
        (lambda m, x: m.quant(m.dequant(x)) + x, "quant"),
    ],
)
def test_a_shared_scale_is_worth_a_warning(function: Any, path: str) -> None:
    with pytest.warns(QuantizationWarning, match=rf"`{path}` \(2 calls, test_shared_modules.py:\d+.*of its own"):
        prepare_qat_fx(_Twice(function), {"": qconfig()})


@pytest.mark.parametrize(
    "function", [lambda m, x: m.relu(m.relu(x) * 8.0), lambda m, x: m.pool(m.pool(x)), lambda m, x: m.silu(x)]
)
def test_modules_without_a_scale_of_their_own_can_be_shared(function: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_qat_fx(_Twice(function), {"": qconfig()})


def test_float16_has_no_scale_to_share() -> None:
    set_march(March.NASH_P)
    model = _Twice(lambda m, x: m.silu(m.silu(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_qat_fx(
            model, {"": qconfig(), "module_name": [("silu", QConfig(activation=default_fp16_fake_cast, weight=None))]}
        )
