"""Data and states that are not what they seem are told once, with module and remedy; ordinary models are left alone."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.errors import QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    calibrate,
    convert,
    get_default_qconfig,
    get_fake_quantize,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_template import (
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
)
from tests.models import ZOO, make

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
METHODS = ["fx", "eager", "jit-strip", "symbolic"]
INT16 = {"activation_qkwargs": {"dtype": "qint16"}}


@pytest.fixture(autouse=True)
def march() -> None:
    set_march(March.NASH_E)
    torch.manual_seed(0)


def net(*extra: nn.Module) -> nn.Module:
    return QuantWrapper(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *extra, nn.Conv2d(8, 2, 1))).eval()


def prepared(model: nn.Module, method: str = "fx", x: Any = X, **qconfig: Any) -> Any:
    config = get_default_qconfig(**qconfig)
    if method == "fx":
        return prepare_qat_fx(model, {"": config})
    if method == "eager":
        model.qconfig = config
        return prepare_qat(model)
    args = x if isinstance(x, tuple) else (x,)
    return prepare(model, args, qconfig_dict={"": config}, method=method, out_dir=None)


def said(call: Callable[[], Any]) -> list[str]:
    """What is said of quantization."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, QuantizationWarning)]


def set_state(model: nn.Module, state: str) -> None:
    set_fake_quantize(model, FakeQuantState[state])


# -- no data


@pytest.mark.parametrize("method", METHODS)
def test_validation_without_data_is_told_once(method) -> None:
    model = prepared(net(), method).eval()
    set_state(model, "VALIDATION")
    (message,) = said(lambda: model(X))
    assert "at `quant`" in message and "never seen data" in message and "Calibrate the model first" in message
    assert not said(lambda: [model(X) for _ in range(3)])
    assert torch.equal(model(X), convert(model)(X))  # garbage, and the same everywhere


def test_a_copy_and_a_pickle_have_been_told_too() -> None:
    model = prepared(net())
    set_state(model, "VALIDATION")
    assert said(lambda: model(X))
    assert not said(lambda: copy.deepcopy(model)(X))
    assert not said(lambda: pickle.loads(pickle.dumps(model))(X))


def test_only_what_runs_is_missed() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.body, self.auxiliary = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            y = self.body(self.quant(x))
            return self.dequant(self.auxiliary(y) if self.training else y)

    model = prepared(Branches().eval(), "jit-strip")
    assert not said(lambda: calibrate(model, [X], progress=False))
    assert not said(lambda: model(X))


def test_what_was_calibrated_loaded_or_given_is_not_missed() -> None:
    calibrated = prepared(net())
    calibrate(calibrated, [X], progress=False)
    loaded = prepared(net())
    assert not said(lambda: loaded.load_state_dict(calibrated.state_dict()))
    set_state(loaded, "VALIDATION")
    assert not said(lambda: loaded(X))


def test_values_that_are_all_nan_leave_a_module_unseen() -> None:
    model = prepared(net()).eval()
    set_state(model, "CALIBRATION")
    assert any("NaN or infinite" in m for m in said(lambda: model(X * float("nan"))))
    set_state(model, "VALIDATION")
    assert any("never seen data" in m for m in said(lambda: model(X)))


# -- modes and states


@pytest.mark.parametrize("state", ["CALIBRATION", "VALIDATION"])
@pytest.mark.parametrize("method", METHODS)
def test_train_mode_without_gradients_is_told_once(method, state) -> None:
    model = prepared(net(nn.Dropout(0.5)), method)
    calibrate(model, [X], progress=False)
    model.train()
    set_state(model, state)
    with torch.no_grad():
        (message,) = said(lambda: model(X))
        assert "`quant` is run without gradients in train mode" in message and "`model.eval()`" in message
        assert not said(lambda: model(X))


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_the_check_of_prepare_runs_train_mode_without_a_word(method, tmp_path) -> None:
    float_net = net(nn.Dropout(0.5))
    float_net.for_training = nn.Conv2d(1, 1, 1)  # does not run: is it for training?
    setter = default_calibration_qconfig_setter
    found = []
    assert not said(lambda: found.append(prepare(float_net, X, setter, method, out_dir=str(tmp_path))))
    model = found[0].train()
    with torch.no_grad():
        assert any("train mode" in message for message in said(lambda: model(X)))


@pytest.mark.parametrize("layer", [nn.Dropout(0.0), nn.BatchNorm2d(8), nn.Identity()])
def test_a_model_that_does_the_same_in_train_mode_may_be_in_it(layer) -> None:
    model = prepared(net(layer) if not isinstance(layer, nn.BatchNorm2d) else folded())
    calibrate(model, [X], progress=False)
    model.train()
    with torch.no_grad():
        assert not said(lambda: model(X))


@pytest.mark.parametrize("method", METHODS)
def test_training_a_converted_model_is_told_once(method) -> None:
    model = prepared(net(), method)
    calibrate(model, [X], progress=False)
    quantized = convert(model)
    assert not said(lambda: quantized(X))
    quantized.train()
    with torch.no_grad():
        assert not said(lambda: quantized(X))
    (message,) = said(lambda: quantized(X))
    assert "is a converted model and runs in train mode" in message and "Train the QAT model" in message
    assert not said(lambda: quantized(X))


class FloatPart(nn.Module):
    """A batch norm behind the quantized part, and a Dropout inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 8, 3)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm2d(8)
        self.norm.qconfig = None  # in eager mode nobody knows that it stays float

    def forward(self, x):
        return self.norm(self.dequant(self.drop(self.conv(self.quant(x)))))


@pytest.mark.parametrize("method", METHODS)
def test_a_float_part_of_a_converted_model_in_train_mode_is_told_once(method) -> None:
    model = prepared(FloatPart().eval(), method)
    calibrate(model, [X], progress=False)
    converted = convert(model)
    with torch.no_grad():
        assert not said(lambda: converted(X))
        again = pickle.loads(pickle.dumps(copy.deepcopy(converted))).train()
        (message,) = said(lambda: again(X))
        assert "`BatchNorm2d` at `norm` of a converted model" in message and "`model.eval()`" in message
        assert not said(lambda: again(X))
        assert said(lambda: converted.train()(X))  # of a model of its own
    assert not said(lambda: convert(model).train()(X))  # the float part may be trained


def test_the_state_of_a_model_can_be_asked() -> None:
    model = prepared(net())
    for state in FakeQuantState:
        set_fake_quantize(model, state)
        assert get_fake_quantize(model) is state
    set_fake_quantize(model.get_submodule("quant"), FakeQuantState.CALIBRATION)
    assert get_fake_quantize(model) is None
    assert get_fake_quantize(nn.ReLU()) is None


def folded() -> nn.Module:
    return QuantWrapper(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())).eval()


def train(model: nn.Module) -> None:
    model.train()
    set_state(model, "QAT")
    model(X).sum().backward()


@pytest.mark.parametrize("method", METHODS)
def test_a_trained_model_that_is_evaluated_in_the_qat_state_is_told_once(method) -> None:
    model = prepared(net(nn.Dropout(0.1)), method)
    calibrate(model, [X], progress=False)
    assert not said(lambda: train(model))
    model.eval()
    with torch.no_grad():
        (message,) = said(lambda: model(X))
        assert "evaluated in the QAT state" in message and "FakeQuantState.VALIDATION" in message
        assert not said(lambda: model(X))


def test_the_ways_of_the_guides_are_left_alone() -> None:
    model = prepared(net(nn.Dropout(0.1)))

    def way() -> None:
        model.eval()
        set_state(model, "CALIBRATION")
        with torch.no_grad():
            for _ in range(3):
                model(X)
        set_state(model, "VALIDATION")
        with torch.no_grad():
            model(X)
        for _ in range(2):
            train(model)
            model.eval()
            set_state(model, "VALIDATION")
            with torch.no_grad():
                model(X)
        convert(model)(X)

    assert not said(way)


def test_a_checkpoint_that_puts_a_model_into_calibration_is_told_when_it_runs() -> None:
    source, model = prepared(net()).eval(), prepared(net()).eval()
    set_state(source, "CALIBRATION")
    source(X)
    set_state(model, "VALIDATION")
    assert not said(lambda: model.load_state_dict(source.state_dict()))
    with torch.no_grad():
        (message,) = said(lambda: model(X))
        assert "in the CALIBRATION state, which the checkpoint" in message and "FakeQuantState.VALIDATION" in message
    other = prepared(net()).eval()
    other.load_state_dict(source.state_dict())
    set_state(other, "CALIBRATION")  # somebody wants it so
    with torch.no_grad():
        assert not said(lambda: other(X))


def test_conversion_in_the_calibration_state_is_told() -> None:
    model = prepared(net()).eval()
    set_state(model, "CALIBRATION")
    model(X)
    (message,) = said(lambda: convert(model))
    assert "converted in the CALIBRATION state, in which it computes in float" in message
    set_state(model, "VALIDATION")
    assert not said(lambda: convert(model))


# -- ranges


@pytest.mark.parametrize("scales", [(1, 1, 1, 4), (1, 1, 1, 1, 1, 3), (0.01, 1), (1, 1, 1, 255)])
@pytest.mark.parametrize("observer", ["min_max", "mse"])
def test_batches_of_different_ranges_are_told(observer, scales) -> None:
    model = prepared(net(), **INT16, activation_observer=observer)
    (message,) = said(lambda: calibrate(model, [X * s for s in scales], progress=False, patience=0))
    assert "ranges differ between batches" in message and "`quant` " in message and "normalised alike" in message


def test_so_they_are_in_a_loop_by_hand() -> None:
    model = prepared(net())
    model.eval()
    set_state(model, "CALIBRATION")
    for scale in (1, 1, 1, 4):
        model(X * scale)
    (message,) = said(lambda: set_state(model, "VALIDATION"))
    assert message.startswith("calibration: ranges differ between batches") and "`quant` 3.9 times" in message
    set_state(model, "CALIBRATION")
    for _ in range(3):
        model(X)
    set_state(model, "CALIBRATION")
    assert not said(lambda: set_state(model, "VALIDATION"))


def looped(model: nn.Module, data: list[torch.Tensor]) -> list[str]:
    """What is said of a calibration by hand."""
    model.eval()
    set_state(model, "CALIBRATION")
    with torch.no_grad():
        for x in data:
            model(x)
    return said(lambda: set_state(model, "VALIDATION"))


@pytest.mark.parametrize("scales", [(1, 1, 1, 4), (1, 255, 1)])
@pytest.mark.parametrize("observer", ["min_max", "mse", "percentile", "kl", "mix"])
def test_so_they_are_by_each_observer_that_averages(observer, scales) -> None:
    (message,) = looped(prepared(net(), activation_observer=observer), [X * s for s in scales])
    assert "ranges differ between batches" in message and "`quant` " in message


@pytest.mark.parametrize(
    "setter", [default_calibration_qconfig_setter, calibration_8bit_weight_16bit_act_qconfig_setter]
)
@pytest.mark.parametrize("method", ["jit-strip", "jit", "symbolic", "eager"])
def test_so_they_are_by_the_setters(method, setter) -> None:
    model = prepare(net(), (X,), setter, method=method, out_dir=None)
    (message,) = looped(model, [X, X, X * 100])
    assert "ranges differ between batches" in message and "`quant` " in message


def test_an_observer_of_all_data_clips_by_its_own_choice_only() -> None:
    model = prepared(net(), activation_observer="histogram")
    assert not looped(model, [X, X, X * 4]) and not looped(model, [X * 4, X, X, X])


@pytest.mark.parametrize("observer", ["min_max", "mse", "percentile", "kl", "mix", "histogram"])
def test_ordinary_batches_in_a_loop_by_hand_are_left_alone(observer) -> None:
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(16, 3, 8, 8, generator=generator) * (1 + (i % 3 - 1) / 20) for i in range(12)]
    assert not looped(prepared(net(), activation_observer=observer), data)


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.1])
def test_batches_of_ordinary_spread_are_left_alone(spread) -> None:
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(2, 3, 8, 8, generator=generator) * (1 + spread * (i % 3 - 1)) for i in range(12)]
    assert not said(lambda: calibrate(prepared(net()), data, progress=False, patience=0))
    model = prepared(net(), activation_observer="percentile")
    assert not said(lambda: calibrate(model, data, progress=False, patience=0))


# -- operands


class Pair(nn.Module):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.a, self.b, self.d, self.f, self.method = QuantStub(), QuantStub(), DeQuantStub(), FloatFunctional(), method

    def forward(self, x, y):
        x, y = self.a(x), self.b(y)
        out = getattr(self.f, self.method)([x, y], 1) if self.method in ("cat", "stack") else self.f.add(x, y)
        return self.d(out)


@pytest.mark.parametrize(
    ("method", "ratio", "dtype", "is_told"),
    [
        ("cat", 100, "qint8", True), ("cat", 1e4, "qint8", True), ("cat", 20, "qint8", False),
        ("cat", 100, "qint16", False), ("cat", 1e5, "qint16", True), ("stack", 100, "qint8", True),
        ("cat", 1 / 100, "qint8", True), ("cat", 1, "qint8", False), ("add", 100, "qint8", False),
        ("add", 1e4, "qint8", True), ("add", 1e4, "qint16", False), ("add", 1e-4, "qint8", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("route", METHODS)
def test_an_operand_that_a_common_scale_erases_is_told(route, method, ratio, dtype, is_told) -> None:
    pair = (X * ratio, X)
    model = prepared(Pair(method).eval(), route, pair, activation_qkwargs={"dtype": dtype})
    calibrate(model, [pair], progress=False)
    messages = said(lambda: model(*pair))
    assert len(messages) == is_told
    if is_told:
        which = ("1" if ratio > 1 else "0") if method != "add" else ("second" if ratio > 1 else "first")
        assert which in messages[0] and f"`{method}` at `f`" in messages[0] and "qint16" in messages[0]
        assert not said(lambda: model(*pair))
        assert len(said(lambda: convert(model)(*pair))) == 1


def test_an_operand_of_zeros_is_left_alone() -> None:
    pair, models = (X, X * 0), [prepared(Pair(method).eval()) for method in ("cat", "add")]
    for model in models:
        calibrate(model, [pair], progress=False)
    assert not said(lambda: [model(*pair) for model in models])


# -- ordinary models


@pytest.mark.in_turns("dtype", "name")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("name", ZOO)
def test_ordinary_networks_are_left_alone(name, dtype) -> None:
    model, inputs = make(name)
    qat = prepare_qat_fx(model, {"": get_default_qconfig(activation_qkwargs={"dtype": dtype})})
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(x.shape, generator=generator) for x in inputs) for _ in range(16)]

    def way() -> None:
        calibrate(qat, batches, forward=lambda m, batch: m(*batch), progress=False)
        qat(*inputs)
        convert(qat)(*inputs)

    assert not [m for m in said(way) if any(w in m for w in ("ranges differ", "never seen", "no effect", "steps of"))]
