"""A layer that calls share, with batch norms after it: folded in where every call has the same one, else not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.passes.fuse import shared_with_norm
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert, get_default_qconfig
from horizon_plugin_pytorch.quantization.prepare import prepare
from tests.routes import as_numbers, calibrate, mismatches

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
FORWARDS: dict[
    str, tuple[Callable, bool]
] = {  # the calls, and whether each has the same batch norm and no other reader
    "the same norm": (lambda m, x: m.bn(m.conv(x)) + m.bn(m.conv(x * 0.5)), True),
    "two norms": (lambda m, x: m.bn(m.conv(x)) + m.other(m.conv(x * 0.5)), False),
    "a norm and none": (lambda m, x: m.bn(m.conv(x)) + m.conv(x * 0.5), False),
    "none and a norm": (lambda m, x: m.conv(x * 0.5) + m.bn(m.conv(x)), False),
    "another reader": (lambda m, x: m.bn(m.conv(x)) + m.read_twice(m.conv(x * 0.5)), False),
    "two norms on one result": (lambda m, x: m.bn(m.conv(x)) + m.normed_twice(m.conv(x * 0.5)), False),
    "one call": (lambda m, x: m.bn(m.conv(x)) + m.other(x), False),
    "one call, two norms": (lambda m, x: m.normed_twice(m.conv(x)), False),
}


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        for norm, at in ((self.bn, 3.0), (self.other, -2.0)):
            nn.init.uniform_(norm.weight, 1.5, 2.5)
            nn.init.constant_(norm.running_mean, at)

    def read_twice(self, y: Tensor) -> Tensor:
        return self.bn(y) + y

    def normed_twice(self, y: Tensor) -> Tensor:
        return self.bn(y) + self.other(y)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(FORWARDS[self.name][0](self, self.quant(x)))


class Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return not isinstance(module, Net)


@pytest.mark.parametrize("name", FORWARDS)
def test_the_pairs_that_can_be_folded_are_found(name: str) -> None:
    model = Net(name)
    found = shared_with_norm(fx.GraphModule(model, Tracer().trace(model)))
    assert found == (["conv", "bn"] if FORWARDS[name][1] else [])


@pytest.mark.parametrize("own_scales", [False, True])
@pytest.mark.parametrize("method", ["symbolic", "jit-strip"])
@pytest.mark.parametrize("name", FORWARDS)
def test_every_call_keeps_its_norm(name: str, method: str, own_scales: bool) -> None:
    model = Net(name).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qconfigs = {"": get_default_qconfig()}
        qat = prepare(model, (X,), qconfig_dict=qconfigs, method=method, own_scales=own_scales, out_dir=None)
        calibrate(qat, (X,))
        found, wanted = qat(X), model(X)
        assert mismatches(as_numbers(found), as_numbers(convert(qat)(X))) == 0
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
