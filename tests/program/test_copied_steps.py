"""Steps of recurrent networks are recorded three times and copied: the program is the one of all steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.program import Program, copied_steps, record_program
from horizon_plugin_pytorch.quantization import DeQuantStub, FakeQuantState, QuantStub, convert_fx, set_fake_quantize
from horizon_plugin_pytorch.runtime.steps import take_steps, walking
from tests.routes import as_numbers, mismatches, prepared

STEPS = 9
X = torch.randn(STEPS, 2, 5, generator=torch.Generator().manual_seed(1))
STATE = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(2)).tanh()


class Net(nn.Module):
    def __init__(self, rnn: nn.Module, takes_state: bool = False) -> None:
        super().__init__()
        self.quant, self.rnn, self.dequant, self.takes_state = QuantStub(), rnn, DeQuantStub(), takes_state

    def forward(self, x: Tensor, state: Tensor) -> Any:
        out, last = self.rnn(self.quant(x), state) if self.takes_state else self.rnn(self.quant(x))
        return self.dequant(out), last


NETS = {
    "lstm": lambda: Net(nn.LSTM(5, 4, 2, bidirectional=True)),
    "gru": lambda: Net(nn.GRU(5, 4, bidirectional=True)),
    "gru with a state": lambda: Net(nn.GRU(5, 4, 2), True),
    "rnn": lambda: Net(nn.RNN(5, 4, nonlinearity="relu")),
}


def _recorded(model: nn.Module, monkeypatch: pytest.MonkeyPatch, takes_real: bool) -> tuple[Program, Program, int]:
    """The program; that of all steps; and how often a step of the first layer ran for the first one."""
    calls: list[Any] = []
    handle = model.rnn.l0.register_forward_hook(lambda *args: calls.append(args[0]))
    program = record_program(model, (X, STATE), takes_real)
    handle.remove()
    with monkeypatch.context() as patched:
        patched.setattr(copied_steps, "_RECORDED", 1000)
        return program, record_program(model, (X, STATE), takes_real), len(calls)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*((name, "qint8") for name in NETS), ("lstm", "qint16")])
def test_the_program_is_the_one_of_all_steps(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    qat = prepared(NETS[name]().eval(), (X, STATE), dtype)
    quantized = convert_fx(qat)
    program, whole, calls = _recorded(quantized, monkeypatch, takes_real=False)
    assert calls == 3 and str(program) == str(whole)
    for data in ((X, STATE), (2 * X.flip(0), STATE / 2)):
        with torch.no_grad():
            wanted = as_numbers(quantized(*data))
        assert mismatches(as_numbers(program(*data)), wanted) == 0
    set_fake_quantize(qat, FakeQuantState.QAT)
    program, whole, calls = _recorded(qat, monkeypatch, takes_real=True)
    assert calls == 3 and str(program) == str(whole)


class Rolling(nn.Module):
    """Each step does something else."""

    def __init__(self, quant: nn.Module) -> None:
        super().__init__()
        self.quant = quant

    def forward(self, x: Tensor) -> Any:
        q, calls = self.quant(x), []

        def step(part: Any, state: tuple) -> tuple:
            calls.append(part)
            return (torch.roll(part, len(calls), -1),)

        return [state[0] for state in take_steps(step, q.unbind(0), (q[0],))]


def test_steps_that_differ_are_recorded_one_by_one() -> None:
    quantized = convert_fx(prepared(nn.Sequential(QuantStub()), (X,)))
    model = Rolling(quantized.get_submodule("0"))
    program = record_program(model, X)
    with torch.no_grad():
        assert mismatches(as_numbers(program(2 * X)), as_numbers(model(2 * X))) == 0


def test_who_walks_is_asked_and_forgotten() -> None:
    def backwards(step: Any, inputs: Any, state: tuple) -> list[tuple]:
        return [step(x, state) for x in reversed(inputs)]

    def add(x: int, state: tuple) -> tuple:
        return (state[0] + x,)

    with walking(backwards):
        assert take_steps(add, [1, 2], (0,)) == [(2,), (1,)]
    assert take_steps(add, [1, 2], (0,)) == [(1,), (3,)]
