"""What the user's `evaluate` does to a model is undone, and what it gives is a number or named in an error."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from horizon_plugin_profiler import tune
from horizon_plugin_profiler.tuning.lent_model import lent
from horizon_plugin_pytorch.errors import CalibrationError
from horizon_plugin_pytorch.march import March, get_march, set_march
from horizon_plugin_pytorch.quantization import FakeQuantState, set_fake_quantize
from tests.tuning.test_tune import chain


@pytest.fixture(autouse=True)
def _march():
    set_march(March.NASH_M)


@torch.no_grad()
def scale_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


def cut(model: nn.Module) -> None:
    model.layers = model.layers[:2]


def hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, out: out * 0)


def train(model: nn.Module) -> None:
    with torch.enable_grad():
        model.train()(torch.rand(4, 16)).sum().backward()
    model.requires_grad_(False)


def other_march(model: nn.Module) -> None:
    set_march(March.BAYES)


def half(model: nn.Module) -> None:
    if isinstance(model.layers[0], nn.Linear) and type(model.layers[0]).__module__.startswith("torch."):
        model.half()


@pytest.mark.parametrize("spoil", [scale_weights, cut, hook, train, other_march, half])
def test_what_it_does_to_a_model_is_undone(spoil):
    net, data = chain(0, 2)
    wanted, before = net(data[0]).detach(), copy.deepcopy(net)

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            value = float(torch.cosine_similarity(model(data[0]).flatten(), wanted.flatten(), 0))
        spoil(model)
        return value

    result = tune(net, data, evaluate=accuracy, target=0.999, out_dir=None, progress=False)
    assert set(result.formats) == {"layers.0", "layers.2"} and result.is_met and result.is_verified
    assert str(result.march) == "nash-m" and get_march() == March.NASH_M
    assert torch.equal(net(data[0]), wanted) and not net.training
    for found, kept in zip(net.parameters(), before.parameters(), strict=True):
        assert torch.equal(found, kept) and found.requires_grad and found.grad is None


def test_chance_is_the_same_in_every_call_and_its_own():
    net, data = chain(0)

    def noise(model: nn.Module) -> float:
        return float(torch.rand(())) + random.random() + float(np.random.rand())

    arguments = dict(evaluate=noise, int16_share=0.5, out_dir=None, progress=False)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = tune(net, data, **arguments)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])
    torch.rand(3), random.random(), np.random.rand()
    again = tune(net, data, **arguments)
    assert first.value == first.float_value == again.value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "must return a number; for the float model it returned None"),
        ({"top1": 1.0}, "it returned {'top1': 1.0}"),
        (torch.ones(2), r"it returned tensor\(\[1., 1.\]\)"),
        ("good", "it returned 'good'"),
        (-np.inf, "gave -inf for the float model"),
    ],
)
def test_what_is_no_number_is_named(value, message):
    net, data = chain(0)
    with pytest.raises(CalibrationError, match=message):
        tune(net, data, evaluate=lambda model: value, max_loss=0.1, out_dir=None, progress=False)


def test_a_model_that_does_not_round_is_no_answer():
    net, data = chain(0)

    def observe(model: nn.Module) -> float:
        if any("FakeQuantize" in type(module).__name__ for module in model.modules()):
            set_fake_quantize(model, FakeQuantState.CALIBRATION)
        return 1.0

    with pytest.raises(CalibrationError, match="switches the rounding of all int8 off"):
        tune(net, data, evaluate=observe, target=0.9, out_dir=None, progress=False)


def test_models_of_inference_mode_are_given_back_too():
    with torch.inference_mode():
        net = nn.Linear(2, 2)
    before = net.weight.clone()
    with lent(net), torch.inference_mode():
        net.weight.zero_()
    assert torch.equal(net.weight, before)
