"""What a process may have set around a model: default types and devices, tracers, transforms, tools that time calls."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch import running
from horizon_plugin_pytorch.errors import OperatorInputError, TraceError
from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.fixed_point.kernels import Kernels, disproof
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    prepare,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.runtime.located import QUICK, is_undisturbed
from horizon_plugin_pytorch.writing import module_writes
from tests.defaults import default
from tests.routes import calibrate, prepared, prepared_on


class Net(nn.Module):
    """Layers, functions by table, views, attention and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.silu, self.pool, self.up = nn.SiLU(), nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm, self.last = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.silu(self.first(self.quant(x)))
        y = torch.cat([y + self.second(y), y * 2.0], 1)[:, :8]
        z = self.norm(self.pool(self.up(y)).flatten(2).transpose(1, 2))
        z = torch.softmax(z @ z.transpose(1, 2), -1) @ z + self.attention(z, z, z)[0]
        return self.dequant(self.last(self.lstm(z)[0].mean(1)))


def _images() -> Tensor:
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5))


def _model(form: str) -> nn.Module:
    torch.manual_seed(0)
    model = prepared(Net().eval(), [_images()])
    return convert_fx(model) if form == "converted" else model


@torch.no_grad()
@pytest.mark.parametrize("form", ["CALIBRATION", "VALIDATION", "converted"])
@pytest.mark.parametrize("what", [torch.bfloat16, torch.float16, torch.float64, "meta"], ids=str)
def test_default_types_and_devices_change_nothing(what: torch.dtype | str, form: str) -> None:
    model, images = _model(form), _images()
    if form == "CALIBRATION":
        set_fake_quantize(model, FakeQuantState.CALIBRATION)
    wanted = copy.deepcopy(model)(images)
    with default(what):
        for _ in range(3):
            out = model(images)
            assert out.dtype is torch.float32 and torch.equal(out, wanted)


@pytest.mark.parametrize("what", [torch.bfloat16, torch.float16, "meta"], ids=str)
def test_kernels_are_proved_the_same_under_other_defaults(
    what: torch.dtype | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def proofs() -> tuple[str, str]:
        monkeypatch.setattr(kernels, "_choice", kernels._Choice())
        fp.use_integer_kernels(True)
        return fp.integer_kernels(), str(kernels.has_linear())

    wanted = proofs()
    with default(what):
        assert proofs() == wanted


@torch.no_grad()
@pytest.mark.parametrize("form", ["VALIDATION", "converted"])
def test_a_tracer_that_would_keep_the_numbers_is_refused(form: str) -> None:
    model = _model(form)
    with pytest.raises(
        TraceError, match=r"`\w+` at `quant` \(test_surroundings.py:\d+\) cannot be traced by `make_fx`"
    ):
        make_fx(model)(_images())
    model(_images())


@pytest.mark.parametrize("form", ["VALIDATION", "converted"])
def test_a_layer_that_shall_be_compiled_says_why_not(form: str) -> None:
    with pytest.raises(TraceError, match=r"at `first` \(test_surroundings.py:\d+\) cannot be compiled"):
        _model(form).first.compile()


@torch.no_grad()
def test_functionalizing_is_an_error_with_a_place_and_not_the_end_of_the_process() -> None:
    with pytest.raises(OperatorInputError, match="at `first`"):
        torch.func.functionalize(_model("VALIDATION"))(_images())


@torch.no_grad()
@pytest.mark.parametrize("form", ["VALIDATION", "converted"])
def test_tools_that_patch_calls_see_layers(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = _model(form), []
    for _ in range(3):
        model(_images())
    call = nn.Module._call_impl

    def counted(self: nn.Module, *args: object, **kwargs: object) -> object:
        seen.append(type(self).__name__)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "_call_impl", counted)
    model(_images())
    assert sum("Conv2d" in name or "ConvAdd2d" in name for name in seen) == 2


def test_an_environment_that_is_replaced_is_read() -> None:
    with mock.patch.object(os, "environ", {**os.environ, kernels.VARIABLE: "0"}):
        assert not fp.are_kernels_used()
    with mock.patch.dict(os.environ, {kernels.VARIABLE: "0"}):
        assert not fp.are_kernels_used()


class Scaled(nn.Module):
    """A weight times a number that is trained, and one that is a setting."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.by, self.sign = nn.Parameter(torch.ones(1)), sign

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.by * (self.sign if self.training else 2 * self.sign)


class Chain(nn.Module):
    """Two layers, the second of which gets bytes, so that its calls are quick where kernels are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.second(self.first(self.quant(x))))


def _warm(form: str, images: Tensor) -> nn.Module:
    """A model that was called several times, whose second layer has a quick call."""
    torch.manual_seed(0)
    model = prepared(Chain().eval(), [images])
    model = convert_fx(model) if form == "converted" else model
    for _ in range(3):
        model(images)
    assert (model.second.__dict__.get(QUICK) is not None) == (not disproof(Kernels()) and fp.are_kernels_used())
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", ["first", "second"])
def test_integers_follow_a_weight_that_is_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = _images()
    model = _warm("VALIDATION", images)
    layer: Any = getattr(model, name)

    def change_nothing() -> None:
        pass

    def add_another() -> None:
        parametrize.register_parametrization(layer, "weight", Scaled(-1.0))

    def put_in_another() -> None:
        layer.parametrizations.weight[0] = Scaled(0.3)

    def set_sign() -> None:
        layer.parametrizations.weight[0].sign = -0.5

    changes: list[Callable[[], Any]] = [
        change_nothing,
        lambda: parametrize.register_parametrization(layer, "weight", Scaled(0.8)),
        lambda: layer.parametrizations.weight[0].by.fill_(-0.7),
        lambda: layer.parametrizations.weight.original.data.mul_(0.5),
        add_another,
        put_in_another,
        set_sign,
        lambda: layer.parametrizations.weight[0].eval(),
        lambda: layer.parametrizations.weight[0].register_forward_hook(lambda m, args, out: out * 0.5),
        lambda: monkeypatch.setattr(Scaled, "forward", lambda self, weight: weight * 0.9),
    ]
    before = None
    for change in changes:
        change()
        after = model(images)
        assert before is None or not torch.equal(after, before)
        assert torch.equal(after, convert_fx(copy.deepcopy(model))(images))
        before = [model(images) for _ in range(3)][-1]
        assert torch.equal(before, after)


@torch.no_grad()
def test_an_attribute_of_the_user_is_no_setting_of_a_layer() -> None:
    """Only modules that take `inplace` write to their input."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.second.inplace = True

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(self.quant(x))
            return self.dequant(torch.cat([y, self.second(y)], 1))

    torch.manual_seed(0)
    net, images = Both().eval(), _images()
    model = prepared(net, [images])
    for form in (model, convert_fx(model)):
        for _ in range(3):
            assert torch.allclose(form(images), net(images), atol=0.05)


@torch.no_grad()
def test_a_layer_that_has_folded_a_batch_norm_is_as_quick_as_others() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.norm(self.linear(self.quant(x))))

    rows = torch.randn(6, 4)
    model = prepared(Normed().eval(), [rows])
    for form in (model, convert_fx(model)):
        assert is_undisturbed(form.linear)
        with pytest.raises(OperatorInputError, match="2-d inputs only"):
            form(torch.randn(2, 6, 4))


@torch.no_grad()
def test_a_forward_that_is_interrupted_is_not_held_to_go_on() -> None:
    """Torch calls no hooks after a KeyboardInterrupt."""

    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.layer = QuantStub(), DeQuantStub(), nn.Linear(4, 4)
            self.is_interrupted = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(self.quant(x))
            if self.is_interrupted:
                raise KeyboardInterrupt
            return self.dequant(y)

    other = prepare(Interrupted().eval(), torch.randn(2, 4), default_calibration_qconfig_setter)
    other.is_interrupted = True
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            other(torch.randn(2, 4))
    assert running.current_forward() == 0 and not running.is_in_forward() and not running.is_any_running()
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert is_undisturbed(_warm("converted", _images()).second)


@torch.no_grad()
def test_a_hook_that_is_called_where_another_model_failed_may_call_a_third() -> None:
    """Torch calls hooks with `always_call` when the call they are of is over already."""

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.layer = QuantStub(), DeQuantStub(), nn.Linear(4, 4)
            self.fails, self.others = False, []

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(self.quant(x))
            if self.fails:
                raise ValueError("mine")
            for other in self.others:
                with contextlib.suppress(ValueError):
                    other(x)
            return self.dequant(self.layer(y))

    def make() -> Any:
        model = prepare(Failing().eval(), rows, default_calibration_qconfig_setter, "eager", out_dir=None)
        return calibrate(model, [rows])

    rows = torch.randn(2, 4)
    outer, inner, third = make(), make(), make()
    wanted = outer(rows)
    outer.others = [inner]

    def call_third(module: nn.Module, args: tuple, out: Any) -> None:
        third(rows)

    inner.register_forward_hook(call_third, always_call=True, prepend=True)
    inner.fails = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(outer(rows), wanted)
    assert running.current_forward() == 0


@torch.no_grad()
@pytest.mark.parametrize("form", ["VALIDATION", "converted"])
@pytest.mark.parametrize("is_warm", [True, False], ids=["later", "before the first call"])
def test_a_forward_in_the_place_of_that_of_a_class_is_called(
    form: str, is_warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, calls = _images(), []
    warm = _warm(form, images)
    model = warm if is_warm else copy.deepcopy(warm)  # which has no quick calls yet
    cls = type(model.second)
    forward = cls.forward

    @functools.wraps(forward)
    def counted(self: nn.Module, *args: object, **kwargs: object) -> object:
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", counted)
    later = type("Later", (cls,), {})
    for _ in range(4):
        model(images)
    assert calls.count(model.second) == 4
    model.second.__class__ = later
    model(images)
    assert calls.count(model.second) == 5
    monkeypatch.undo()
    assert is_undisturbed(model.second)
    model.second.__class__ = type("Named", (cls,), {"forward": counted})
    model(images)
    assert calls.count(model.second) == 6


@torch.no_grad()
@pytest.mark.parametrize("true", [True, 1, np.bool_(True)], ids=repr)
@pytest.mark.parametrize("route", ["SYMBOLIC", "JIT"])
def test_whatever_is_true_is_in_place(true: Any, route: str) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.layer, self.act = nn.Conv2d(4, 4, 1), nn.LeakyReLU(0.1, inplace=true)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(self.quant(x))
            return self.dequant(torch.cat([y, self.act(y)], 1))

    net, images = Both().eval(), _images()
    model = calibrate(prepared_on(route, net, [images]), [images])
    for form in (model, convert_fx(copy.deepcopy(model))):
        assert torch.allclose(form(images), net(images), atol=0.05)


@torch.no_grad()
def test_a_layer_that_takes_inplace_and_has_a_forward_of_torchs_writes_to_nothing() -> None:
    class Own(nn.Conv2d):
        def __init__(self, *args: Any, inplace: bool = True) -> None:
            super().__init__(*args)
            self.inplace = inplace

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.first, self.second = nn.Conv2d(4, 4, 1), Own(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(self.quant(x))
            return self.dequant(torch.cat([y, self.second(y)], 1))

    assert not module_writes(Own(4, 4, 1)) and module_writes(nn.ReLU6(inplace=True))
    net, images = Both().eval(), _images()
    model = prepared(net, [images])
    for form in (model, convert_fx(model)):
        assert torch.allclose(form(images), net(images), atol=0.05)


@torch.no_grad()
@pytest.mark.parametrize("what", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_models_that_are_prepared_under_another_default_type_are_the_same(what: torch.dtype) -> None:
    net, images = Chain().eval(), _images()
    wanted = calibrate(prepared_on("SYMBOLIC", net, [images]), [images])
    with default(what):
        model = prepared_on("SYMBOLIC", net, [images])
    for (name, x), y in zip(calibrate(model, [images]).state_dict().items(), wanted.state_dict().values(), strict=True):
        assert x.dtype is y.dtype and torch.equal(x, y), name


@torch.no_grad()
@pytest.mark.parametrize("route", ["eager", "SYMBOLIC", "JIT"])
def test_models_are_prepared_and_converted_where_they_are(route: str) -> None:
    """And not on the device on which new tensors would be."""
    net, images = Chain().eval(), _images()
    wanted = calibrate(prepared_on(route, net, [images]), [images])(images)
    with torch.device("meta"):
        model = prepared_on(route, net, [images])
        assert {x.device.type for x in (*model.parameters(), *model.buffers())} == {"cpu"}
        calibrate(model, [images])
        assert torch.equal(model.to("cpu")(images), wanted)
        converted = (convert if route == "eager" else convert_fx)(model)
        assert torch.equal(converted.to("cpu")(images), wanted)
