"""What a process may have set around a model: default types and devices, tracers, transforms, tools that time calls."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch import running
from horizon_plugin_pytorch.errors import OperatorInputError, TraceError
from horizon_plugin_pytorch.fixed_point import kernels
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
    prepare,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from horizon_plugin_pytorch.running import is_any_running
from horizon_plugin_pytorch.runtime.located import is_undisturbed
from tests.routes import prepared


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


@contextmanager
def _default(what: torch.dtype | str) -> Iterator[None]:
    if isinstance(what, str):
        with torch.device(what):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(what)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
@pytest.mark.parametrize("form", ["CALIBRATION", "VALIDATION", "converted"])
@pytest.mark.parametrize("what", [torch.bfloat16, torch.float16, torch.float64, "meta"], ids=str)
def test_default_types_and_devices_change_nothing(what: torch.dtype | str, form: str) -> None:
    model, images = _model(form), _images()
    if form == "CALIBRATION":
        set_fake_quantize(model, FakeQuantState.CALIBRATION)
    wanted = copy.deepcopy(model)(images)
    with _default(what):
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
    with _default(what):
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
    """A weight times a number that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.by


@torch.no_grad()
def test_integers_follow_a_weight_that_is_computed() -> None:
    model, images = _model("VALIDATION"), _images()
    parametrize.register_parametrization(model.first, "weight", Scaled())
    before = [model(images) for _ in range(3)][-1]
    model.first.parametrizations.weight[0].by.fill_(-0.7)
    after = [model(images) for _ in range(3)][-1]
    assert not torch.equal(after, before) and torch.equal(after, convert_fx(copy.deepcopy(model))(images))
    model.first.parametrizations.weight.original.data.mul_(0.5)
    assert torch.equal(model(images), convert_fx(copy.deepcopy(model))(images))


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
    assert not is_any_running() and not running._THREAD.forwards
    model = _model("converted")
    for _ in range(3):
        model(_images())
    assert is_undisturbed(model.first)


@torch.no_grad()
@pytest.mark.parametrize("form", ["VALIDATION", "converted"])
@pytest.mark.parametrize("is_warm", [True, False], ids=["later", "before the first call"])
def test_a_forward_in_the_place_of_that_of_a_class_is_called(
    form: str, is_warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = _model(form), []
    for _ in range(3 * is_warm):
        model(_images())
    cls = type(model.first)
    forward = cls.forward

    def counted(self: nn.Module, *args: object, **kwargs: object) -> object:
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", counted)
    for _ in range(4):
        model(_images())
    assert calls.count(model.first) == 4
    monkeypatch.undo()
    assert is_undisturbed(model.first)
