"""Results that leave a model without a DeQuantStub are trained as those with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    get_default_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig import default_qat_8bit_weight_32bit_out_fake_quant_qconfig as real
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter

X = torch.randn(1, 4, 8, 8)


def _prepared(net: nn.Module, method: PrepareMethod) -> nn.Module:
    return prepare(net, (X,), default_calibration_qconfig_setter, method=method, out_dir=None)


def _with_real_output(net: nn.Module) -> nn.Module:
    net.qconfig, net[1].qconfig = get_default_qconfig(), real
    return net


ROUTES: dict[str, Callable[[nn.Module], nn.Module]] = {
    **{m.value: lambda net, m=m: _prepared(net, m) for m in PrepareMethod if m is not PrepareMethod.EAGER},
    "prepare_qat_fx": lambda net: prepare_qat_fx(net, {"": get_default_qconfig()}),
    "prepare_qat_fx, high precision": lambda net: prepare_qat_fx(_with_real_output(net)),
    "prepare_qat, high precision": lambda net: prepare_qat(_with_real_output(net)),
}
READ: dict[str, Callable[[Tensor], Tensor]] = {
    "dequantize": lambda y: y.dequantize(),
    "reshaped": lambda y: y.reshape(-1).dequantize(),
    "a part": lambda y: y[:, 1:].dequantize(),
    "a copy": lambda y: y.clone().to("cpu").contiguous().dequantize(),
}


@pytest.mark.parametrize("state", [FakeQuantState.CALIBRATION, FakeQuantState.QAT, FakeQuantState.VALIDATION])
@pytest.mark.parametrize("route", ROUTES)
def test_an_output_without_a_dequantstub_has_a_gradient(route: str, state: FakeQuantState) -> None:
    set_march(March.NASH_M)
    model = ROUTES[route](nn.Sequential(QuantStub(), nn.Conv2d(4, 4, 1)))
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    model(X)
    set_fake_quantize(model, state)
    for name, read in READ.items():
        if name != "dequantize" and type(model(X)).__name__ == "RealOutput":
            continue  # an ordinary tensor after any function
        model.zero_grad()
        read(model(X)).pow(2).mean().backward()
        assert float(model.get_submodule("1").weight.grad.abs().sum()) > 0, name


@pytest.mark.parametrize("route", ROUTES)
def test_an_output_with_a_dequantstub_is_an_ordinary_tensor(route: str) -> None:
    set_march(March.NASH_M)
    model: Any = ROUTES[route](nn.Sequential(QuantStub(), nn.Conv2d(4, 4, 1), DeQuantStub()))
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    assert type(model(X)) is Tensor
