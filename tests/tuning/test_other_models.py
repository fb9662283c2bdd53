"""`tune` on models of other kinds: recurrent, several inputs, outputs by name; what is interrupted goes on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_profiler import tune
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub


class Reader(nn.Module):
    """A recurrent classifier of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.other, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.lstm, self.side, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(4, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.side.bias[0], self.head.weight[:, 0] = 200.0, 0.0

    def forward(self, sequence: Tensor, more: Tensor) -> dict[str, Tensor]:
        states, _ = self.lstm(self.quant(sequence))
        joined = states[:, -1] + self.side(self.other(more))
        return {"classes": self.dequant(self.head(joined)), "states": self.dequant(states)}


def reader() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    set_march(March.NASH_M)
    return Reader().eval(), [(torch.randn(8, 5, 8), torch.randn(8, 4)) for _ in range(2)]


@pytest.mark.slow
def test_a_recurrent_model_of_two_inputs_with_outputs_by_name():
    net, data = reader()
    result = tune(net, data, target=0.995, out_dir=None, progress=False)
    assert result.steps[0].value < 0.99 and result.is_met and result.is_verified
    assert any("side" in path or "add" in path for path in result.formats)  # what has the large channel


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path):
    net, data = reader()
    calls: list[int] = []

    def score(model: nn.Module) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        with torch.no_grad():
            found, wanted = model(*data[0])["classes"], net(*data[0])["classes"]
        return float(torch.cosine_similarity(found.flatten(), wanted.flatten(), 0))

    arguments = dict(evaluate=score, int16_share=0.3, out_dir=tmp_path, progress=False)
    with pytest.raises(KeyboardInterrupt):
        tune(net, data, **arguments)
    assert (tmp_path / "tuning.pt").is_file() and not net.training
    tune(net, data, **arguments)
    resumed = len(calls)
    tune(net, data, **arguments)
    assert resumed == len(calls)  # all is known
    first = len(calls)
    tune(net, data, **arguments, resume=False)
    assert len(calls) - first == resumed - 1  # nothing was asked twice but what was interrupted


class States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.gru, self.head = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.head(self.gru(self.quant(x))[0]))


@pytest.mark.parametrize("int8_gemms", [False, True])
def test_a_gru_whose_int16_form_has_a_part_less(int8_gemms):
    set_march(March.NASH_M)
    net, data = States().eval(), [torch.randn(8, 3, 6)]
    arguments = dict(int8_gemms=int8_gemms, float16=False, out_dir=None, progress=False)
    result = tune(net, data, target=1.0, **arguments)  # as much of int16 as there is
    assert "gru" in result.formats and result.is_verified
    assert result.value > result.steps[0].value  # without the part that makes int8 of the state
