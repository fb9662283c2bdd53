"""Functions with a backward of their own, by tracing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, get_default_qconfig, prepare_qat_fx
from horizon_plugin_pytorch.utils.fx_helper import wrap


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.fc = QuantStub(), DeQuantStub(), nn.Linear(4, 4)

    def end(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.dequant(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.fc(self.quant(x)))


class Wrapped(Net):
    end = wrap()(Net.end)


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)


def _gradient(net: nn.Module) -> Tensor:
    net(torch.ones(2, 4)).sum().backward()
    return net.fc.bias.grad


def test_a_backward_that_tracing_loses_is_told() -> None:
    before = torch.autograd.Function.apply
    with pytest.warns(QuantizationWarning, match=r"`Reversed` \(test_own_backwards.py:\d+\).*fx_helper.wrap"):
        prepared = prepare_qat_fx(Net(), {"": get_default_qconfig()})
    assert bool((_gradient(prepared) > 0).all())
    assert torch.autograd.Function.apply == before


def test_wrapped_code_keeps_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared = prepare_qat_fx(Wrapped(), {"": get_default_qconfig()})
    assert bool((_gradient(prepared) < 0).all())
