"""`optimize_graph`: on Bernoulli, what a cat takes and what it gives have one scale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
    get_default_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.routes import assert_one_arithmetic, calibrate

X = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0))
Y = 5 * X.flip(3)
INT8 = {"": get_default_qconfig()}


class Cats(nn.Module):
    def __init__(self, function: Any, scale: float | None = None) -> None:
        super().__init__()
        self.q1, self.q2, self.dequant, self.function = QuantStub(scale=scale), QuantStub(), DeQuantStub(), function
        self.cat, self.cat2, self.add, self.conv = (
            FloatFunctional(),
            FloatFunctional(),
            FloatFunctional(),
            nn.Conv2d(2, 2, 1),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.dequant(self.function(self, self.q1(x), self.q2(y)))


def scales(model: nn.Module, *paths: str) -> list[float]:
    return [float(model.get_submodule(path).activation_post_process.scale) for path in paths]


CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "a FloatFunctional": (lambda m, x, y: m.cat.cat([x, y], 1), ["q1", "q2", "cat"], []),
    "torch.cat": (lambda m, x, y: torch.cat([x, y], 1), ["q1", "q2", "_generated_cat_0"], []),
    "through what keeps the scale": (
        lambda m, x, y: m.cat.cat([F.max_pool2d(x, 2), y[..., ::2, ::2]], 1),
        ["q1", "q2", "cat"],
        [],
    ),
    "a layer": (lambda m, x, y: m.cat.cat([m.conv(x), y], 1), ["conv", "q2", "cat"], ["q1"]),
    "one cat into the next": (
        lambda m, x, y: m.cat2.cat([m.cat.cat([x, y], 1), m.conv(y)], 1),
        ["q1", "q2", "cat", "conv", "cat2"],
        [],
    ),
    "two cats that share an operand": (
        lambda m, x, y: m.add.add(m.cat.cat([x, y], 1), m.cat2.cat([m.conv(y), y], 1)),
        ["q1", "q2", "cat", "conv", "cat2"],
        ["add"],
    ),
}


@pytest.mark.parametrize("march", [March.BERNOULLI, March.BERNOULLI2])
@pytest.mark.parametrize("name", CASES)
def test_scales_of_a_cat_are_one(march: March, name: str, tmp_path: Any) -> None:
    set_march(march)
    function, tied, free = CASES[name]
    model = prepare_qat_fx(Cats(function), INT8, optimize_graph=True)
    model(X, Y)
    assert len(set(scales(model, *tied))) == 1
    assert not set(scales(model, *free)) & set(scales(model, *tied))
    calibrate(model, (X, Y))
    assert len(set(scales(model, *tied))) == 1
    model = copy.deepcopy(model)
    quantized = assert_one_arithmetic(model, (X, Y), tmp_path)
    assert len({float(quantized.get_submodule(path).scale) for path in tied}) == 1


def test_the_scale_covers_all_operands() -> None:
    set_march(March.BERNOULLI2)
    model = prepare_qat_fx(Cats(CASES["a FloatFunctional"][0]), INT8, optimize_graph=True)
    calibrate(model, (X, Y))
    assert scales(model, "q1") == pytest.approx([float(Y.abs().max()) / 127.5])
    with torch.no_grad():
        assert float((model(X, Y) - torch.cat([X, Y], 1)).abs().max()) <= 0.51 * scales(model, "cat")[0]


def test_without_it_every_operand_has_its_own() -> None:
    set_march(March.BERNOULLI2)
    model = prepare_qat_fx(Cats(CASES["a FloatFunctional"][0]), INT8)
    calibrate(model, (X, Y))
    assert scales(model, "q1") != scales(model, "q2")


def test_checkpoints_load_into_tied_scales() -> None:
    set_march(March.BERNOULLI2)
    one, other = (prepare_qat_fx(Cats(CASES["a layer"][0]), INT8, optimize_graph=True) for _ in range(2))
    calibrate(one, (X, Y))
    other.load_state_dict(one.state_dict())
    assert scales(other, "conv", "q2", "cat") == scales(one, "conv", "q2", "cat")
    with torch.no_grad():
        assert torch.equal(convert_fx(other)(X, Y), convert_fx(one)(X, Y))


def test_a_fixed_scale_cannot_be_tied_and_is_told() -> None:
    set_march(March.BERNOULLI2)
    with pytest.warns(QuantizationWarning, match="`q1` has a fixed scale"):
        prepare_qat_fx(Cats(CASES["a FloatFunctional"][0], scale=1 / 128), INT8, optimize_graph=True)


def eager(model: nn.Module, **kwargs: Any) -> nn.Module:
    model.qconfig = get_default_qconfig()
    return prepare_qat(model, optimize_graph=True, **kwargs)


def test_eager_mode_ties_with_example_inputs() -> None:
    set_march(March.BERNOULLI2)
    model = eager(Cats(CASES["a FloatFunctional"][0]), example_inputs=(X, Y))
    model(X, Y)
    assert len(set(scales(model, "q1", "q2", "cat"))) == 1


@pytest.mark.parametrize(
    "kwargs",
    [
        {"opt_types": ("unify_inputs_scale",), "methods": ("add",)},
        {"opt_types": "unify_inputs_scale", "module_prefixes": ("add",)},
        {"functions": [torch.add]},
    ],
)
def test_eager_mode_ties_what_it_is_told(kwargs: dict) -> None:
    set_march(March.BERNOULLI2)
    net = Cats(lambda m, x, y: m.add.add(m.cat.cat([x, y], 1), m.cat2.cat([y, x], 1)))
    model = eager(net, example_inputs=(X, Y), optimize_kwargs=kwargs)
    model(X, Y)
    assert len(set(scales(model, "cat", "cat2", "add"))) == 1
    assert scales(model, "q1") != scales(model, "cat")


def test_what_cannot_act_is_told() -> None:
    net = Cats(CASES["a FloatFunctional"][0])
    set_march(March.BAYES)
    with pytest.warns(QuantizationWarning, match="Bernoulli chips only"):
        prepare_qat_fx(net, INT8, optimize_graph=True)
    set_march(March.BERNOULLI2)
    with pytest.warns(QuantizationWarning, match="optimize_graph needs example_inputs"):
        eager(copy.deepcopy(net))
    with pytest.raises(QuantizationConfigError, match="optimize_kwargs takes"):
        eager(copy.deepcopy(net), optimize_kwargs={"opt_types": "fold"})


@pytest.mark.parametrize("quantizer", ["fake_quant", "lsq", "pact"])
@pytest.mark.parametrize("observer", ["percentile", "mse"])
def test_scales_stay_one_while_they_are_trained(quantizer: str, observer: str) -> None:
    set_march(March.BERNOULLI2)
    chosen = get_default_qconfig(activation_fake_quant=quantizer, activation_observer=observer)
    model = prepare_qat_fx(Cats(CASES["a layer"][0]), {"": chosen}, optimize_graph=True)
    calibrate(model, (X, Y))
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(X, Y).square().sum().backward()
        optimizer.step()
    assert len(set(scales(model, "conv", "q2", "cat"))) == 1
    set_fake_quantize(model.eval(), FakeQuantState.VALIDATION)
    with torch.no_grad():
        assert torch.equal(convert_fx(model)(X, Y), model(X, Y))
