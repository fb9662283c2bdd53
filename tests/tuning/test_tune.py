"""`tune`: the operators that were planted come out and no others; what is interrupted goes on; errors are told."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_profiler import tune
from horizon_plugin_profiler.tuning.bench import Bench, Data
from horizon_plugin_profiler.tuning.judge import Judge
from horizon_plugin_pytorch.analysis.tuning.ledger import Ledger
from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning, QuantizationConfigError
from horizon_plugin_pytorch.march import March, get_march, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, QuantWrapper, calibrate, prepare
from tests.tiers import in_soak


class Chain(nn.Module):
    """Layers in a row. Where something is planted, one channel is far larger than the others, and nobody reads it."""

    def __init__(self, planted: tuple[int, ...] = (), size: float = 300.0, count: int = 4) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))
        self.norms = nn.ModuleList(nn.ReLU() for _ in range(count))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.copy_(torch.eye(16) + 0.1 * torch.randn(16, 16))
            for number in planted:
                self.layers[number].bias[-1] = size
                self.layers[number + 1].weight[:, -1] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return self.dequant(x)


def chain(*planted: int, size: float = 300.0) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(1)
    return Chain(planted, size).eval(), [torch.rand(16, 16) for _ in range(2)]


@pytest.fixture(autouse=True)
def _march():
    set_march(March.NASH_M)


def test_planted_operators_come_out_and_no_others(tmp_path):
    net, data = chain(0, 2)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = tune(net, data, target=0.999, out_dir=tmp_path, progress=False)
    assert set(result.formats) == {"layers.0", "layers.2"}
    assert all(parts == {"output": qint16} for parts in result.formats.values())
    assert result.is_met and result.value >= 0.999 and result.is_verified
    assert result.bounds is not None and result.bounds.corrected == 2 and 0 < result.bounds.rho <= 1
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    names = {}
    exec((tmp_path / "tuned_formats.py").read_text(), names)
    assert names["FORMATS"] == result.formats
    for setter in (names["calibration_setter"](), names["qat_setter"](), names["qat_setter"](fix_scale=True)):
        model = prepare(net, (data[0],), setter, out_dir=None)
        assert str(model.layers[2].activation_post_process.dtype) == "qint16"
        assert str(model.layers[1].activation_post_process.dtype) == "qint8"
    model = prepare(net, (data[0],), result.setter(), out_dir=None)
    calibrate(model, data, patience=0, progress=False)
    cosine = torch.cosine_similarity(model(data[0]).flatten(), net(data[0]).flatten(), 0)
    assert cosine >= 0.999
    report = (tmp_path / "tuning.txt").read_text()
    assert "layers.2" in report and "conditional" in report and "int16 x int8" in report
    assert (tmp_path / "model_check_result.txt").is_file() and "<svg" in (tmp_path / "tuning.html").read_text()


def test_a_model_that_is_good_enough_in_int8_stays_so():
    net, data = chain()
    net.train()
    result = tune(net, data, target=0.99, out_dir=None, progress=False)
    assert result.formats == {} and result.is_met and result.forwards <= 3
    assert net.training and net.layers[0].training


def test_what_int16_does_not_do_is_float16():
    net, data = chain(1, size=30000.0)
    result = tune(net, data, target=0.999, out_dir=None, progress=False)
    half = {path for path, parts in result.formats.items() if torch.float16 in parts.values()}
    assert half == {"layers.1", "layers.2"} == set(result.formats)  # what gives the large channel, and what takes it
    assert result.is_met and result.is_verified and "torch.float16" in result.source()
    names = {}
    exec(result.source(), names)
    assert names["FORMATS"] == result.formats


def test_what_cannot_be_met_is_said():
    net, data = chain(1)
    result = tune(net, data, target=1.0, out_dir=None, progress=False, float16=False)
    assert not result.is_met and "does not meet" in str(result)


def test_an_evaluation_that_fails_keeps_what_was_measured_and_the_next_call_goes_on(tmp_path):
    net, data = chain(0, 2)
    wanted = net(data[0])
    calls, failing = [], [True]

    def accuracy(model: nn.Module) -> float:
        calls.append(model)
        if failing and len(calls) == 4:
            failing.clear()
            raise RuntimeError("the disk is full")
        with torch.no_grad():
            return float(torch.cosine_similarity(model(data[0]).flatten(), wanted.flatten(), 0))

    arguments = dict(evaluate=accuracy, max_loss=0.001, out_dir=tmp_path, progress=False)
    with pytest.raises(CalibrationError, match="the disk is full.*call tune again"):
        tune(net, data, **arguments)
    result = tune(net, data, **arguments)
    resumed = len(calls)
    assert set(result.formats) == {"layers.0", "layers.2"}
    calls.clear()
    again = tune(net, data, **arguments, resume=False)
    assert resumed == len(calls) + 1  # nothing was asked twice but what failed
    assert again.formats == result.formats and again.value == result.value
    calls.clear()
    tune(net, data, **arguments)
    assert not calls  # all is known
    with pytest.warns(CalibrationWarning, match="another model, other data"):
        tune(net, data[:1], **arguments)


def test_nan_is_refused_and_names_the_mixture():
    net, data = chain(1)
    with pytest.raises(CalibrationError, match="NaN for the float model"):
        tune(net, data, evaluate=lambda model: math.nan, target=1.0, out_dir=None, progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "none of them"),
        ({"target": 0.9, "int16_share": 0.1}, "target and int16_share"),
        ({"target": "high"}, "must be a number"),
        ({"max_loss": 0.1}, "give a target"),
        ({"int16_share": 2.0}, "between 0 and 1"),
        ({"target": 0.9, "metric": "cosine"}, "no metric"),
        ({"target": 0.9, "samples": 0}, "samples"),
        ({"target": 0.9, "evaluate": 1}, "function"),
    ],
)
def test_wrong_arguments(arguments, message):
    net, data = chain()
    with pytest.raises(QuantizationConfigError, match=message):
        tune(net, data, out_dir=None, progress=False, **arguments)


def test_a_budget_gives_the_best_for_it():
    net, data = chain(0, 2)
    result = tune(net, data, int16_share=0.4, out_dir=None, progress=False)  # 2 of 5 operators
    assert set(result.formats) == {"layers.0", "layers.2"} and result.share <= 0.4
    operations = tune(net, data, int16_operations=0.5, out_dir=None, progress=False)
    assert operations.costs["the answer"].wide_share <= 0.5
    assert operations.value >= result.value - 1e-3


def test_a_rewritten_model_needs_less_and_is_given_back():
    torch.manual_seed(0)
    norm, layer = nn.LayerNorm(16), nn.Linear(16, 16)
    with torch.no_grad():
        norm.bias[3] = 200.0
        layer.weight[:, 3] /= 200
    net, data = QuantWrapper(nn.Sequential(nn.Linear(16, 16), norm, layer)).eval(), [torch.randn(16, 16)]
    with pytest.warns(CalibrationWarning, match="end after 1 of 3"):
        result = tune(net, data, target=0.999, smooth=True, steps=3, out_dir=None, progress=False)
    assert result.is_met and result.formats == {} and result.is_verified
    assert torch.allclose(result.float_model(data[0]), net(data[0]), atol=1e-4)
    assert norm.bias[3] == 200.0 and result.float_model.module[1].bias[3] < 100
    assert "smooth_norms" in result.source()


def test_the_march_is_for_the_call_alone():
    net, data = chain()
    set_march(March.NASH_E)
    result = tune(net, data, target=0.99, march="bayes", out_dir=None, progress=False)
    assert result.march == "bayes" and get_march() is March.NASH_E


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *in_soak(1, 2, 3)])
def test_no_set_that_is_smaller_by_two_does_on_a_net_of_14_sites(seed):
    """Every smaller set is run: of a net of 14 sites these can be gone through."""
    torch.manual_seed(seed)
    net = Chain(count=7).eval()
    with torch.no_grad():
        for layer in net.layers:  # sensitive in various degrees
            layer.bias[-1] = float(torch.rand(()) * 12)
    data = [torch.rand(16, 16)]
    judge = Judge.of(None, "Cosine", True)
    bench = Bench(net, Data(data, data), judge, Ledger(None, ""), tqdm(disable=True))
    target = 1 - (1 - bench.value((), "int8")) / 2
    result = tune(net, data, target=target, both_int16=True, out_dir=None, progress=False)
    assert len(bench.sites) == 14 and result.is_met and 1 <= result.bounds.chosen <= 5
    smaller = [s for n in range(result.bounds.chosen - 1) for s in combinations(bench.sites, n)]
    assert [s for s in smaller if judge.is_met(bench.value(s, ""), target)] == []
    assert result.bounds.corrected <= result.bounds.chosen
