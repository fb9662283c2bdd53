"""`calibrate`: early stop, going on after an interruption, several processes."""

from __future__ import annotations

import gc
import io
import itertools
import sys
import warnings

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

from horizon_plugin_pytorch.errors import (
    CalibrationError,
    CalibrationWarning,
    QuantizationConfigError,
    QuantizationWarning,
)
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QconfigSetter,
    QuantStub,
    QuantWrapper,
    calibrate,
    convert,
    get_default_qconfig,
    get_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.observer import NoopObserver, PerChannelMinMaxObserver
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver, MinMaxObserver
from horizon_plugin_pytorch.quantization.qconfig_setter import ModuleNameTemplate
from horizon_plugin_pytorch.statistics.observer_names import range_methods
from tests.processes import run_workers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def net(observer: str = "min_max") -> nn.Module:
    torch.manual_seed(0)
    return prepare_qat_fx(QuantWrapper(Net()), {"": get_default_qconfig(activation_observer=observer)})


def batches(count: int, size: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 10, 10, generator=generator) * (1 + i % 3) for i in range(count)]


OBSERVERS = [*range_methods(), "histogram"]  # what is left of all names has limits that the user gives


@pytest.mark.parametrize("observer", OBSERVERS)
def test_batches_count_the_same_in_any_order(observer) -> None:
    data = batches(9)
    found = calibrate(net(observer), data, patience=0)
    turned = calibrate(net(observer), data[::-1], patience=0)
    assert found.steps == 9 and not found.unseen
    for name, scale in found.scales.items():
        torch.testing.assert_close(scale, turned.scales[name], rtol=1e-4, atol=0)


def test_the_model_is_ready_to_validate_and_the_range_is_the_mean_of_the_batches() -> None:
    model, data = net(), batches(4)
    result = calibrate(model, data)
    assert not model.training and model.quant.activation_post_process.is_exact
    largest = torch.stack([b.max() for b in data]).mean()
    assert float(model.quant.activation_post_process.activation_post_process.max_val) == pytest.approx(float(largest))
    assert "quant" in result.scales and "module.first" in str(result) and "4 batches" in str(result)
    # Training afterwards averages as configured again.
    assert model.quant.activation_post_process.activation_post_process.batches is None


def test_it_stops_when_the_scales_have_settled() -> None:
    result = calibrate(net(), batches(3) * 500, tolerance=0.01, patience=6)
    assert result.has_settled and 6 < result.steps < 1500
    assert calibrate(net(), batches(12), tolerance=0.0, patience=6).has_settled is False
    assert calibrate(net(), batches(12), steps=5).steps == 5


class Observed(nn.Module):
    """Quantizers that see numbers of their own."""

    def __init__(self, *observers: type) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(FakeQuantize(observer) for observer in observers)

    def forward(self, *values) -> None:
        for quantizer, value in zip(self.quantizers, values, strict=True):
            if value is not None:
                quantizer(torch.as_tensor(value).float().reshape(-1, 1))


@pytest.mark.slow
@given(st.lists(st.tuples(*[st.integers(1, 9)] * 2), min_size=1, max_size=25), st.integers(1, 5), st.floats(0.02, 0.4))
@example([(2, 5), (3, 5), (1, 5), (2, 5)], 2, 0.02)  # it comes back to where it was
@example([(5, 2), (5, 3), (5, 4), (5, 5)], 2, 0.2)  # one has settled, the other has not
def test_it_stops_where_no_scale_has_moved_over_the_last_batches(data, patience, tolerance) -> None:
    means = [[sum(seen) / len(seen) for seen in zip(*data[: n + 1], strict=True)] for n in range(len(data))]
    moved = []
    for n in range(patience, len(data)):
        windows = zip(*means[n - patience : n + 1], strict=True)
        moved.append(max((max(window) - min(window)) / window[-1] for window in windows))
    assume(all(abs(m - tolerance) > 1e-5 for m in moved))  # float32 may fall on the other side
    settled = next((patience + 1 + n for n, m in enumerate(moved) if m <= tolerance), None)
    result = calibrate(Observed(MinMaxObserver, MinMaxObserver), data, patience=patience, tolerance=tolerance)
    assert (result.has_settled, result.steps) == (settled is not None, settled or len(data))


def test_scales_that_stay_need_no_tolerance_and_what_learns_nothing_does_not_count() -> None:
    result = calibrate(Observed(MinMaxObserver, NoopObserver), [(3, 5)] * 9, patience=3, tolerance=0.0)
    assert result.has_settled and result.steps == 4


def test_channels_that_are_known_late_have_to_settle_from_there() -> None:
    late = [(None,)] * 3 + [([1.0, 2.0],)] * 9
    result = calibrate(Observed(PerChannelMinMaxObserver), late, patience=3)
    assert result.has_settled and result.steps == 3 + 4


class Stop(Exception):
    pass


@pytest.mark.parametrize("observer", OBSERVERS)
def test_it_goes_on_where_it_was_interrupted(observer, tmp_path) -> None:
    data, file = batches(7), tmp_path / "state.pt"
    whole = calibrate(net(observer), data, patience=0)

    def interrupted():
        yield from data[:4]
        raise Stop

    with pytest.raises(Stop):
        calibrate(net(observer), interrupted(), state_file=file)
    assert torch.load(file, weights_only=True)["steps"] == 4
    result = calibrate(net(observer), data, state_file=file, patience=0)
    assert result.steps == 7 and not file.exists()
    for name, scale in whole.scales.items():
        assert torch.equal(scale, result.scales[name]), name


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_batch_that_was_interrupted_counts_once(observer, tmp_path) -> None:
    """Some observers have seen a part of it when the state is written."""
    data, file = batches(7), tmp_path / "state.pt"
    whole = calibrate(net(observer), data, patience=0)
    model, seen = net(observer), []

    def stop(*args) -> None:
        seen.append(1)
        if len(seen) == 5:
            raise Stop

    model.module.second.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        calibrate(model, data, state_file=file)
    assert torch.load(file, weights_only=True)["steps"] == 4
    result = calibrate(net(observer), data, state_file=file, patience=0)
    for name, scale in whole.scales.items():
        assert torch.equal(scale, result.scales[name]), name


def test_kl_goes_on_between_its_updates(tmp_path) -> None:
    data, file = batches(7), tmp_path / "state.pt"

    def make() -> nn.Module:
        torch.manual_seed(0)
        qkwargs = {"update_interval": 3}
        qconfig = get_default_qconfig(activation_observer="kl", activation_qkwargs=qkwargs)
        return prepare_qat_fx(QuantWrapper(Net()), {"": qconfig})

    def interrupted():
        yield from data[:5]
        raise Stop

    whole = calibrate(make(), data, patience=0)
    with pytest.raises(Stop):
        calibrate(make(), interrupted(), state_file=file)
    result = calibrate(make(), data, state_file=file, patience=0)
    assert all(torch.equal(scale, result.scales[name]) for name, scale in whole.scales.items())


def test_scales_that_wait_for_an_update_have_not_settled() -> None:
    qconfig = get_default_qconfig(activation_observer="kl", activation_qkwargs={"update_interval": 10})
    result = calibrate(prepare_qat_fx(QuantWrapper(Net()), {"": qconfig}), batches(30), patience=4, tolerance=0.5)
    assert result.steps > 20 and not result.unseen


def test_a_state_of_something_else_is_refused(tmp_path) -> None:
    file = tmp_path / "state.pt"
    file.write_bytes(b"not a state")
    with pytest.raises(CalibrationError, match="not a state that calibrate wrote.*Remove it"):
        calibrate(net(), batches(1), state_file=file)
    file.unlink()
    other = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 2, 1)), {"": get_default_qconfig()})
    with pytest.raises(Stop):
        calibrate(other, stopping(), state_file=file)
    with pytest.raises(CalibrationError, match="another model"):
        calibrate(net(), batches(1), state_file=file)
    file.unlink()
    with pytest.raises(Stop):
        calibrate(net(), stopping(), state_file=file)
    for other in ("histogram", "percentile"):
        name = {"histogram": "HistogramObserver", "percentile": "PercentileObserver"}[other]
        with pytest.raises(CalibrationError, match=f"MinMaxObserver.* at `quant`, where the model has {name}"):
            calibrate(net(other), batches(1), state_file=file)


def test_a_state_of_other_settings_or_channels_is_refused(tmp_path) -> None:
    file = tmp_path / "state.pt"

    def make(channels: int, **qkwargs) -> nn.Module:
        qconfig = get_default_qconfig(activation_observer="percentile", activation_qkwargs=qkwargs)
        return prepare_qat_fx(QuantWrapper(nn.Conv2d(3, channels, 1)), {"": qconfig})

    with pytest.raises(Stop):
        calibrate(make(4, percentile=99.0), stopping(), state_file=file)
    with pytest.raises(CalibrationError, match=r"percentile=99.0.*at `quant`, where the model has.*percentile=99.9"):
        calibrate(make(4, percentile=99.9), batches(1), state_file=file)
    changed = r"of another model: the module `module` was Conv2d\(3, 4, .*and is Conv2d\(3, 6"
    with pytest.raises(CalibrationError, match=changed):
        calibrate(make(6, percentile=99.0), batches(1), state_file=file)


QUANT = "quant.activation_post_process"
DAMAGES = {
    "no observers": lambda s: s.update(observers=None),
    "a list": lambda s: s.update(observers=[1]),
    "a number": lambda s: s["observers"].update({QUANT: 3}),
    "steps below 0": lambda s: s.update(steps=-4),
    "bins missing": lambda s: s["observers"][QUANT].update(counts=torch.zeros(3, dtype=torch.int32)),
    "other counts": lambda s: s["observers"][QUANT]["counts"].add_(1),
    "seven ranges": lambda s: s["observers"][QUANT].update(min_val=torch.zeros(7), max_val=torch.ones(7)),
    "NaN": lambda s: s["observers"][QUANT]["min_val"].fill_(float("nan")),
    "no version": lambda s: s.pop("version"),
    "another version": lambda s: s.update(version=1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused(damage, tmp_path) -> None:
    file = tmp_path / "state.pt"
    with pytest.raises(Stop):
        calibrate(net("histogram"), stopping(), state_file=file)
    state = torch.load(file, weights_only=True)
    DAMAGES[damage](state)
    torch.save(state, file)
    with pytest.raises(CalibrationError, match="state_file=.*state.pt.*Remove it to begin anew"):
        calibrate(net("histogram"), batches(2), state_file=file)


def test_a_folder_is_no_state_file(tmp_path) -> None:
    with pytest.raises(CalibrationError, match="state_file=.*cannot be read.*Give the path of a file"):
        calibrate(net(), batches(1), state_file=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("observer", ["min_max", "histogram"])
def test_an_interrupted_run_stops_where_the_whole_one_does(observer, tmp_path) -> None:
    data, file = batches(3) * 100, tmp_path / "state.pt"
    whole = calibrate(net(observer), data, tolerance=0.02)
    assert whole.has_settled

    def interrupted():
        yield from data[: whole.steps - 1]
        raise Stop

    with pytest.raises(Stop):
        calibrate(net(observer), interrupted(), tolerance=0.02, state_file=file)
    result = calibrate(net(observer), data, tolerance=0.02, state_file=file)
    assert result.steps == whole.steps and result.has_settled
    assert all(torch.equal(scale, result.scales[name]) for name, scale in whole.scales.items())


@pytest.mark.parametrize("observer", [*OBSERVERS, "clip", "clip_std"])
def test_a_second_calibration_begins_anew(observer) -> None:
    """Where somebody forgot to normalise the images, and calibrates again."""
    model = net(observer)
    calibrate(model, [batch * 1e30 for batch in batches(3)], patience=0)
    again = calibrate(model, batches(3), patience=0).scales
    fresh = calibrate(net(observer), batches(3), patience=0).scales
    assert all(torch.equal(scale, again[name]) for name, scale in fresh.items())


def test_a_checkpoint_forgets_what_was_counted() -> None:
    model, other = net("histogram"), net("histogram")
    calibrate(model, [batch * 255 for batch in batches(2)])
    calibrate(other, batches(2))
    model.load_state_dict(other.state_dict())
    with pytest.raises(QuantizationConfigError, match="a checkpoint has no counts"):
        HistogramObserver.reset_scale(model, "mse")


@pytest.mark.slow
@pytest.mark.parametrize("interval", [2, 8, 15, 100])
def test_batches_after_the_last_update_of_kl_count_too(interval) -> None:
    data = [batch * (1 if i < 8 else 5) for i, batch in enumerate(batches(15))]

    def found(interval: int) -> torch.Tensor:
        torch.manual_seed(0)
        qconfig = get_default_qconfig(activation_observer="kl", activation_qkwargs={"update_interval": interval})
        return calibrate(prepare_qat_fx(QuantWrapper(Net()), {"": qconfig}), data, patience=0).scales["quant"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        assert torch.equal(found(interval), found(1))


def test_it_does_not_stop_before_all_modules_were_reached() -> None:
    data = [(batches(1)[0], False)] * 12 + [(batches(1)[0], True)] * 12
    result = calibrate(branch("min_max"), data)
    assert result.has_settled and not result.unseen and 12 + 8 < result.steps < 24


class Twice(nn.Module):
    """One stub and one activation for two inputs, the second ten times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.act, self.head = QuantStub(), DeQuantStub(), nn.SiLU(), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [self.dequant(self.act(self.head(self.quant(value)))) for value in (x, y)]


def twice(route: str, observer: str) -> nn.Module:
    torch.manual_seed(0)
    model, qconfig = Twice().eval(), get_default_qconfig(activation_observer=observer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        if route == "prepare":
            return prepare(model, pairs(1)[0], qconfig_dict={"": qconfig}, out_dir=None)
        if route == "prepare_qat_fx":
            return prepare_qat_fx(model, {"": qconfig})
        model.qconfig = qconfig
        return prepare_qat(model)


def pairs(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(batch, batch.flip(0) * 10) for batch in batches(count)]


ROUTES = ["prepare", "prepare_qat_fx", "prepare_qat"]


@pytest.mark.parametrize("observer", OBSERVERS)
def test_calls_of_a_batch_count_together_on_every_route(observer) -> None:
    found = [calibrate(twice(route, observer), pairs(4), patience=0).scales["quant"] for route in ROUTES]
    assert all(torch.equal(scale, found[0]) for scale in found)
    if observer == "min_max":
        means = [
            torch.stack([end(torch.stack(pair)) for pair in pairs(4)]).mean().abs() for end in (torch.min, torch.max)
        ]
        assert float(found[0]) * 127.5 == pytest.approx(float(max(means)))


def test_a_state_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path) -> None:
    (tmp_path / "file").touch()
    ran = []
    with pytest.raises(CalibrationError, match="state_file=.*cannot be written.*a folder that can be written to"):
        calibrate(net(), batches(1), forward=lambda *_: ran.append(1), state_file=tmp_path / "file" / "state.pt")
    assert not ran


def stopping():
    yield from batches(1)
    raise Stop


def test_a_model_in_a_parallel_wrapper_takes_what_the_model_takes() -> None:
    expected = calibrate(net(), batches(2)).scales["quant"]
    found = calibrate(nn.DataParallel(net()), [(b, "label") for b in batches(2)]).scales
    assert torch.equal(found["module.quant"], expected)


def test_what_loaders_give() -> None:
    expected = calibrate(net(), batches(2)).scales["quant"]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.cat(batches(2)), torch.arange(8)), batch_size=4
    )
    for data in (loader, [{"x": b} for b in batches(2)], ([b] for b in batches(2))):
        assert torch.equal(calibrate(net(), data).scales["quant"], expected)
    called = calibrate(net(), batches(2), forward=lambda model, batch: model(batch))
    assert torch.equal(called.scales["quant"], expected)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: calibrate(nn.ReLU(), batches(1)), QuantizationConfigError, "call `prepare` first"),
        (lambda: calibrate(net(), []), QuantizationConfigError, "no batches"),
        (lambda: calibrate(net(), batches(1), steps=0), QuantizationConfigError, "steps"),
        (lambda: calibrate(net(), batches(1), steps=2.5), QuantizationConfigError, "steps must be a whole number"),
        (lambda: calibrate(net(), batches(1), patience=-3), QuantizationConfigError, "patience must.* from 0 on"),
        (lambda: calibrate(net(), batches(1), save_interval=0), QuantizationConfigError, "save_interval must.*from 1"),
        (lambda: calibrate(net(), batches(1), tolerance=float("nan")), QuantizationConfigError, "tolerance"),
        (lambda: calibrate(net(), batches(1)[0]), QuantizationConfigError, "got a Tensor; give .batch."),
        (lambda: calibrate(net(), {"x": batches(1)}), QuantizationConfigError, "got a dict; give .batch."),
        (lambda: calibrate(net(), 5), QuantizationConfigError, "data must be a list.*got a int"),
        (lambda: calibrate(net(), [{"images": batches(1)[0]}]), CalibrationError, "batch 0 does not fit.*forward="),
    ],
)
def test_bad_calls_are_refused(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


def test_modules_that_no_batch_reached_are_named() -> None:
    model = branch("min_max")
    result = calibrate(model, [(batches(1)[0], False)])
    assert "second" in result.unseen and "first" not in result.unseen
    assert "No finite value reached: second" in str(result) and "it is 1, and convert warns of it." in str(result)
    with pytest.warns(CalibrationWarning, match="second .*not collected any statistics.*the scale is 1"):
        convert(model)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_modules_that_only_an_earlier_run_reached_are_named_and_keep_their_scales(observer) -> None:
    model, (data,) = branch(observer), batches(1)
    before = calibrate(model, [(data * 100, True)])
    result = calibrate(model, [(data, False)])
    assert result.unseen == calibrate(branch(observer), [(data, False)]).unseen
    assert result.scales.keys() == before.scales.keys() - set(result.unseen)
    assert float(result.scales["first"]) < float(before.scales["first"]) / 10
    assert float(model.second.activation_post_process.scale) == float(before.scales["second"])
    assert not calibrate(model, [(data, True)]).unseen


def test_an_error_leaves_what_no_batch_has_changed() -> None:
    model, (data,) = branch("mse"), batches(1)
    before = calibrate(model, [data])

    def fail(model: nn.Module, batch: torch.Tensor) -> None:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        calibrate(model, [data * 9], forward=fail)
    assert all(q.has_statistics for q in model.modules() if isinstance(q, FakeQuantize))
    after = calibrate(model, [data]).scales
    assert all(torch.equal(scale, after[name]) for name, scale in before.scales.items())


def test_data_without_a_finite_value_are_an_error() -> None:
    with (
        pytest.warns(CalibrationWarning, match="NaN or infinite"),
        pytest.raises(CalibrationError, match="in 2 batches no finite value reached any activation"),
    ):
        calibrate(net(), [torch.full((1, 3, 10, 10), torch.nan)] * 2)


def test_the_result_says_why_it_ended() -> None:
    data = batches(1) * 20
    assert calibrate(net(), data[:3]).ending == "all data were run"
    assert calibrate(net(), data, steps=3).ending == "steps=3 were wanted"
    assert calibrate(net(), data).ending == "the scales have settled"


@pytest.mark.parametrize("is_list", [True, False])
def test_a_state_of_more_batches_than_there_are_is_refused(tmp_path, is_list: bool) -> None:
    file = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        calibrate(net(), interrupted(batches(6)), state_file=file)
    with pytest.raises(CalibrationError, match="has seen 6 batches, more than steps=5"):
        calibrate(net(), batches(9), steps=5, state_file=file)
    short = batches(4)
    with pytest.raises(CalibrationError, match="has seen 6 batches, and the data have 4"):
        calibrate(net(), short if is_list else iter(short), state_file=file)
    assert calibrate(net(), batches(9), steps=6, state_file=file).steps == 6


def interrupted(data: list[torch.Tensor]):
    yield from data
    raise KeyboardInterrupt


def test_a_refused_state_changes_nothing(tmp_path) -> None:
    file, data = tmp_path / "state", batches(4)
    with pytest.raises(KeyboardInterrupt):
        calibrate(net(), interrupted([x * 100 for x in data]), state_file=file)
    model = net()
    model.module.second.activation_post_process = net("mse").module.second.activation_post_process
    calibrate(model, data)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CalibrationError, match=r"was written with .* at `module.second`"):
        calibrate(model, data, state_file=file)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_interrupted_run_remembers_ranges_that_differ(tmp_path) -> None:
    file, (data,) = tmp_path / "state", batches(1)
    every = [data * 3, data, data, data]
    with pytest.raises(KeyboardInterrupt):
        calibrate(net(), interrupted(every[:2]), state_file=file)
    assert calibrate(net(), every, state_file=file).uneven == calibrate(net(), every).uneven != {}


def test_scales_that_are_given_and_frozen_count_as_known() -> None:
    model, data = net(), batches(1) * 20
    quantizer = model.quant.activation_post_process
    quantizer.activation_post_process.averaging_constant = 0.0
    quantizer.set_qparams(0.05)
    result = calibrate(model, data)
    assert not result.unseen and result.has_settled and float(result.scales["quant"]) == pytest.approx(0.05)


def test_a_run_without_batches_keeps_what_was_counted() -> None:
    model = net("histogram")
    calibrate(model, batches(2))
    with pytest.raises(QuantizationConfigError, match="no batches"):
        calibrate(model, [])
    assert len(HistogramObserver.reset_scale(model, method="min_max")) == 3


@pytest.mark.parametrize("observer", ["min_max", "percentile", "mse", "mix"])
def test_ranges_that_differ_between_batches_are_named(observer) -> None:
    data = batches(1)[0]
    even = calibrate(net(observer), [data, data * 1.2])
    uneven = calibrate(net(observer), [data, data * 3])
    assert not even.uneven and "wider range" not in str(even)
    assert uneven.uneven["quant"] == pytest.approx(1.5, rel=0.02)
    assert "quant 1.5 times" in str(uneven) and "`auto_calibrate`" in str(uneven)
    assert not calibrate(net("histogram"), [data, data * 3]).uneven


class Branch(Net):
    """Leaves out its second layer if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, x: torch.Tensor, deep: bool = True) -> torch.Tensor:
        y = self.first(self.quant(x))
        return self.dequant(self.second(y.sigmoid()).tanh() if deep else y)


def branch(observer: str) -> nn.Module:
    torch.manual_seed(0)
    qconfig = get_default_qconfig(activation_observer=observer, weight_observer="mse")
    return prepare(Branch(), (batches(1)[0], True), qconfig_dict={"": qconfig}, out_dir=None)


WORKER = """
import itertools, sys
import torch, torch.distributed as dist
from horizon_plugin_pytorch.errors import CalibrationError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import calibrate
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver
from tests.calibration.test_calibrate import OBSERVERS, ROUTES, batches, branch, net, pairs, twice

set_march(March.BAYES)
torch.set_num_threads(1)
rank, place = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)


def own(count):
    return (batch.chunk(2)[rank] for batch in batches(count))


found = {name: calibrate(net(name), own(4), patience=0).scales for name in OBSERVERS}
for route, name in itertools.product(ROUTES, OBSERVERS):
    shares = [(x.chunk(2)[rank], y.chunk(2)[rank]) for x, y in pairs(3)]
    found[f"{route} {name}"] = calibrate(twice(route, name), shares, patience=0).scales
counted = net("histogram")
calibrate(counted, own(4), patience=0)
HistogramObserver.reset_scale(counted, "percentile", {"percentile": 0.99})
found["reset"] = {"quant": counted.quant.activation_post_process.scale}
# Processes whose batches take different ways: the first skips the second layer in every batch.
for name in OBSERVERS:
    found[f"branch {name}"] = calibrate(branch(name), [(x, bool(rank)) for x in own(4)], patience=0).scales
# Shares of different length: all stop with the shortest.
found["uneven"] = calibrate(net(), own(2 + rank), patience=0).scales
try:
    calibrate(net(), own(1), state_file=".")
except CalibrationError as error:
    found["folder"] = str(error)
torch.save(found, f"{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_two_processes_find_the_scales_of_one_over_all_data(tmp_path) -> None:
    first, second = run_workers(tmp_path, WORKER)
    for done in (first, second):
        assert done.returncode == 0, done.stderr[-3000:]
    assert "process 1 has data left after 2 batches" in second.stderr and "has data left" not in first.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name in OBSERVERS:
        whole = calibrate(net(name), batches(4), patience=0).scales
        for tensor, scale in whole.items():
            assert torch.equal(first[name][tensor], second[name][tensor])
            # Exact for min_max, where sums in another order give the layers' results; a bin is a 1024th of its value.
            tolerance = 1e-6 if name == "min_max" else 1 / 1024
            torch.testing.assert_close(first[name][tensor], scale, rtol=tolerance, atol=0)
        if name == "min_max":
            assert torch.equal(first[name]["quant"], whole["quant"])
    for name in OBSERVERS:
        apart = calibrate(branch(name), [(x.chunk(2)[1], True) for x in batches(4)], patience=0).scales
        whole = calibrate(branch(name), [(x, False) for x in batches(4)], patience=0).scales
        joined = first[f"branch {name}"]
        assert joined.keys() == apart.keys() and len(apart) > len(whole)
        for tensor, scale in joined.items():
            assert torch.equal(scale, second[f"branch {name}"][tensor])
            torch.testing.assert_close(scale, whole.get(tensor, apart[tensor]), rtol=1 / 1024, atol=0)
    for route, name in itertools.product(ROUTES, OBSERVERS):
        for tensor, scale in calibrate(twice(route, name), pairs(3), patience=0).scales.items():
            torch.testing.assert_close(first[f"{route} {name}"][tensor], scale, rtol=1 / 1024, atol=0)
            assert torch.equal(first[f"{route} {name}"][tensor], second[f"{route} {name}"][tensor])
    assert first["folder"] == second["folder"] and "cannot be read" in first["folder"]
    counted = net("histogram")
    calibrate(counted, batches(4), patience=0)
    HistogramObserver.reset_scale(counted, "percentile", {"percentile": 0.99})
    assert torch.equal(first["reset"]["quant"], second["reset"]["quant"])
    assert torch.equal(first["reset"]["quant"], counted.quant.activation_post_process.scale)
    two = calibrate(net(), batches(2), patience=0).scales
    torch.testing.assert_close(first["uneven"]["quant"], two["quant"], rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("observer", OBSERVERS)
def test_calibration_keeps_no_activations(observer) -> None:
    """Of a batch of an odd size nothing is left but what the observers have learned."""
    model = net(observer)
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    before = {id(x) for x in gc.get_objects() if isinstance(x, torch.Tensor)}
    with torch.no_grad():
        model(torch.randn(1013, 3, 6, 6))
    gc.collect()
    made = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and id(x) not in before]
    assert not [x.shape for x in made if x.numel() % 1013 == 0 and x.numel()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_in_a_terminal(monkeypatch) -> None:
    for progress in (True, False):
        monkeypatch.setattr(sys, "stderr", Terminal())
        calibrate(net(), batches(3), progress=progress)
        text = sys.stderr.getvalue()
        assert ("calibrate: 100%" in text and "3/3" in text) == progress
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    calibrate(net(), batches(3))
    assert sys.stderr.getvalue() == ""


def test_the_manual_way_stays() -> None:
    model = net()
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    data = batches(3)
    with torch.no_grad():
        for batch in data:
            model(batch)
    expected = data[0].max()
    for batch in data[1:]:
        expected = expected + 0.01 * (batch.max() - expected)
    found = model.quant.activation_post_process.activation_post_process.max_val
    assert float(found) == pytest.approx(float(expected))


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_model_without_scales_has_nothing_to_calibrate(method: str) -> None:
    """All operators in float16: the first step of the guides' mixed precision, and the same script goes on."""
    set_march(March.NASH_M)
    x = torch.randn(2, 3, 4, 4)
    setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": torch.float16})], save_dir=None)
    net = nn.Sequential(QuantStub(), nn.Sigmoid(), nn.Tanh(), DeQuantStub())
    model = prepare(net, (x,), setter, method=method, out_dir=None).train()
    result = calibrate(model, [x])
    assert (result.steps, result.scales) == (0, {}) and "no operator has a scale to calibrate" in str(result)
    assert not model.training
    with torch.no_grad():
        assert (model(x) - net(x)).abs().max() < 2e-3
