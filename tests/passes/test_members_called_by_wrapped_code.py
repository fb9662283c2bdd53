"""A module that traced code and wrapped code both call is the same to both, though one of them could be fused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    calibrate,
    convert,
    fuse_fx,
    get_default_qconfig,
    prepare,
)
from horizon_plugin_pytorch.utils.fx_helper import wrap


class Net(nn.Module):
    """Layers, and code that may use one of them once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant, self.relu, self.sum = QuantStub(), DeQuantStub(), nn.ReLU(), FloatFunctional()
        self.conv, self.bn, self.last = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.bn.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
        self.bn.running_var.uniform_(0.3, 0.6)  # type: ignore[union-attr]

    def decode(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.decode(x)
        z = self.relu(self.bn(self.conv(y)))
        return self.dequant(self.sum.add(self.last(z), x))


class Relu(Net):
    @wrap()
    def decode(self, x: Tensor) -> Tensor:
        return self.relu(x)


class ReluByName(Net):
    @wrap()
    def decode(self, x: Tensor) -> Tensor:
        for kind in ("re", "lu"):
            if kind == "lu":
                x = getattr(self, f"re{kind}")(x)
        return x


class Norm(Net):
    @wrap()
    def decode(self, x: Tensor) -> Tensor:
        return self.bn(x)


class Layer(Net):
    @wrap()
    def decode(self, x: Tensor) -> Tensor:
        return self.conv(x)


class LastLayer(Net):
    @wrap()
    def decode(self, x: Tensor) -> Tensor:
        return self.last(x)


class Sum(Net):
    @wrap()
    def decode(self, x: Tensor) -> Tensor:
        return self.sum.add(x, x)


class Helper(Net):
    def help(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(x))

    @wrap()
    def decode(self, x: Tensor) -> Tensor:
        return self.help(x)


@pytest.mark.parametrize("cls", [Relu, ReluByName, Norm, Layer, LastLayer, Sum, Helper])
def test_a_module_of_traced_and_wrapped_code_is_not_fused_away(cls: type[Net]) -> None:
    set_march(March.NASH_M)
    net, x = cls().eval(), torch.randn(4, 4, 8, 8)
    with torch.no_grad():
        want = net(x)
        torch.testing.assert_close(fuse_fx(net)(x), want)
        found = []
        for method in (PrepareMethod.SYMBOLIC, PrepareMethod.JIT_STRIP):
            qconfig_dict = {"": get_default_qconfig(activation_qkwargs={"dtype": "qint16"})}
            model = prepare(net, (x,), qconfig_dict=qconfig_dict, method=method, out_dir=None)
            calibrate(model, [(x,)], progress=False)
            found.append(model(x))
            assert torch.equal(convert(model)(x), found[-1])
    assert all((y - want).norm() < 0.02 * want.norm() for y in found)
