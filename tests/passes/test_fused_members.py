"""What is left of the members of a fused operator: `nn.Identity`, as the guides print it, on every method."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    calibrate,
    convert,
    fuse_modules,
    get_default_qconfig,
    prepare,
)

X = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.conv2, self.bn2, self.add, self.relu2 = (
            nn.Conv2d(3, 3, 1),
            nn.BatchNorm2d(3),
            FloatFunctional(),
            nn.ReLU6(),
        )
        self.asked: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.asked = [isinstance(m, nn.Identity) for m in (self.bn, self.relu, self.conv2)]
        x = self.quant(x)
        y = self.relu(self.bn(self.conv(x)))
        y = self.bn2(self.conv2(y))
        return self.dequant(self.relu2(self.add.add(y, x)))


MEMBERS = ("bn", "relu", "conv2", "bn2", "relu2")


@pytest.fixture(params=list(PrepareMethod), ids=str)
def model(request: Any) -> nn.Module:
    net = Net().eval()
    if request.param is PrepareMethod.EAGER:
        net = fuse_modules(net, [["conv", "bn", "relu"], ["conv2", "bn2", "add", "relu2"]])
    net.qconfig = get_default_qconfig()
    made = prepare(net, (X,), method=request.param, out_dir=None)
    calibrate(made, [X], progress=False)
    return made


def test_members_are_identities(model: nn.Module) -> None:
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), convert(model)):
        left = [one.get_submodule(path) for path in MEMBERS]
        assert all(isinstance(module, nn.Identity) for module in left)
        assert [str(module) for module in left] == ["Identity()"] * len(MEMBERS)
        assert [module.__class__ for module in left] == [nn.Identity] * len(MEMBERS)
        assert not isinstance(one.get_submodule("conv"), nn.Identity)
        with torch.no_grad():
            assert torch.equal(one(X), model(X))


def test_the_forward_of_the_model_is_told_what_it_was_told_in_float() -> None:
    net = Net().eval()
    net.qconfig = get_default_qconfig()
    model = prepare(net, (X,), out_dir=None)
    model(X)
    assert model.asked == [False, False, False]
