"""Functions of torch.jit in the quantized part run as their Python, on every route."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    prepare_qat,
    prepare_qat_fx,
)
from tests.routes import assert_one_arithmetic, calibrate, prepared_on, qconfig

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


@torch.jit.script
def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


@torch.jit.script
def pooled(parts: list[Tensor]) -> Tensor:
    return F.avg_pool2d(parts[0], 2)


swish = torch.jit.trace(lambda x: F.silu(x) * 2.0, X)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(4, 4, 1)

    def inner(self, x: Tensor) -> Tensor:
        return swish(gated(self.conv(x), gate=x))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.inner(self.quant(x)))


class _Wrapped(_Net):
    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return swish(gated(self.conv(x), gate=x))


class _Pooled(_Net):
    def inner(self, x: Tensor) -> Tensor:
        return pooled([self.conv(x)])


def _prepared(route: str) -> tuple[nn.Module, nn.Module]:
    set_march(March.NASH_M)
    net = {"wrapped": _Wrapped, "eager": _Pooled}.get(route, _Net)().eval()
    return net, prepared_on(route, net, (X,))


@pytest.mark.parametrize("route", ["traced", "SYMBOLIC", "JIT", "JIT_STRIP", "wrapped", "eager"])
def test_a_script_function_is_quantized_as_its_python(route: str, tmp_path: Any) -> None:
    net, qat = _prepared(route)
    assert_one_arithmetic(calibrate(qat, (X,)), (X,), tmp_path)
    with torch.no_grad():
        wanted = net(X)
        assert float((qat(X) - wanted).norm() / wanted.norm()) < 0.05


def test_a_script_function_without_its_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, qat = _prepared("eager")
    monkeypatch.delattr(pooled, "_torchdynamo_inline")
    with pytest.raises(UnsupportedOperatorError, match=r"`pooled` \(test_scripted.py:\d+\).*Call the Python function"):
        calibrate(qat, (X,))


def test_script_functions_of_float_tensors_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pooled, "_torchdynamo_inline")
    assert torch.equal(pooled([X]), F.avg_pool2d(X, 2))


class _ScriptedHead(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()))

    def inner(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_a_script_module_is_refused_with_its_line() -> None:
    set_march(March.NASH_M)
    with pytest.raises(UnsupportedOperatorError, match=r"at `head` \(test_scripted.py:\d+\)"):
        prepare_qat_fx(_ScriptedHead().eval(), {"": qconfig()})
    net = _ScriptedHead().eval()
    net.qconfig = qconfig()
    with pytest.raises(NotImplementedError, match=r"forward of a torch.jit.ScriptModule` \(test_scripted.py:\d+\)"):
        calibrate(prepare_qat(net, inplace=False), (X,))


@pytest.mark.parametrize("route", ["eager", "traced", "SYMBOLIC", "JIT"])
@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, X)], ids=["script", "trace"])
def test_a_model_that_is_torchscript_is_refused(route: str, make: Any) -> None:
    with pytest.raises(TypeError, match="this one is TorchScript.*Give the model that was scripted or traced"):
        prepared_on(route, make(nn.Conv2d(4, 4, 1)), [X])
