"""`auto_calibrate`: never worse than one observer by hand, on every kind of prepared model."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from horizon_plugin_pytorch.calibration import judge
from horizon_plugin_pytorch.calibration.judge import Judge
from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning, HorizonError, QuantizationConfigError
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantize,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    auto_calibrate,
    auto_calibration,
    calibrate,
    convert_fx,
    get_default_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver
from horizon_plugin_pytorch.statistics.observer_names import range_methods
from tests.models import make, shake_norms
from tests.tiers import in_soak


class Net(nn.Module):
    """Channels of different size, a sum, a function with a table, two outputs, and values that are rarely large."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.second_dequant = QuantStub(), DeQuantStub(), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.head, self.gate, self.side = (nn.Conv2d(8, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(self.quant(x))
        y = self.body(x)
        y += x
        x = y.relu_()
        return self.dequant(self.head(x) * self.gate(x).sigmoid()), self.second_dequant(self.side(x))


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(4, 3, 10, 10, generator=generator) for _ in range(count)]
    for index, batch in enumerate(made):
        batch.view(-1)[index * 7] = 30.0  # what min_max falls for
    return made


def float_net() -> nn.Module:
    torch.manual_seed(0)
    net = shake_norms(Net()).eval()
    with torch.no_grad():
        net.stem[0].weight[0] *= 20
    return net


QCONFIG = {"": get_default_qconfig()}


def by_tracing(**kwargs) -> nn.Module:
    return prepare_qat_fx(float_net(), {"": get_default_qconfig(**kwargs)})


def by_running(**kwargs) -> nn.Module:
    qconfig = {"": get_default_qconfig(**kwargs)}
    return prepare(float_net(), (batches()[0],), qconfig_dict=qconfig, out_dir=None)


class Eager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.second(self.first(self.quant(x))))


def eager(**kwargs) -> nn.Module:
    torch.manual_seed(0)
    net = Eager().eval()
    net.qconfig = get_default_qconfig(**kwargs)
    return prepare_qat(net)


def error(model: nn.Module, data: list[Tensor]) -> float:
    """As the table has it: relative error, mean over the outputs."""

    def outputs(state: FakeQuantState) -> list[Tensor]:
        set_fake_quantize(model, state)
        made = [model(batch) for batch in data]
        parts = [out if isinstance(out, tuple) else (out,) for out in made]
        return [torch.cat(part).double() for part in zip(*parts, strict=True)]

    with torch.no_grad():
        found, wanted = outputs(FakeQuantState.VALIDATION), outputs(FakeQuantState._FLOAT)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    shares = [float((a - b).square().sum() / b.square().sum()) for a, b in zip(found, wanted, strict=True)]
    return (sum(shares) / len(shares)) ** 0.5


class Twice(nn.Module):
    """A layer that runs twice: its calls of one batch have one range."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.conv(self.conv(self.quant(x)) * 3))


def shared(**kwargs) -> nn.Module:
    torch.manual_seed(0)
    return prepare_qat_fx(Twice().eval(), {"": get_default_qconfig(**kwargs)})


@pytest.mark.parametrize("make", [by_tracing, by_running, *in_soak(eager, shared)])
@pytest.mark.slow
def test_never_worse_than_calibrate_with_any_of_the_observers(make) -> None:
    data, names = batches(), list(range_methods())
    model = make()
    result = auto_calibrate(model, data, observer_list=names)
    for name in names:
        plain = make(activation_observer=name)
        calibrate(plain, data, patience=0)
        assert error(model, data) <= error(plain, data) * (1 + 1e-9)
        assert result.errors[name] == pytest.approx(error(plain, data), rel=1e-6)
    assert result.errors[result.kept] == pytest.approx(error(model, data), rel=1e-6)
    assert result.errors[result.kept] == min(result.errors.values())
    assert not result.unseen


@pytest.mark.slow
def test_one_batch_with_large_values_does_not_spoil_the_result() -> None:
    """Means of the batches' ranges clip it, whichever observer finds them; the range of all data holds it."""
    torch.manual_seed(4)
    data = [torch.rand(64, 16) * 2 - 1 for _ in range(8)]
    data[1][0] *= 400
    net = QuantWrapper(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))).eval()
    result = auto_calibrate(prepare_qat_fx(net, QCONFIG), data, observer_list=("mse", "min_max"))
    assert result.kept.endswith("of all data") and result.errors[result.kept] < 0.1 < result.errors["mse"]


@pytest.mark.slow
def test_the_table_is_of_what_is_in_the_model_and_the_same_again() -> None:
    """Some models keep what was chosen, others a row of the table: as many of a dozen as have both."""
    chosen: set[bool] = set()
    for seed in range(12):
        if len(chosen) == 2:
            break
        torch.manual_seed(seed)
        data = [torch.rand(32, 16) for _ in range(4)]
        net = QuantWrapper(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))).eval()
        few = get_default_qconfig(weight_qkwargs={"quant_min": -8, "quant_max": 7})
        model = prepare(net, (data[0],), qconfig_dict={"": few}, out_dir=None)
        result = auto_calibrate(model, data)
        is_chosen = result.kept == "as chosen"
        scales = {path: float(q.scale.max()) for path, q in model.named_modules() if isinstance(q, FakeQuantize)}
        for choice in result.choices:
            found = scales.get(choice.tensor, scales.get(f"{choice.tensor}.activation_post_process"))
            assert choice.scale == found
            assert is_chosen or choice.observer in (result.kept, "as configured")
        if is_chosen not in chosen:
            assert auto_calibrate(model, data) == result
            chosen.add(is_chosen)
    assert chosen == {True, False}


def test_a_batch_that_fails_leaves_the_model_as_it_was() -> None:
    model, data = by_tracing(), batches()
    calibrate(model, data)
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(HorizonError):
        auto_calibrate(model, [data[0] * 2, torch.rand(3, 7)])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.training and model.head.training


class Opposites(nn.Module):
    """Large values that mean nothing, because a sigmoid follows, and large values that are all that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 64), DeQuantStub()
        self.gate, self.value = nn.Conv2d(1, 4, 1), nn.Conv2d(1, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.gate(x).sigmoid() + self.value(x))


@pytest.mark.slow
def test_it_helps_where_one_observer_for_all_does_not_fit() -> None:
    torch.manual_seed(0)
    net = Opposites().eval()
    nn.init.constant_(net.gate.weight, 30.0)
    data = [torch.randn(2, 1, 16, 16).pow(3).mul(4).round().clamp(-127, 127) / 64 for _ in range(4)]  # on the grid
    model = prepare(net, (data[0],), qconfig_dict=QCONFIG, out_dir=None)
    result = auto_calibrate(model, data, percentile_list=[90.0, 99.0])
    plain = [e for name, e in result.errors.items() if name != "as chosen"]
    assert result.errors["as chosen"] < 0.8 * min(plain) and result.kept == "as chosen"
    assert len({choice.observer for choice in result.choices}) > 1
    text = str(result)
    assert "gate" in text and "weight_fake_quant" in text and "gain" in text and "kept" in text


@pytest.mark.slow
def test_operators_are_chosen_in_the_order_in_which_they_run_and_no_choice_is_worse() -> None:
    result = auto_calibrate(by_tracing(), batches())
    names = [choice.tensor for choice in result.choices]
    order = [names.index(n) for n in ("quant", "stem.0.weight_fake_quant", "stem.0", "head.weight_fake_quant")]
    assert order == sorted(order)
    assert all(choice.after <= choice.before for choice in result.choices)


@pytest.mark.slow
def test_operators_before_the_one_that_is_tried_do_not_run_again_and_nothing_changes_by_it(monkeypatch) -> None:
    calls: list[str] = []
    errors, forward = Judge.errors, QATGemm.forward

    def counted(self, *args, **kwargs):
        calls.append(self.path)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(QATGemm, "forward", counted)
    found = auto_calibrate(by_running(), batches(2)).choices
    count = len(calls)
    calls.clear()

    def without_results(self, tries, among, positions=None):
        return errors(self, tries, among, positions and dict.fromkeys(positions, 0))

    monkeypatch.setattr(Judge, "errors", without_results)
    assert auto_calibrate(by_running(), batches(2)).choices == found
    assert count < 0.75 * len(calls)


@pytest.mark.slow
def test_a_try_costs_the_same_in_a_network_of_any_depth(monkeypatch) -> None:
    monkeypatch.setattr(judge, "_HORIZON", 4)
    forward, runs = QATGemm.forward, 0
    replayed, outputs, met, tries = Judge._replayed, Judge._outputs, 0, []

    def counted(self, *args):
        nonlocal runs
        runs += 1
        return forward(self, *args)

    def told(self, call, run):
        nonlocal met
        met += 1
        return replayed(self, call, run)

    def tried(self, index):
        nonlocal met
        met = 0
        result = outputs(self, index)
        if self._end is not None:
            tries.append(met)
        return result

    monkeypatch.setattr(QATGemm, "forward", counted)
    monkeypatch.setattr(Judge, "_replayed", told)
    monkeypatch.setattr(Judge, "_outputs", tried)
    found = []
    for depth in (6, 12, 18):
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.ReLU())]
        model = prepare_qat_fx(QuantWrapper(nn.Sequential(*layers, nn.Linear(8, 4))), {"": get_default_qconfig()})
        runs, data = 0, [torch.randn(16, 8) for _ in range(2)]
        result = auto_calibrate(model, data, observer_list=("min_max", "percentile"), percentile_list=(90.0,))
        found.append(runs)
        assert len(result.choices) > depth / 3
        assert result.errors[result.kept] == min(result.errors.values()) < 0.3
    assert found[2] - found[1] < 1.15 * (found[1] - found[0])
    assert len(tries) > 20 and max(tries) <= 4  # earlier operators are not even met


@pytest.mark.filterwarnings("ignore:.*one scale must fit the results of several calls")
@pytest.mark.parametrize("name", ["Net", "layers that run twice"])
def test_runs_that_begin_in_the_middle_find_what_whole_ones_do(name, monkeypatch) -> None:
    def choices() -> list:
        torch.manual_seed(0)
        shared = nn.Conv2d(3, 3, 1)
        net = Net() if name == "Net" else QuantWrapper(nn.Sequential(shared, nn.ReLU(), nn.Conv2d(3, 3, 1), shared))
        model = prepare_qat_fx(net.eval(), {"": get_default_qconfig()})
        return auto_calibrate(model, batches(2), observer_list=("min_max", "mse")).choices

    found = choices()
    monkeypatch.setattr(judge.ResumableGraph, "of", lambda model: None)
    assert choices() == found


def test_a_loader_with_labels_and_the_other_name() -> None:
    images = torch.cat(batches())
    loader = DataLoader(TensorDataset(images, torch.arange(len(images))), batch_size=4, shuffle=True)
    result = auto_calibration(
        by_tracing(), loader, num_batches=2, batch_process_func=lambda b: b[0] * 2, percentile_list=[99.9, 99.99]
    )
    observers = ["percentile 99.9", "percentile 99.99", "mse", "kl", "min_max"]
    assert list(result.errors) == ["as chosen", *observers, *(f"{o} of all data" for o in observers if o != "kl")]


@pytest.mark.slow
def test_fixed_and_frozen_scales_stay_and_the_model_converts() -> None:
    net = float_net()
    net.quant = QuantStub(scale=1 / 32)
    model = prepare_qat_fx(net, QCONFIG)
    frozen = model.head.activation_post_process
    frozen.set_qparams(0.25)
    frozen.activation_post_process.averaging_constant = 0.0
    result = auto_calibrate(model, batches())
    assert float(model.quant.activation_post_process.scale) == 1 / 32
    assert float(frozen.scale) == 0.25
    assert not {"quant", "head"} & {choice.tensor for choice in result.choices}
    data = batches()[0]
    with torch.no_grad():
        for a, b in zip(model(data), convert_fx(model)(data), strict=True):
            assert torch.equal(a, b)


@pytest.mark.slow
def test_the_chosen_range_is_the_observers_so_that_training_goes_on_from_it() -> None:
    model = by_tracing()
    auto_calibrate(model, batches())
    for quantizer in (model.quant.activation_post_process, model.head.weight_fake_quant):
        scale = quantizer.scale.clone()
        quantizer.refresh_scale()
        assert torch.equal(quantizer.scale, scale)


@pytest.mark.slow
def test_int16_and_learned_scales() -> None:
    for qconfig in (
        get_default_qconfig(activation_qkwargs={"dtype": "qint16"}),
        get_default_qconfig(activation_fake_quant="lsq", weight_fake_quant="lsq"),
    ):
        model = prepare_qat_fx(float_net(), {"": qconfig})
        result = auto_calibrate(model, batches(2))
        assert result.errors[result.kept] < 0.15


@pytest.mark.slow
def test_bad_arguments() -> None:
    with pytest.raises(QuantizationConfigError, match="no fake quantizers"):
        auto_calibrate(nn.ReLU(), batches())
    with pytest.raises(QuantizationConfigError, match="observer_list.*got entropy"):
        auto_calibrate(by_tracing(), batches(), observer_list=["entropy"])
    for nothing in (batches()[0], None, "ab"):
        with pytest.raises(QuantizationConfigError, match=r"give \[batch\]"):
            auto_calibrate(by_tracing(), nothing)
    for observers in (None, [1]):
        with pytest.raises(QuantizationConfigError, match="observer_list holds some of"):
            auto_calibrate(by_tracing(), batches(), observer_list=observers)
    for percentiles in (["a"], "a", [0], [150], [float("nan")], [True]):
        with pytest.raises(QuantizationConfigError, match="percentile_list holds percentages"):
            auto_calibrate(by_tracing(), batches(), percentile_list=percentiles)
    with pytest.raises(QuantizationConfigError, match="has no use without 'percentile'"):
        auto_calibrate(by_tracing(), batches(), percentile_list=[99.9], observer_list=["mse"])
    with pytest.raises(QuantizationConfigError, match="a whole number from 1 on, got 2.5"):
        auto_calibrate(by_tracing(), batches(), num_batches=2.5)
    with pytest.warns(CalibrationWarning, match="is in percent: 0.9999 keeps 0.9999 %.* 99.99"):
        auto_calibrate(by_tracing(), batches(1), percentile_list=[0.9999, 99.9, 99.9])
    assert "percentile 99.9" in auto_calibrate(by_tracing(), batches(1), percentile_list=99.9).errors
    with pytest.raises(QuantizationConfigError, match="no batches"):
        auto_calibrate(by_tracing(), [])


@pytest.mark.slow
def test_a_model_whose_layer_no_batch_reaches_says_so() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor, other: bool = False) -> Tensor:
            return self.unused(x) if other else self.used(x)

    net = QuantWrapper(Branch()).eval()
    net.qconfig = get_default_qconfig()
    model = prepare_qat(net)
    result = auto_calibrate(model, batches())
    assert "module.unused" in result.unseen and "No finite value reached" in str(result)


@pytest.mark.parametrize("name", ["detector", "shared-conv", "surrounded", pytest.param("vit", marks=pytest.mark.slow)])
def test_operators_of_several_parts_and_layers_that_run_twice(name) -> None:
    net, inputs = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = prepare(net, inputs, qconfig_dict=QCONFIG, out_dir=None)
    result = auto_calibrate(model, [inputs], observer_list=("percentile", "min_max"))
    assert result.errors[result.kept] <= result.errors["percentile"] < 0.1


@pytest.mark.slow
def test_values_that_are_not_finite_do_not_count() -> None:
    data = batches()
    clean = auto_calibrate(prepare_qat_fx(float_net(), QCONFIG), data)
    spoilt = [batch.clone() for batch in data]
    spoilt[1][0, 0, 0, 0] = torch.nan
    with pytest.warns(CalibrationWarning, match=r"auto_calibrate: .*NaN or infinite, in batch 1; only the others"):
        found = auto_calibrate(prepare_qat_fx(float_net(), QCONFIG), spoilt)
    assert found.errors[found.kept] == pytest.approx(clean.errors[clean.kept], rel=0.5)
    assert len(set(found.errors.values())) > 3


def test_nothing_finite_to_compare_is_an_error() -> None:
    model = prepare_qat_fx(float_net(), QCONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        pytest.warns(CalibrationWarning, match="NaN or infinite"),
        pytest.raises(CalibrationError, match="no output of the float model is finite"),
    ):
        auto_calibrate(model, [torch.full((1, 3, 10, 10), torch.nan)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_the_table_says_what_its_errors_are_and_what_was_kept() -> None:
    result = auto_calibrate(prepare_qat_fx(float_net(), QCONFIG), batches())
    result.kept = "as chosen"
    assert "the rest float" in str(result) and "everywhere" not in str(result)
    result.kept = "mse of all data"
    assert "Kept is mse of all data everywhere, better for the whole model" in str(result)


def test_an_error_leaves_given_scales_and_counts() -> None:
    model = prepare_qat_fx(float_net(), {"": get_default_qconfig(activation_observer="histogram")})
    calibrate(model, [100 * batch for batch in batches()])
    model.quant.activation_post_process.set_qparams(0.02)
    with (
        pytest.warns(CalibrationWarning, match="NaN or infinite"),
        pytest.raises(CalibrationError, match="no output of the float model is finite"),
    ):
        auto_calibrate(model, [torch.full((1, 3, 10, 10), torch.nan)])
    assert float(model.quant.activation_post_process.scale) == pytest.approx(0.02)
    assert "quant.activation_post_process" in HistogramObserver.reset_scale(model, method="min_max")


@pytest.mark.slow
def test_an_observer_that_counts_has_what_was_seen_here() -> None:
    model = prepare_qat_fx(float_net(), {"": get_default_qconfig(activation_observer="histogram")})
    calibrate(model, [100 * batch for batch in batches()])
    auto_calibrate(model, batches())
    HistogramObserver.reset_scale(model, method="min_max")
    largest = max(float(batch.abs().max()) for batch in batches())
    assert float(model.quant.activation_post_process.scale) == pytest.approx(largest / 127.5, rel=0.01)


@pytest.mark.slow
def test_a_part_that_sees_only_nan_is_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
            self.first, self.second = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.dequant(self.first(self.one(x))), self.dequant(self.second(self.two(y)))

    data = [(batch, torch.full_like(batch, torch.nan)) for batch in batches()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = auto_calibrate(prepare_qat_fx(Two(), QCONFIG), data)
    assert found.unseen == ["two", "second"]
