"""Observers that choose a range from a sketch."""

from __future__ import annotations

import copy
import gc
import warnings
from functools import partial
from types import FunctionType, ModuleType

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.errors import CalibrationWarning, QuantizationConfigError
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    calibrate,
    convert_fx,
    get_default_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization import observer as first
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.observer_v2 import (
    HistogramObserver,
    KLObserver,
    MinMaxObserver,
    MixObserver,
    MSEObserver,
    PercentileObserver,
    SketchObserver,
)
from horizon_plugin_pytorch.statistics.observer_names import OBSERVERS, range_methods
from horizon_plugin_pytorch.statistics.sketch import Sketch

SEARCHING = [cls for cls in OBSERVERS.values() if issubclass(cls, SketchObserver)]


def error(x: torch.Tensor, fake_quant: FakeQuantize) -> float:
    s = float(fake_quant.scale)
    return float(((x / s).round().clamp(-128, 127) * s - x).square().sum())


@pytest.mark.parametrize("cls", SEARCHING)
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_an_outlier_does_not_spoil_the_scale(cls, dtype) -> None:
    x = torch.cat([torch.randn(200000), torch.tensor([20.0])])
    ob, plain = cls(dtype=dtype), MinMaxObserver(dtype=dtype)
    ob(x), plain(x)
    assert ob.calculate_qparams()[0] <= plain.calculate_qparams()[0] * 1.004
    if dtype == "qint8":
        assert ob.calculate_qparams()[0] < 0.75 * plain.calculate_qparams()[0]


@pytest.mark.parametrize("cls", [MSEObserver, MixObserver, HistogramObserver])
def test_the_error_is_less_than_with_the_whole_range(cls) -> None:
    x = torch.distributions.Laplace(0.0, 1.0).sample((50000,))
    found, whole = FakeQuantize(cls), FakeQuantize(MinMaxObserver)
    found(x), whole(x)
    assert error(x, found) < 0.95 * error(x, whole)


EVERY = [
    MinMaxObserver, *SEARCHING, first.MovingAverageMinMaxObserver, first.MinMaxObserver,
    partial(first.ClipObserver, -100.0, 100.0), first.ClipStdObserver,
]  # fmt: skip


@pytest.mark.parametrize("cls", EVERY, ids=str)
def test_the_first_batch_counts_fully_and_zero_freezes(cls) -> None:
    x, y = torch.randn(5000), torch.randn(5000) * 9
    frozen, plain = cls(averaging_constant=0.0), cls(averaging_constant=0.5)
    for ob in (frozen, plain):
        ob(x)
    assert torch.equal(frozen.max_val, plain.max_val)
    before = frozen.max_val.clone()
    for ob in (frozen, plain):
        ob(y)
    assert torch.equal(frozen.max_val, before)
    assert plain.max_val > before


@pytest.mark.parametrize("cls", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool])
def test_every_observer_takes_other_types_and_limits(cls, dtype) -> None:
    values = torch.arange(100)
    found, expected = cls(), cls()
    for limits in ((-float("inf"), float("inf")), (0.0, 50.0)):
        found.observe(values.to(dtype), *limits)
        expected.observe(values.to(dtype).float(), *limits)
    assert found.max_val.dtype == torch.float32
    torch.testing.assert_close(found.max_val, expected.max_val, rtol=1e-6, atol=0)


@pytest.mark.parametrize("cls", EVERY, ids=str)
def test_odd_tensors_give_usable_scales(cls) -> None:
    image = torch.randn(4, 3, 5, 5)
    odd = {
        "a number": torch.tensor(3.0), "channels last": image.to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 7), "every second": image.transpose(0, 3)[::2],
        "in a graph": image.requires_grad_() * 2, "zeros": torch.zeros(5), "signed zeros": torch.tensor([-0.0, 0.0]),
        "tiny": torch.full((3,), 1e-40), "huge": torch.full((3,), 3e38),
    }  # fmt: skip
    for name, x in odd.items():
        ob = cls()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            ob(x)
        scale = ob.calculate_qparams()[0]
        assert scale.shape == (1,) and bool((scale > 0).all() & scale.isfinite().all()), name


def test_kl_that_waits_too_long_warns_and_has_a_scale_all_the_same() -> None:
    quantizer = FakeQuantize(KLObserver, update_interval=10)
    quantizer.set_owner("backbone.conv1")
    quantizer.set_state(FakeQuantState.CALIBRATION)
    for _ in range(3):
        quantizer(torch.randn(2000))
    assert not quantizer.has_statistics
    with pytest.warns(CalibrationWarning, match="backbone.conv1.*3 batches.*update_interval=10"):
        quantizer.set_state(FakeQuantState.VALIDATION)
    assert 0.01 < float(quantizer.scale) < 0.05


@pytest.mark.parametrize("route", ["state", "state_dict", "convert", "calibrate"])
def test_kl_that_waits_too_long_gives_scales_on_every_way_out(route) -> None:
    """Whatever comes after the batches: a state, a checkpoint, conversion."""
    with pytest.warns(CalibrationWarning, match="`module.first` saw 3 batches, fewer than update_interval=10"):
        if route == "calibrate":
            qconfig = get_default_qconfig(activation_observer="kl", activation_qkwargs={"update_interval": 10})
            model = prepare_qat_fx(QuantWrapper(Net()), {"": qconfig})
            found = calibrate(model, [torch.randn(2, 3, 12, 12) for _ in range(3)]).scales["module.first"]
        else:
            model = calibrated("kl", update_interval=10)
            if route == "state":
                set_fake_quantize(model, FakeQuantState.VALIDATION)
            if route == "convert":
                found = convert_fx(model).module.first.scale
            else:
                found = model.state_dict()["module.first.activation_post_process.scale"]
    assert 0.001 < float(found) < 0.1


def test_a_checkpoint_between_updates_of_kl_changes_nothing() -> None:
    quiet, saved = (FakeQuantize(KLObserver, update_interval=2, averaging_constant=0.5) for _ in range(2))
    for batch in [torch.randn(2000) * s for s in (1, 1, 5, 2)]:
        for quantizer in (quiet, saved):
            quantizer(batch)
        if saved.has_statistics:
            saved.state_dict()
    assert torch.equal(quiet.scale, saved.scale)


def test_kl_computes_at_its_interval_and_takes_in_the_rest_at_the_end() -> None:
    ob, every = KLObserver(update_interval=2, averaging_constant=1.0), KLObserver(averaging_constant=1.0)
    batches = [torch.randn(2000) * s for s in (1, 1, 5)]
    for batch in batches:
        ob(batch), every(batch)
    assert ob.max_val < every.max_val
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ob.finish() and not ob.finish()
    assert torch.equal(ob.max_val, every.max_val)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def calibrated(observer: str, batches: int = 3, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    qconfig = get_default_qconfig(activation_observer=observer, activation_qkwargs=kwargs)
    model = prepare_qat_fx(QuantWrapper(Net()), {"": qconfig}).eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        for _ in range(batches):
            model(torch.randn(2, 3, 12, 12))
    return model


def scales(model: nn.Module) -> dict[str, float]:
    return {
        name: float(m.scale)
        for name, m in model.named_modules()
        if isinstance(m, FakeQuantize) and m.scale.numel() == 1 and m.has_statistics
    }


def test_scales_are_chosen_anew_from_what_was_counted() -> None:
    model = calibrated("histogram")
    before = scales(model)
    names = HistogramObserver.reset_scale(model, "percentile", {"percentile": 0.9})
    after = scales(model)
    assert sorted(names) == sorted(before) and all(after[n] < 0.8 * before[n] for n in names)
    HistogramObserver.reset_scale(model, "min_max", prefix="module.first")
    again = scales(model)
    changed = [n for n in names if again[n] != after[n]]
    assert changed and all(n.startswith("module.first") for n in changed)
    assert again[changed[0]] > before[changed[0]]
    # The same as calibrating so in the first place.
    HistogramObserver.reset_scale(model, "mse")
    assert scales(model) == before


@pytest.mark.parametrize("kwargs", [{"prefix": "nowhere"}, {"dtype": "qint16"}])
def test_reset_scale_with_nothing_to_do_is_an_error(kwargs) -> None:
    with pytest.raises(QuantizationConfigError, match="no HistogramObserver has seen data"):
        HistogramObserver.reset_scale(calibrated("histogram", 1), "mse", **kwargs)


def test_a_method_that_is_refused_changes_nothing() -> None:
    model = calibrated("histogram")
    before = scales(model)
    refused = [
        ("foo", {}, "method must be one of"), ("mse", {"stride": 0}, "stride must be a whole number"),
        ("kl", {"bins": 1}, "bins must be a whole number"), ("percentile", {"percentile": "a"}, "a share between"),
        ("percentile", {"percentile": 99.9}, "a share between"), ("mix", {"bins": 5}, "has no parameter 'bins'"),
    ]  # fmt: skip
    for method, kwargs, text in refused:
        with pytest.raises(QuantizationConfigError, match=text):
            HistogramObserver.reset_scale(model, method, kwargs)
        with pytest.raises(QuantizationConfigError, match=text):
            HistogramObserver(method=method, method_kwargs=kwargs)
    assert scales(model) == before
    assert {m.method for m in model.modules() if isinstance(m, HistogramObserver)} == {"mse"}


@pytest.mark.parametrize("cls", EVERY, ids=str)
def test_numbers_at_the_end_of_float32_and_beyond(cls) -> None:
    ends = cls()
    ends(torch.tensor([3.4e38, -3.4e38, 1e38]).repeat(60))
    scale = ends.calculate_qparams()[0]
    assert bool(scale.isfinite().all() & (scale > 0).all())
    ob, expected = cls(), cls()
    x = torch.linspace(-3, 3, 301)
    with pytest.warns(CalibrationWarning, match="saw 2 values of 303 that are NaN or infinite"):
        ob(torch.cat([x.double(), torch.tensor([1e300, -1e300], dtype=torch.float64)]))
    expected(x)
    torch.testing.assert_close(ob.max_val, expected.max_val)


@pytest.mark.parametrize("name", ["min_max", "percentile", "mse", "kl", "mix", "histogram", "clip", "clip_std"])
def test_every_documented_name_makes_a_model_that_runs(name) -> None:
    model = calibrated(name)
    assert all(s > 0 for s in scales(model).values()) and scales(model)
    copied = copy.deepcopy(model)
    x = torch.randn(2, 3, 12, 12)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    set_fake_quantize(copied, FakeQuantState.VALIDATION)
    assert torch.equal(model(x), copied(x))
    calibrated(name).load_state_dict(model.state_dict())  # observers of any kind share their keys
    calibrated("min_max").load_state_dict(model.state_dict())


@pytest.mark.parametrize("name", ["percentile", "mse", "clip", "clip_std"])
def test_weights_have_a_range_for_each_channel(name) -> None:
    qconfig = get_default_qconfig(weight_observer=name)
    weight = torch.randn(6, 40) * torch.arange(1, 7).unsqueeze(1)
    quantizer = qconfig.weight()
    quantizer.weight(weight)
    assert quantizer.scale.shape == (6,)
    if name == "mse":
        plain = get_default_qconfig().weight()
        plain.weight(weight)
        rounded, other = quantizer.round_weight(weight), plain.round_weight(weight)
        assert ((rounded - weight).square().sum(1) <= (other - weight).square().sum(1) + 1e-9).all()
        assert (rounded - weight).square().sum() < 0.98 * (other - weight).square().sum()


def test_weights_that_did_not_change_are_not_searched_again(monkeypatch) -> None:
    quantizer = get_default_qconfig(weight_observer="mse").weight()
    weight = nn.Parameter(torch.randn(4, 10))
    searched = []
    search = MSEObserver.choose_by_channel
    monkeypatch.setattr(MSEObserver, "choose_by_channel", lambda self, rows: searched.append(1) or search(self, rows))
    with torch.no_grad():
        for _ in range(3):
            quantizer.weight(weight)
        assert len(searched) == 1
        weight.mul_(2)
        quantizer.weight(weight)
        assert len(searched) == 2
    quantizer.weight(weight)  # while training, a step may write through `weight.data`, which torch does not count
    assert len(searched) == 3


def test_weights_that_come_again_leave_everything_as_it_is_until_something_changes() -> None:
    quantizer = get_default_qconfig(weight_qkwargs={"averaging_constant": 0.5}).weight()
    observer = quantizer.activation_post_process
    observer.batches = 0
    weight = nn.Parameter(torch.tensor([[1.275, -1.0], [2.55, 0.0]]))
    with torch.no_grad():
        for _ in range(3):
            quantizer.weight(weight)
        written = observer.min_val._version, observer.max_val._version, quantizer.scale._version
        quantizer.weight(weight)
        assert (observer.min_val._version, observer.max_val._version, quantizer.scale._version) == written
        assert observer.batches == 4 and quantizer.scale.tolist() == pytest.approx([0.01, 0.02])
        quantizer.set_qparams(torch.tensor([1.0, 1.0]))  # stays until the next tensor
        quantizer.weight(weight)
        assert quantizer.scale.tolist() == pytest.approx([0.01, 0.02])
        weight.mul_(6)  # a sixth batch of equal weight: five old ones and one six times as large
        quantizer.weight(weight)
        assert quantizer.scale.tolist() == pytest.approx([0.01 * 11 / 6, 0.02 * 11 / 6])
        observer.batches = None
        observer.max_val.fill_(127.5)  # a checkpoint writes so
        quantizer.weight(weight)
        assert quantizer.scale.tolist() == pytest.approx([(1 + 0.06) / 2, (1 + 0.12) / 2])


@pytest.mark.parametrize("name", ["min_max", "mse"])
@torch.no_grad()
def test_weights_that_come_again_in_held_batches_count_in_each_and_write_nothing(name) -> None:
    quantizer = get_default_qconfig(weight_observer=name).weight()
    weight = nn.Parameter(torch.tensor([[1.0, -1.0], [2.0, 0.0]]))
    quantizer.activation_post_process.begin_calibration()
    for step in range(4):
        if step == 3:  # one of four batches
            weight.mul_(5)
        quantizer.activation_post_process.hold()
        quantizer.weight(weight)
        quantizer.release()
        largest = quantizer.activation_post_process.max_val
        if step == 0:
            first, written = largest.clone(), largest._version
        assert step == 3 or largest._version == written
    torch.testing.assert_close(largest, 2 * first)


def reachable_bytes(root: object) -> int:
    """The memory of all tensors that an object holds on to, in whatever way."""
    seen, storages, todo = set(), {}, [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType)):
            continue
        seen.add(id(item))
        if isinstance(item, FunctionType):  # what it has captured, not the globals of its module
            todo += item.__closure__ or ()
            continue
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        todo += gc.get_referents(item)
    return sum(storages.values())


@pytest.mark.parametrize("name", ["min_max", "percentile", "mse", "kl", "mix", "histogram"])
def test_calibration_keeps_no_activations(name) -> None:
    """The least of the activations is larger than all that a sketch takes, and two of them are kept by nobody."""
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    model = prepare_qat_fx(QuantWrapper(body), {"": get_default_qconfig(activation_observer=name)})
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    before = reachable_bytes(model)
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(4, 3, 128, 128))
    quantizers = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    assert reachable_bytes(model) - before <= 1.05 * 64 * 1024 * len(quantizers) < 3 * 4 * 4 * 128 * 128


def test_values_that_share_an_address_are_not_mistaken_for_one_another() -> None:
    """Weights that are folded anew in every step often lie where those of the step before lay."""
    observer = MSEObserver(qscheme=torch.per_channel_symmetric, ch_axis=0, averaging_constant=1.0)
    values = torch.ones(2, 50).cumsum(1)
    for factor in (1.0, 3.0):
        values.detach().numpy()[:] = torch.ones(2, 50).cumsum(1).mul(factor).numpy()
        observer(values)
        assert observer.max_val.tolist() == pytest.approx([50 * factor] * 2, rel=0.05)


HISTOGRAMS = [partial(HistogramObserver, method=method) for method in range_methods()]
FIRST_GENERATION = [first.MinMaxObserver, first.ClipObserver, first.ClipStdObserver]


@pytest.mark.in_turns("axis", "dtype", "make")
@pytest.mark.parametrize("make", [MinMaxObserver, *SEARCHING, *HISTOGRAMS, *FIRST_GENERATION], ids=str)
@pytest.mark.parametrize(("dtype", "half"), [("qint8", 127.5), ("qint16", 32767.5)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_every_observer_has_a_range_for_each_channel(make, dtype, half, axis) -> None:
    """That of an observer which sees this channel only, as far as a bin or a candidate of the search can tell."""
    torch.manual_seed(0)
    shape = [6, 8, 10]
    x = torch.randn(shape) * (1.0 + torch.arange(shape[axis])).reshape([-1 if d == axis else 1 for d in range(3)]) / 9
    ob = make(dtype=dtype, qscheme=torch.per_channel_symmetric, ch_axis=axis)
    ob(x), ob(x)
    scale = ob.calculate_qparams()[0]
    assert scale.shape == (shape[axis],)
    torch.testing.assert_close(scale * half, ob.max_val.maximum(-ob.min_val))
    for channel, found in zip(x.unbind(axis), scale, strict=True):
        alone = make(dtype=dtype)
        alone(channel), alone(channel)
        assert float(found) == pytest.approx(float(alone.calculate_qparams()[0]), rel=0.035), make


def test_stride_looks_at_every_so_many_shares() -> None:
    x = torch.distributions.Laplace(0.0, 1.0).sample((50000,))
    rows = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}
    errors = {}
    for stride in (1, 10, 50):
        for kwargs, values in (({}, x), (rows, x.reshape(1, -1))):
            quantizer = FakeQuantize(MSEObserver, stride=stride, **kwargs)
            quantizer(values)
            errors[stride, bool(kwargs)] = error(x, quantizer)
    # Of every fiftieth share there are two, the whole range and its half; the neighbourhood is looked at in tensors.
    assert errors[1, True] <= errors[10, True] < errors[50, True]
    assert errors[1, False] <= 1.005 * min(errors.values())


@pytest.mark.parametrize("make", [partial(PercentileObserver, 90.0), KLObserver])
def test_bins_are_the_steps_of_the_range(make) -> None:
    x = torch.randn(20000)
    largest = float(x.abs().max())
    for bins in (8, 64, 300):
        ob = make(bins=bins)
        ob(x)
        share = float(ob.max_val) / largest * bins
        assert share == pytest.approx(round(share), abs=1e-3)
        assert 0 < share < bins or (make is KLObserver and share == bins <= 128)  # a level for every bin: no clipping


def test_a_percentile_of_weights_clips_the_largest_only_where_that_is_better() -> None:
    """In few weights the percentile is the largest, which the documented min_max clips by half a step."""
    weight = torch.rand(40, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    steps, errors = {}, {}
    for name in ("percentile", "min_max"):
        quantizer = get_default_qconfig(weight_observer=name).weight()
        quantizer.weight(weight)
        steps[name] = weight.abs().amax(1) / quantizer.scale
        errors[name] = (quantizer.round_weight(weight) - weight).square().sum(1)
    assert {round(n, 3) for n in steps["min_max"].tolist()} == {127.5}
    assert {round(n, 3) for n in steps["percentile"].tolist()} == {127.0, 127.5}
    assert (errors["percentile"] <= errors["min_max"]).all() and errors["percentile"].sum() < errors["min_max"].sum()


def test_powers_of_two() -> None:
    ob = MinMaxObserver(pow_quantization=True)
    ob(torch.tensor([-1.0, 3.0]))
    assert float(ob.calculate_qparams()[0]) == 2.0**-5


def test_first_generation_names() -> None:
    ob = first.PerChannelMinMaxObserver()
    for x in (torch.tensor([[1.0, -2.0], [3.0, 0.0]]), torch.tensor([[0.5, -1.0], [4.0, 0.0]])):
        ob(x)
    assert ob.min_val.tolist() == [-2.0, 0.0] and ob.max_val.tolist() == [1.0, 4.0]
    std = first.ClipStdObserver(2.0)
    x = torch.cat([torch.randn(10000), torch.tensor([50.0])])
    std(x)
    assert 2 < float(std.max_val) < 3.5
    noop = FakeQuantize(first.NoopObserver)
    noop(torch.randn(10))
    assert not noop.has_statistics
    assert first.CalibObserver is HistogramObserver


def test_a_percentile_of_weights_is_the_same_in_both_observers() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    settings = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}
    for share in (0.9, 1.0):
        counted = HistogramObserver(method="percentile", method_kwargs={"percentile": share}, **settings)
        plain = PercentileObserver(100 * share, **settings)
        counted(weight), plain(weight)
        assert torch.equal(counted.max_val, plain.max_val)


def test_an_observer_without_scales_by_channel_says_so() -> None:
    class Half(SketchObserver):
        def choose(self, sketch: Sketch) -> float:
            return sketch.largest / 2

    observer = Half()
    observer(torch.tensor([1.0, -4.0]))
    assert observer.max_val.item() == 2
    with pytest.raises(QuantizationConfigError, match="Half has no scale for each channel"):
        Half(qscheme=torch.per_channel_symmetric, ch_axis=0)(torch.randn(3, 4))
