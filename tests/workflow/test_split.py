"""Models cut into the parts of the chip and those of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    calibrate,
    convert_fx,
    get_default_qconfig,
    prepare_qat_fx,
)
from horizon_plugin_pytorch.quantization.fx import split_compilable_model

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Mixed(nn.Module):
    """Float work before, between and after two quantized parts, and a path around them."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.again, self.out = QuantStub(), DeQuantStub(), QuantStub(), DeQuantStub()
        self.conv, self.head, self.add = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), FloatFunctional()
        self.bias = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scaled = x * 2
        y = self.quant(scaled)
        y = self.dequant(self.add.add(self.conv(y), y).permute(0, 1, 3, 2))
        z = self.again(torch.erf(y) + self.bias)
        return self.out(self.head(z) * z).softmax(1), scaled + y


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.prelu, self.last = nn.Conv2d(3, 3, 1), nn.PReLU(), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.last(self.prelu(self.first(self.quant(x)))))


def models(net: nn.Module, hybrid: bool = False) -> list:
    model = prepare_qat_fx(net.eval(), {"": get_default_qconfig()}, hybrid=hybrid)
    calibrate(model, [X], progress=False)
    return [model, convert_fx(model)]


def same(a: object, b: object) -> bool:
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return all(map(torch.equal, a, b))


@torch.no_grad()
def test_parts_alternate_and_give_the_same_numbers() -> None:
    for model in models(Mixed()):
        parts = split_compilable_model(model)
        names = [name for name, _ in parts.named_children()]
        assert names == ["non_compilable_0", "compilable_1", "non_compilable_2", "compilable_3", "non_compilable_4"]
        assert same(parts(X), model(X)) and same(parts(2 * X), model(2 * X))
        assert parts.compilable_1.add is model.add
        assert not list(parts.non_compilable_0.children())
        assert parts.non_compilable_2.bias is model.bias


class Bare(nn.Module):
    """It gives a parameter, an input and a number as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 3, 1)
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict:
        return {"w": self.weight, "x": x, "y": [self.dequant(self.conv(self.quant(x))), 3]}


@torch.no_grad()
def test_outputs_that_no_part_computes() -> None:
    for model in models(Bare()):
        parts = split_compilable_model(model)
        assert [name for name, _ in parts.named_children()] == ["compilable_0"]
        found, expected = parts(X), model(X)
        assert found["x"] is X and torch.equal(found["w"], expected["w"]) and found["y"][1] == 3
        assert torch.equal(found["y"][0], expected["y"][0])


@torch.no_grad()
def test_a_hybrid_model_is_cut_at_the_operators_of_the_cpu() -> None:
    for model in models(Between(), hybrid=True):
        parts = split_compilable_model(model)
        names = [name for name, _ in parts.named_children()]
        assert names == ["compilable_0", "non_compilable_1", "compilable_2"]
        assert [name for name, _ in parts.non_compilable_1.named_children()] == ["prelu"]
        assert same(parts(X), model(X))


def test_what_has_no_graph_is_refused() -> None:
    with pytest.raises(TypeError, match="prepare_qat_fx or convert_fx, got Mixed"):
        split_compilable_model(Mixed())
