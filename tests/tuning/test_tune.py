"""`tune`: the operators that were planted come out and no others; what is interrupted goes on; errors are told."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import warnings
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_profiler import tune
from horizon_plugin_profiler.tuning.answer import templates
from horizon_plugin_profiler.tuning.bench import Bench, Data
from horizon_plugin_profiler.tuning.judge import Judge
from horizon_plugin_pytorch.analysis.tuning.ledger import Ledger
from horizon_plugin_pytorch.analysis.tuning.sites import quantizers_of
from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning, QuantizationConfigError
from horizon_plugin_pytorch.march import March, get_march, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FuseMode,
    QuantStub,
    QuantWrapper,
    calibrate,
    get_qconfig,
    prepare,
)
from horizon_plugin_pytorch.quantization.qconfig_setter import QconfigSetter
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
    cosine = torch.cosine_similarity(names["calibrated"](net, data)(data[0]).flatten(), net(data[0]).flatten(), 0)
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
    assert "of what int16 leaves" in result.reasons["layers.1"] and "`layers.1`" in result.reasons["layers.2"]
    assert set(result.costs["int8"].products) == {"int8 x int8"} and result.bounds.half == 2
    assert result.costs["the answer"].products["float16 x float16"] == 2 * 16 * 16 * 16  # two layers, 16 samples
    names = {}
    exec(result.source(), names)
    assert names["FORMATS"] == result.formats


class Between(nn.Module):
    """Float16 before an operator with integer results, and before one with real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.a, self.b, self.norm, self.c, self.head = (
            nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.head(self.c(self.norm(self.b(self.a(self.quant(x)))))))


def test_stubs_behind_float16_have_the_formats_that_prepare_gives_them():
    torch.manual_seed(0)
    data = [torch.randn(8, 8)]
    judge, ledger = Judge.of(None, "Cosine", True), Ledger(None, "")
    bench = Bench(Between().eval(), Data(data, data), judge, ledger, tqdm(disable=True), half=frozenset({"b", "c"}))
    found = set()
    for paths in ((), ("a",), ("norm",), ("a", "norm"), ("quant", "a", "norm")):
        raised = [site for site in bench.sites if site.operator in paths and site.kind == "activation"]
        assert len(raised) == len(paths)
        setter = QconfigSetter(get_qconfig(), templates(bench.formats(raised), {}), save_dir=None)
        model = bench.with_setter(setter, raised)
        formats = {path: str(q.dtype) for path, q in quantizers_of(model).items()}
        mixture = bench.mixed.raise_to(raised)
        assert formats == {path: str(q.dtype) for path, q in quantizers_of(mixture).items()}
        assert torch.equal(model(data[0]), mixture(data[0]))
        found.add(tuple(dtype for path, dtype in formats.items() if "_generated_quant" in path))
    assert {("qint8", "qint8"), ("qint16", "qint16")} <= found


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
    with pytest.raises(CalibrationError, match="must return a number; for the float model it returned None"):
        tune(net, data, evaluate=lambda model: None, target=1.0, out_dir=None, progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "none of them"),
        ({"target": 0.9, "int16_share": 0.1}, "target and int16_share"),
        ({"target": "high"}, "must be a number"),
        ({"max_loss": 0.1}, "give a target"),
        ({"int16_share": 2.0}, "between 0 and 1"),
        ({"target": 0.9, "metric": "cosine"}, "no metric"),
        ({"target": 0.9, "metric": torch.dist}, "A function of yours is `evaluate`"),
        ({"target": 99.0}, "between -1 and 1"),
        ({"target": -1.0, "metric": "MSE"}, "never negative"),
        ({"target": 0.9, "metric": "MSE", "evaluate": lambda model: 1.0}, "give one of them"),
        ({"target": 0.9, "higher_is_better": False}, "a metric knows its own"),
        ({"target": 0.9, "samples": 0}, "samples"),
        ({"target": 0.9, "evaluate": 1}, "function"),
        ({"target": 0.9, "seed": "one"}, "seed must be a whole number"),
        ({"target": 0.9, "fixed_scales": [1.0]}, "fixed_scales are largest magnitudes by path"),
        ({"target": 0.9, "prepare_args": {"out_dir": "."}}, "out_dir, which tune itself"),
        ({"target": 0.9, "own_scales": True, "prepare_args": {"own_scales": True}}, "given twice"),
    ],
)
def test_wrong_arguments(arguments, message):
    net, data = chain()
    with pytest.raises(QuantizationConfigError, match=message):
        tune(net, data, out_dir=None, progress=False, **arguments)


def test_a_budget_gives_the_best_for_it():
    net, data = chain(0, 2)
    share = np.float32(0.4)  # 2 of 5 operators
    result = tune(net, data, int16_share=share, out_dir=None, progress=False)
    assert set(result.formats) == {"layers.0", "layers.2"} and result.share <= share
    operations = tune(net, data, int16_operations=0.5, out_dir=None, progress=False)
    assert operations.costs["the answer"].wide_share <= 0.5
    assert operations.value >= result.value - 1e-3
    best = result.front()
    assert best[0].what == "all int8" and best[-1].value == max(step.value for step in result.steps)
    assert [(step.raised, step.value) for step in best] == sorted({(step.raised, step.value) for step in best})
    assert all(two.raised > one.raised and two.value > one.value for one, two in pairwise(best))
    assert "(Pareto)" in str(result) and "the best for its share" in result.page()
    errors = tune(net, data, metric="MSE", int16_share=0.4, out_dir=None, progress=False)
    assert len(errors.front()) > 1 and errors.front()[0].value > errors.front()[-1].value


def test_ranges_that_are_too_small_are_told_and_stubs_of_outputs_are_not():
    class Twice(Chain):
        def forward(self, x: Tensor) -> list[Tensor]:
            x = self.norms[0](self.layers[0](self.quant(x)))
            return [self.dequant(x), self.dequant(self.norms[1](self.layers[1](x)))]

    torch.manual_seed(0)
    net, data = Twice(count=2).eval(), [torch.rand(16, 16), 0.1 * torch.rand(16, 16)]
    result = tune(net, data, target=0.999999, float16=False, out_dir=None, progress=False)
    assert (
        not result.is_met and "All int16 leaves" in str(result) and "whether calibration covers the data" in str(result)
    )
    assert "Called more than once" not in str(result)  # a DeQuantStub has no scale
    planted, batches = chain(1)
    better = tune(planted, batches, target=0.999, out_dir=None, progress=False)
    assert "calibration covers" not in str(better)
    source = better.source()
    assert "import torch\n" not in source and "import qint16\n" in source and "THRESHOLDS = {}" in source
    assert '    "layers.1": {"output": qint16},  # rank 1 of ' in source


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
    assert result.rewrites == ["smooth_norms"]


def test_what_rewrites_the_model_is_in_the_source():
    torch.manual_seed(0)
    norm, layer = nn.LayerNorm(16), nn.Linear(16, 8)
    with torch.no_grad():
        norm.bias[3], norm.bias[5] = 200.0, -90.0
        layer.weight[:, [3, 5]] /= 100
    net, data = QuantWrapper(nn.Sequential(nn.Linear(16, 16), norm, layer)).eval(), [torch.randn(16, 16)]
    result = tune(net, data, target=0.999, center=True, smooth=True, out_dir=None, progress=False)
    assert result.rewrites == ["center_norms", "smooth_norms"] and result.is_met and result.formats == {}
    names: dict = {}
    exec(result.source(), names)
    set_march(March.NASH_M)
    written = names["calibrated"](copy.deepcopy(net), data)
    model = prepare(result.float_model, (data[0],), result.setter(), out_dir=None)
    calibrate(model, data, patience=0, progress=False)
    assert torch.equal(written(data[0]), model(data[0]))
    assert norm.bias[3] == 200.0


class Twice(nn.Module):
    """One layer for a small and for a large input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.other, self.layer, self.dequant = QuantStub(), QuantStub(), nn.Linear(16, 16), DeQuantStub()
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        small, large = self.layer(self.quant(x)), self.layer(self.other(400 * x))
        return self.dequant(self.head(small)), self.dequant(large)


def twice() -> tuple[nn.Module, list[Tensor]]:
    return Twice().eval(), [torch.rand(16, 16, generator=torch.Generator().manual_seed(0))]


def state_of(model: nn.Module) -> dict[str, list]:
    return {path: [str(q.dtype), q.scale.tolist()] for path, q in quantizers_of(model).items()}


def written_state(folder: str) -> dict[str, list]:
    """The scales and formats of the model that the written Python makes, and what it gives."""
    set_march(March.NASH_M)
    names: dict = {}
    exec((Path(folder) / "tuned_formats.py").read_text(), names)
    net, data = twice()
    model = prepare(net, (data[0],), names["calibration_setter"](), out_dir=None, **names["PREPARE_ARGS"])
    calibrate(model, data, patience=0, progress=False)
    return {**state_of(model), "outputs": [x.tolist() for x in model(data[0])]}


def test_known_ranges_and_own_scales_are_in_the_setter_and_in_the_written_python(tmp_path):
    net, data = twice()
    shared = tune(net, data, target=0.5, out_dir=None, progress=False)
    assert shared.value < 0.999 and "own_scales=True" in str(shared)  # one scale for both is too coarse for the small
    fuse_mode = {"fuse_mode": FuseMode.NoFuse}
    arguments = dict(own_scales=(path for path in ["layer"]), fixed_scales={"quant": 1.5}, prepare_args=fuse_mode)
    result = tune(net, data, target=0.9999, out_dir=tmp_path, progress=False, **arguments)
    assert result.formats == {} and result.is_met and result.is_verified
    assert result.prepare_args == {"fuse_mode": FuseMode.NoFuse, "own_scales": ("layer",)}
    assert "own_scales=('layer',)" in str(result)
    for is_training in (False, True):
        setter = result.setter(qat=is_training)
        model = prepare(net, (data[0],), setter, out_dir=None, **result.prepare_args)
        assert model.quant.activation_post_process.scale.item() == 1.5 / 128

    model = prepare(net, (data[0],), result.setter(), out_dir=None, **result.prepare_args)
    calibrate(model, data, patience=0, progress=False)
    pairs = zip(model(data[0]), net(data[0]), strict=True)
    cosines = [torch.cosine_similarity(x.flatten(), y.flatten(), 0) for x, y in pairs]
    assert min(cosines).item() == pytest.approx(result.value, abs=1e-6)
    script = (
        "import json, sys; from tests.tuning.test_tune import written_state as w; print(json.dumps(w(sys.argv[1])))"
    )
    fresh = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    expected = {**state_of(model), "outputs": [x.tolist() for x in model(data[0])]}
    assert json.loads(fresh.stdout.splitlines()[-1]) == json.loads(json.dumps(expected))


class Residual(nn.Module):
    """A large channel on the residual path, which nobody reads in the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.mask = nn.Parameter(torch.ones(16))
        with torch.no_grad():
            self.first.bias[-1], self.mask[-1] = 300.0, 0.0
            self.second.weight.mul_(0.01)[:, -1] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.quant(x))
        return self.dequant((x + self.second(x)) * self.mask)


def test_int16_on_the_residual_path_with_int8_for_what_is_multiplied(tmp_path):
    net, data = Residual().eval(), [torch.rand(16, 16, generator=torch.Generator().manual_seed(0))]
    arguments = dict(int8_gemms=True, out_dir=tmp_path, progress=False)
    result = tune(net, data, target=0.99, **arguments)
    assert result.is_met and result.is_verified and result.steps[0].value < 0.9
    assert "first" in result.formats and len(result.formats) == 2  # and the sum
    assert all(parts == {"output": qint16} for parts in result.formats.values())
    assert set(result.costs["the answer"].products) == {"int8 x int8"}
    wider = tune(net, data, target=0.99, out_dir=None, progress=False)
    assert set(wider.costs["the answer"].products) > {"int8 x int8"}
    names = {}
    exec((tmp_path / "tuned_formats.py").read_text(), names)
    states = []
    for setter in (result.setter(), names["calibration_setter"]()):
        model = prepare(net, (data[0],), setter, out_dir=None)
        calibrate(model, data, patience=0, progress=False)
        cosine = torch.cosine_similarity(model(data[0]).flatten(), net(data[0]).flatten(), 0)
        assert cosine.item() == pytest.approx(result.value, abs=1e-6)
        states.append(state_of(model))
    assert states[0] == states[1]
    with pytest.raises(QuantizationConfigError, match="give int16_share"):
        tune(net, data, int16_operations=0.5, **arguments)


def test_searched_ranges_need_less_and_are_in_the_written_python(tmp_path):
    net, data = chain(0, 2)
    result = tune(net, data, target=0.999, search_scales=True, out_dir=tmp_path, progress=False)
    assert result.is_met and result.is_verified and result.formats == {} and result.searched == 16
    names = {}
    exec((tmp_path / "tuned_formats.py").read_text(), names)
    cosine = torch.cosine_similarity(names["calibrated"](net, data)(data[0]).flatten(), net(data[0]).flatten(), 0)
    assert cosine >= 0.999
    mixed = Residual().eval()
    answer = tune(mixed, data, target=0.99, search_scales=True, int8_gemms=True, out_dir=None, progress=False)
    assert answer.is_met and answer.is_verified


def test_what_cannot_be_written_down_is_told():
    net, data = twice()
    asked = {"hybrid": True, "hybrid_dict": {"module_type": [nn.Tanh]}}
    result = tune(net, data, target=0.5, prepare_args=asked, out_dir=None, progress=False)
    names = {}
    exec(result.source(), names)
    assert names["PREPARE_ARGS"] == {"hybrid": True}
    assert "# and, which cannot be written down here: hybrid_dict=" in result.source() and "hybrid_dict" in str(result)


def test_fixed_scales_stay_integers_where_others_become_float16():
    net, data = chain(1, 2, size=30000.0)
    result = tune(net, data, target=0.999, fixed_scales={"layers.1": 40.0}, out_dir=None, progress=False)
    assert (
        result.is_met
        and torch.float16 not in result.formats["layers.1"].values()
        and torch.float16 in result.formats["layers.2"].values()
    )
    prepare(net, (data[0],), result.setter(), out_dir=None)  # names nothing that prepare makes between the formats


def test_another_question_does_not_get_old_answers(tmp_path):
    net, data = chain(1)
    arguments = dict(out_dir=tmp_path, progress=False, float16=False)

    def score(factor: float):
        return lambda model: factor * float(model(data[0]).mean())

    def value(factor: float, **others):
        return tune(net, data, evaluate=score(factor), int16_share=0.0, **arguments, **others).float_value

    first = value(1.0)
    with pytest.warns(CalibrationWarning, match="other settings"):
        assert value(2.0) == pytest.approx(2 * first)
    for others in ({"own_scales": ["layers"]}, {"prepare_args": {"fuse_mode": FuseMode.NoFuse}}, {"own_scales": True}):
        with pytest.warns(CalibrationWarning, match="other settings"):
            value(2.0, **others)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        value(2.0, own_scales=True)


class Slope(nn.Module):
    """The same modules and weights for every slope and function."""

    def __init__(self, slope: float, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant, self.act = QuantStub(), DeQuantStub(), nn.LeakyReLU(slope)
        self.first, self.second, self.function = nn.Linear(6, 6), nn.Linear(6, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.second(self.function(self.act(self.first(self.quant(x))))))


@pytest.mark.parametrize(("slope", "function"), [(0.9, torch.relu), (0.1, torch.sigmoid)])
def test_another_slope_or_forward_does_not_get_old_answers(slope, function, tmp_path):
    data = [torch.randn(16, 6) for _ in range(2)]
    arguments = dict(int16_share=0.5, progress=False)
    tune(Slope(0.1, torch.relu).eval(), data, out_dir=tmp_path, **arguments)
    with pytest.warns(CalibrationWarning, match="is of another model"):
        found = tune(Slope(slope, function).eval(), data, out_dir=tmp_path, **arguments)
    fresh = tune(Slope(slope, function).eval(), data, out_dir=None, **arguments)
    assert found.value == fresh.value and found.formats == fresh.formats
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        assert tune(Slope(slope, function).eval(), data, out_dir=tmp_path, **arguments).value == fresh.value


def test_outputs_that_are_masked_with_infinity():
    class Masked(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.arange(16) == 3, -torch.inf)

    torch.manual_seed(1)
    net, data = Masked((0, 2)).eval(), [torch.rand(16, 16) for _ in range(2)]
    result = tune(net, data, target=0.999, out_dir=None, progress=False)
    assert set(result.formats) == {"layers.0", "layers.2"} and result.is_met and result.is_verified


def test_outputs_that_are_masked_with_a_large_number_are_named():
    class Masked(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.arange(16) == 3, -1e9)

    torch.manual_seed(1)
    net, data = Masked((0, 2)).eval(), [torch.rand(16, 16) for _ in range(2)]
    result = tune(net, data, target=0.999, out_dir=None, progress=False)
    assert "Output 0 holds -1e+09 many times, as masks write it" in str(result)


def test_norms_that_stay_are_named_in_the_report():
    torch.manual_seed(0)
    net = QuantWrapper(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Sigmoid())).eval()
    result = tune(net, [torch.randn(16, 8)], target=0.9, center=True, out_dir=None, progress=False)
    assert "center_norms leaves as they are: `module.2` (`module.3` (Sigmoid)" in str(result)


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
