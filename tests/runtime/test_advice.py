"""What has no quantized form is refused with the same advice on every route, and with the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import HorizonError
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    prepare,
    prepare_qat,
    prepare_qat_fx,
)
from tests.routes import calibrate, qconfig

X = torch.randn(2, 4, 8, 8)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "hstack": (lambda x: torch.hstack([x, x]), "torch.cat"),
    "remainder": (lambda x: x % 1.0, "whole period"),
    "floor-divide": (lambda x: x // 0.3, r"torch\.floor"),
    "product": (lambda x: x.prod(-1), "add logarithms"),
    "unknown": (lambda x: x.cummax(-1)[0], "DeQuantStub before and a QuantStub after"),
    "mode": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), "mode='nearest'"),
}


class _Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.quant, self.dequant, self.function = QuantStub(), DeQuantStub(), function

    def inner(self, x: Tensor) -> Tensor:
        return self.function(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.inner(self.quant(x)))


class _Wrapped(_Net):
    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return self.function(x)


def _calibrated(net: nn.Module, route: str) -> nn.Module:
    if route == "eager":
        return calibrate(prepare_qat(net, inplace=False), (X,))
    if route == "run":
        return prepare(net, (X,), method=PrepareMethod.JIT, out_dir=None)
    return calibrate(prepare_qat_fx(net), (X,))


@pytest.mark.parametrize("route", ["traced", "run", "wrapped", "eager"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_advice_of_an_operator_is_given_on_every_route(name: str, route: str) -> None:
    set_march(March.NASH_M)
    function, advice = FUNCTIONS[name]
    net = (_Wrapped if route == "wrapped" else _Net)(function).eval()
    net.qconfig = qconfig()
    with pytest.raises((HorizonError, NotImplementedError), match=rf"(?s)test_advice.py:\d+.*{advice}"):
        _calibrated(net, route)
