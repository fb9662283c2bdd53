"""Recurrent networks on integers: steps that run as a list of operators give what the modules give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from horizon_plugin_pytorch.fixed_point import step_forms
from horizon_plugin_pytorch.nn.qat import recurrent
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    calibrate,
    convert_fx,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.runtime import replayed_steps
from horizon_plugin_pytorch.runtime.replayed_steps import replay_steps


class Net(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.quant, self.dequant, self.net = QuantStub(), DeQuantStub(), net

    def forward(self, x: Tensor) -> Any:
        out, states = self.net(self.quant(x))
        return self.dequant(out), self.dequant(states)


def validating(net: nn.Module, x: Tensor, bits: str = "qint8") -> nn.Module:
    model = prepare_qat_fx(Net(net).eval(), {"": get_default_qconfig(activation_qkwargs={"dtype": bits})})
    calibrate(model, [x], progress=False)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model.eval()


def replays(monkeypatch, is_on: bool = True) -> list[bool]:
    """Whether each sequence was replayed, from now on."""
    found: list[bool] = []

    def watched(*args: Any) -> Any:
        out = replay_steps(*args) if is_on else None
        found.append(out is not None)
        return out

    monkeypatch.setattr(recurrent, "replay_steps", watched)
    return found


@pytest.mark.parametrize(
    ("cls", "bits"), [(nn.LSTM, "qint8"), (nn.LSTM, "qint16"), (nn.GRU, "qint8"), (nn.RNN, "qint8")]
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_large", ["nothing", "weights", "states"])
def test_the_same_integers(cls, bits, mode, is_large, monkeypatch) -> None:
    if is_large == "weights":
        monkeypatch.setattr(step_forms, "_MOST_WEIGHTS", 1)
    if is_large == "states":
        monkeypatch.setattr(replayed_steps, "_MOST_NUMBERS", 1)
    torch.manual_seed(0)
    x = torch.randn(7, 2, 3)
    validation = validating(cls(3, 5, num_layers=2, bidirectional=True), x, bits)
    walked: list[Any] = []
    walk = replayed_steps._walked
    monkeypatch.setattr(replayed_steps, "_walked", lambda *args: walked.append(args[0]) or walk(*args))
    for model in (validation, convert_fx(copy.deepcopy(validation))):
        found = replays(monkeypatch)
        with mode():
            out = model(2 * x)
        assert found == [True] * 4
        assert len(walked) == 4 and all(x.is_short != (is_large == "states") for x in walked)
        walked.clear()
        replays(monkeypatch, is_on=False)
        with mode():
            assert all(map(torch.equal, tree_leaves(out), tree_leaves(model(2 * x))))


def test_who_wants_gradients_or_watches_parts_gets_the_steps_themselves(monkeypatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3)
    model = validating(nn.LSTM(3, 4), x)
    found = replays(monkeypatch)
    model(x)[0].sum().backward()
    assert found == [False] and model.net.weight_hh_l0.grad is not None
    with torch.no_grad():
        set_fake_quantize(model, FakeQuantState.QAT)
        model(x)
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        calls: list[int] = []
        hook = model.net.l0.sigmoid.register_forward_hook(lambda *_: calls.append(1))
        model(x)
        assert not any(found) and len(calls) == 5
        hook.remove()
        model(x)
        assert found[-1]


@pytest.mark.parametrize("cls", [nn.LSTM, nn.LSTMCell])
def test_states_that_begin_with_zeros_have_the_type_of_all_numbers(cls) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 2, 3) if cls is nn.LSTM else torch.randn(2, 3)
    model = convert_fx(validating(cls(3, 5), x))
    with torch.no_grad():
        wanted = model(x)
        torch.set_default_dtype(torch.float64)
        try:
            found = model(x)
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, tree_leaves(found), tree_leaves(wanted)))
