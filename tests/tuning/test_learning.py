"""What `tune` does beside number formats: rewriting first, AdaRound and training at last, each with its row."""

from __future__ import annotations

import runpy

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_profiler import tune
from horizon_plugin_profiler.tuning import rungs
from horizon_plugin_pytorch.analysis.tuning.sites import quantizers_of
from horizon_plugin_pytorch.errors import CalibrationWarning, QuantizationConfigError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qat_mode import ConsistencyStrategy
from horizon_plugin_pytorch.quantization import QuantWrapper, convert

BATCHES = 5


def small() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(3)]
    net = QuantWrapper(nn.Sequential(*layers, nn.Linear(12, 4))).eval()
    return net, [torch.randn(32, 12) for _ in range(BATCHES)]


def learned(out_dir, **arguments):
    net, data = small()
    arguments = {"adaround": True, "train_steps": 30, "samples": 32, **arguments}
    return net, data, tune(net, data, int16_share=0.0, metric="MSE", out_dir=out_dir, progress=False, **arguments)


@pytest.fixture(autouse=True)
def chip():
    set_march(March.NASH_M)


def test_each_step_is_a_row_and_the_answer_is_the_model_that_learned(tmp_path):
    net, data, result = learned(tmp_path)
    rows = {step.what: step.value for step in result.steps}
    assert rows["the answer after AdaRound"] < rows["all int8"]
    assert rows["the answer after training"] < rows["the answer after AdaRound"]
    assert result.learned == ["AdaRound", "training"] and result.value == rows["the answer after training"]
    assert f"learned from {BATCHES - 1} batches that nothing is measured on" in str(result)
    with torch.no_grad():
        found = result.prepared_model(data[0])
        assert float((found - net(data[0])).square().mean()) == pytest.approx(result.value, rel=1e-5)
        assert torch.equal(convert(result.prepared_model)(data[0]), found)  # scales and integers are as they were
        written = runpy.run_path(str(tmp_path / "tuned_formats.py"))["learned"]
        assert torch.equal(written(small()[0], data, tmp_path / "tuned_model.pt")(data[0]), found)


def test_the_same_again_and_what_was_learned_is_kept(tmp_path, monkeypatch):
    _, data, first = learned(tmp_path)
    _, _, again = learned(None)
    assert again.value == first.value
    pairs = zip(again.prepared_model.parameters(), first.prepared_model.parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)

    def fails(*_):
        raise AssertionError("it was learned before")

    monkeypatch.setattr(rungs, "train_towards_float", fails)
    monkeypatch.setattr(rungs, "weight_reconstruction", fails)
    _, _, resumed = learned(tmp_path)
    assert resumed.value == first.value and resumed.learned == first.learned
    assert torch.equal(resumed.prepared_model(data[0]), first.prepared_model(data[0]))
    with pytest.raises(AssertionError, match="learned before"):
        learned(tmp_path, train_steps=31)


def test_what_does_not_help_is_taken_back(monkeypatch):
    def spoil(model, *_):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    monkeypatch.setattr(rungs, "weight_reconstruction", spoil)
    _, _, result = learned(None, train_steps=0)
    rows = {step.what: step.value for step in result.steps}
    assert rows["the answer after AdaRound"] > rows["all int8"] == result.value
    assert result.learned == [] and "AdaRound does not help" in str(result)
    _, _, plain = learned(None, train_steps=0, adaround=False)
    assert plain.prepared_model is None and plain.value == result.value
    assert "def learned" not in result.source()


def test_training_brings_a_target_within_reach():
    net, data = small()
    arguments = {"metric": "MSE", "int8_gemms": True, "samples": 32, "out_dir": None, "progress": False}
    narrow = tune(net, data, int16_share=0.0, **arguments).value
    wide = tune(net, data, int16_share=1.0, **arguments).value  # int8 for what layers multiply, int16 elsewhere
    result = tune(net, data, target=0.9 * wide, train_steps=150, **arguments)
    assert wide <= narrow and result.is_met and result.learned == ["training"]


def test_evaluate_judges_and_then_all_batches_are_learned_from():
    net, data = small()

    def distance(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(data[0]) - net(data[0])).square().mean())

    result = tune(
        net, data, evaluate=distance, target=1e9, higher_is_better=False, train_steps=20, samples=10**6, out_dir=None,
        progress=False,
    )  # fmt: skip
    assert result.learned == ["training"] and result.value == distance(result.prepared_model)
    assert f"learned from {BATCHES} batches of calibration" in str(result)


def test_the_effect_of_rewriting_is_a_row():
    torch.manual_seed(0)
    net = QuantWrapper(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4))).eval()
    with torch.no_grad():
        net.module[2].bias[2] = 60.0
        net.module[3].weight[:, 2] /= 100
    data = [torch.randn(16, 8)]
    result = tune(
        net, data, target=0.9999, equalize=True, center=True, search_scales=True, out_dir=None, progress=False
    )
    names = [step.what for step in result.steps]
    assert names[:4] == [
        "all int8 before equalize", "all int8 before center_norms", "all int8 before search_scales", "all int8",
    ]  # fmt: skip
    values = [step.value for step in result.steps]
    assert values[0] == values[1] < values[2] <= values[3]  # there is nothing to equalize, and much to center
    plain = tune(net, data, target=0.9999, out_dir=None, progress=False)
    assert plain.steps[0].what == "all int8" and plain.steps[0].value == pytest.approx(values[0], rel=1e-6)


def test_scales_that_are_powers_of_two_stay_such_and_other_levels_begin_anew(tmp_path, monkeypatch):
    net, data = small()
    arguments = {"target": 0.99, "search_scales": True, "samples": 32, "out_dir": tmp_path, "progress": False}
    plain = tune(net, data, **arguments)
    monkeypatch.setattr(ConsistencyStrategy, "_level", 2)
    with pytest.warns(CalibrationWarning, match="other settings"):
        result = tune(net, data, train_steps=5, **arguments)
    assert result.steps[0].value != plain.steps[0].value and result.is_verified
    assert "set_consistency_level(2)" in str(result) and "set_consistency_level" not in str(plain)
    scales = torch.cat([q.scale.flatten() for q in quantizers_of(result.prepared_model).values()])
    assert bool((scales.log2().frac() == 0).all())


def test_wrong_arguments():
    net, data = small()
    with pytest.raises(QuantizationConfigError, match="all are measured on"):
        tune(net, data[:1], target=0.9, adaround=True, out_dir=None, progress=False)
    for wrong in (-1, 2.5, True):
        with pytest.raises(QuantizationConfigError, match="train_steps must be a whole number"):
            tune(net, data, target=0.9, train_steps=wrong, out_dir=None, progress=False)


def test_what_was_learned_after_something_else_is_learned_anew(tmp_path):
    _, data, alone = learned(tmp_path, adaround=False)
    _, _, both = learned(tmp_path)
    assert alone.learned == ["training"] and both.learned == ["AdaRound", "training"]
    assert not torch.equal(both.prepared_model(data[0]), alone.prepared_model(data[0]))


def test_what_cannot_be_learned_is_told_and_the_answer_stays(monkeypatch):
    net, data = small()
    net.requires_grad_(False)
    arguments = dict(int16_share=0.0, samples=32, out_dir=None, progress=False)
    result = tune(net, data, train_steps=2, **arguments)
    assert "training is left out: no parameter of the model is to be trained" in str(result)
    assert result.learned == [] and result.prepared_model is not None
    assert float(torch.cosine_similarity(result.prepared_model(data[0]), net(data[0])).min()) > 0.9

    class Fixed(nn.Module):
        """It has no layer with integer weights, and its output has no gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.unused = QuantWrapper(nn.Sigmoid()), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    result = tune(Fixed().eval(), data, adaround=True, train_steps=2, **arguments)
    assert "AdaRound is left out: weight_reconstruction: the model has no layer with integer weights" in str(result)
    assert "training is left out: no output of the model has a gradient" in str(result)


def test_under_inference_mode():
    net, data = small()
    with torch.inference_mode():
        result = tune(net, data, target=0.99999, samples=32, adaround=True, out_dir=None, progress=False)
    assert result.is_verified and result.prepared_model is not None
