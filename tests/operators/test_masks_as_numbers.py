"""Masks that a model computes with: near float on every route, also where an operator keeps the scale of its input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    convert_fx,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.routes import assert_one_arithmetic, calibrate, qconfig

torch.manual_seed(0)
X = torch.randn(2, 4, 8, 8)
X = X.sign() * (X.abs() + 0.1)  # far enough from 0 that rounding changes no comparison


class _Masked(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.quant, self.dequant, self.function = QuantStub(), DeQuantStub(), function

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.function(x, (x > 0).float()))


class _Wrapped(_Masked):
    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return self.function(x, (x > 0).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.inner(self.quant(x)))


KEEP_SCALE = {
    "avg_pool2d": lambda x, mask: F.avg_pool2d(mask, 3),
    "interpolate": lambda x, mask: F.interpolate(mask, scale_factor=2.0, mode="bilinear", align_corners=False),
    "grid_sample": lambda x, mask: F.grid_sample(mask, torch.zeros(2, 3, 3, 2) + 0.05, align_corners=False),
    "clamp": lambda x, mask: mask.clamp(0.1, 0.5),
    "relu": lambda x, mask: F.relu(mask) * x,
    "pad": lambda x, mask: F.pad(mask, (1, 1), value=0.5),
}
OWN_SCALE = {
    "mul": lambda x, mask: mask * x,
    "cat": lambda x, mask: torch.cat([mask, x], 1),
    "matmul": lambda x, mask: mask @ x,
    "mean": lambda x, mask: mask.mean(1),
    "softmax": lambda x, mask: F.softmax(mask, -1),
    "two masks": lambda x, mask: mask + (x > -0.05).float(),
    "type": lambda x, mask: (x > 0).type(torch.float32) * x,
    "type by name": lambda x, mask: (x > 0).type(x.type()) * x.type(torch.float32),
}
FUNCTIONS = KEEP_SCALE | OWN_SCALE
ROUTES = ("traced", "run", "wrapped")


def _prepared(route: str, net: nn.Module) -> nn.Module:
    set_march(March.NASH_M)
    config = {"": qconfig()}
    if route == "run":
        return prepare(net.eval(), (X,), qconfig_dict=config, method=PrepareMethod.JIT, out_dir=None)
    return prepare_qat_fx(net.eval(), config)


@pytest.mark.in_turns("route", "name", of=2)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_is_the_numbers_0_and_1(name: str, route: str, tmp_path: Any) -> None:
    net = (_Wrapped if route == "wrapped" else _Masked)(FUNCTIONS[name])
    qat = calibrate(_prepared(route, net), (X,))
    assert_one_arithmetic(qat, (X,), tmp_path)
    with torch.no_grad():
        wanted = net(X)
        assert float((qat(X) - wanted).norm() / wanted.norm()) < 0.03


def test_positions_get_the_gradient_of_float_where_a_mask_is_sampled() -> None:
    grid = torch.full((2, 3, 3, 2), 0.05, requires_grad=True)
    sampled = _Masked(lambda x, mask: F.grid_sample(mask, grid, align_corners=False))
    sampled(X).sum().backward()
    wanted, grid.grad = grid.grad, None
    qat = calibrate(_prepared("traced", sampled), (X,))
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    qat(X).sum().backward()
    assert grid.grad is not None and wanted is not None
    assert float((grid.grad - wanted).norm() / wanted.norm()) < 0.1


@pytest.mark.parametrize("wanted", [torch.int64, torch.float64])
def test_other_types_are_refused_with_what_to_write(wanted: torch.dtype) -> None:
    qat = _prepared("run", _Masked(lambda x, mask: x * (x > 0).to(wanted)))
    with pytest.raises(NotImplementedError, match=r"mask\.float\(\).*mask\.long\(\)"):
        calibrate(qat, (X,))


@pytest.mark.processes
def test_a_script_that_imports_nothing_but_qtensor_can_compute_with_one() -> None:
    script = (
        "import torch; from horizon_plugin_pytorch.qtensor import QTensor; "
        "print(QTensor(torch.tensor([1, 2], dtype=torch.int8), 0.5, 'qint8').reshape(2, 1).shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "torch.Size([2, 1])" in done.stdout, done.stderr


class Positions(nn.Module):
    """Multiplies with positions as numbers, which have no scale of their own."""

    def __init__(self, is_stubbed: bool) -> None:
        super().__init__()
        self.quant, self.dequant, self.stub = QuantStub(), DeQuantStub(), QuantStub() if is_stubbed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        best = F.one_hot(x.argmax(1), 4).permute(0, 3, 1, 2).to(x.dtype)
        return self.dequant(x * self.stub(best))


@pytest.mark.parametrize("is_stubbed", [True, False])
def test_positions_as_numbers_get_a_stub(is_stubbed: bool) -> None:
    set_march(March.NASH_M)
    data = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    net = Positions(is_stubbed).eval()
    qat = prepare(net, (data,), qconfig_dict={"": qconfig("qint16")}, out_dir=None)
    calibrate(qat, (data,))
    assert torch.equal(convert_fx(qat)(data), qat(data))
    assert torch.allclose(qat(data), net(data), atol=1e-3)
