"""Parts of a model in float, frozen, or with fixed scales; finding NaN; training that does not wait for a device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from horizon_plugin_pytorch.errors import CalibrationError, QuantizationConfigError
from horizon_plugin_pytorch.fake_quant import base as fake_quantize_base
from horizon_plugin_pytorch.fake_quant import fake_quantize, rounding
from horizon_plugin_pytorch.fake_quant import learnable as learnable_fake_quantize
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QConfig,
    QuantStub,
    calibrate,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_fixed_act_fake_quant_qconfig,
    default_qat_8bit_lsq_quant_qconfig,
    freeze_qat_module,
    get_default_qconfig,
    prepare,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_cast import FakeCast, default_fp16_fake_cast
from horizon_plugin_pytorch.quantization.fake_quantize import DynamicFakeQuantize, FakeQuantize
from horizon_plugin_pytorch.statistics import observer_base
from horizon_plugin_pytorch.utils.quant_switch import GlobalFakeQuantSwitch

STE, LSQ = default_qat_8bit_fake_quant_qconfig, default_qat_8bit_lsq_quant_qconfig
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A backbone and a head; the backbone can be asked to compute in float."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Conv2d(8, 4, 1)
        self.in_float = False

    def forward(self, x: Tensor) -> Tensor:
        if self.in_float:
            GlobalFakeQuantSwitch.disable()
        y = self.backbone(self.quant(x))
        if self.in_float:
            GlobalFakeQuantSwitch.enable()
        return self.dequant(self.head(y).tanh())


def net(qconfig=STE) -> nn.Module:
    torch.manual_seed(0)
    model = prepare(Net().eval(), (X,), qconfig_dict={"": qconfig}, out_dir=None)
    calibrate(model, [X], progress=False)
    return model


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(X * (1 + step)).square().sum().backward()
        optimizer.step()


@pytest.fixture(autouse=True)
def _switched_on() -> Iterator[None]:
    yield
    GlobalFakeQuantSwitch.enable()
    fake_quantize_base.check_nan_scale = None


@pytest.mark.parametrize("state", list(FakeQuantState))
@pytest.mark.parametrize("qconfig", [STE, LSQ], ids=["ste", "lsq"])
def test_switched_off_everything_is_float_and_nothing_is_learned(state, qconfig) -> None:
    model = net(qconfig)
    torch.manual_seed(0)
    wanted = Net().eval()(X)
    set_fake_quantize(model, state)
    before = copy.deepcopy(model.state_dict())
    GlobalFakeQuantSwitch.disable()
    torch.testing.assert_close(model(X * 1.0), wanted, rtol=1e-4, atol=1e-5)
    model(X * 9)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    GlobalFakeQuantSwitch.enable()
    if state in (FakeQuantState.QAT, FakeQuantState.VALIDATION):
        assert float((model(X) - wanted).detach().abs().max()) > 1e-3


def test_float_state_is_the_float_model() -> None:
    model = net()
    torch.manual_seed(0)
    wanted = Net().eval()(X)
    set_fake_quantize(model, FakeQuantState._FLOAT)
    torch.testing.assert_close(model(X), wanted, rtol=1e-4, atol=1e-5)


def test_a_part_of_a_forward_runs_in_float() -> None:
    model = net()
    whole = model(X)
    seen = []
    model.backbone[0].register_forward_hook(lambda *args: seen.append(args[-1]))
    model(X)
    model.in_float = True
    part = model(X)
    assert FakeQuantize.enabled and not torch.equal(whole, part)
    on_grid, in_float = ((y.as_subclass(Tensor) / y.scale).frac().abs() for y in seen)
    assert float(in_float.max()) > 0.1 and float(torch.minimum(on_grid, 1 - on_grid).max()) < 1e-3
    part.sum().backward()


@pytest.mark.parametrize("qconfig", [STE, LSQ], ids=["ste", "lsq"])
def test_a_backbone_in_the_validation_state_keeps_its_scales_while_all_weights_train(qconfig) -> None:
    model = net(qconfig).train()
    set_fake_quantize(model, FakeQuantState.QAT)
    set_fake_quantize(model.backbone, FakeQuantState.VALIDATION)
    before = copy.deepcopy(model.state_dict())
    train(model)
    after = model.state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert not {n for n in moved if n.startswith("backbone.") and n.endswith("scale")}
    assert "backbone.0.weight" in moved and "head.weight" in moved
    assert {n for n in moved if n.startswith("head.") and n.endswith("scale")}


@pytest.mark.parametrize("qconfig", [STE, LSQ], ids=["ste", "lsq"])
def test_a_frozen_backbone_stays_bit_for_bit_while_the_head_trains(qconfig) -> None:
    model = net(qconfig).train()
    set_fake_quantize(model, FakeQuantState.QAT)
    freeze_qat_module(model.backbone)
    before = copy.deepcopy(model.state_dict())
    train(model)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert not {name for name in moved if name.startswith("backbone.")}
    assert "head.weight" in moved


def test_fixed_activation_scales_stay_while_weight_scales_follow() -> None:
    model = net(default_qat_8bit_fixed_act_fake_quant_qconfig).train()
    set_fake_quantize(model, FakeQuantState.QAT)
    before = copy.deepcopy(model.state_dict())
    train(model)
    moved = {n for n, v in model.state_dict().items() if n.endswith("scale") and not torch.equal(v, before[n])}
    assert moved and all("weight_fake_quant" in name for name in moved)


@pytest.mark.parametrize(("saturate", "outside"), [(True, 0.0), (None, 0.0), (False, 1.0)])
def test_saturate_says_whether_clipped_values_have_a_gradient(saturate, outside) -> None:
    for qconfig in (get_default_qconfig(), LSQ):
        quantizer = qconfig.activation.with_args(saturate=saturate)()
        quantizer.set_qparams(0.1)
        quantizer.disable_observer()
        quantizer.enable_observer(isinstance(quantizer, learnable_fake_quantize.LearnableFakeQuantize))
        x = torch.tensor([-20.0, 0.5, 20.0], requires_grad=True)
        quantizer(x).dequantize().sum().backward()
        assert x.grad.tolist() == [outside, 1.0, outside]


def test_nan_is_found_where_it_begins() -> None:
    model = net().train()
    set_fake_quantize(model, FakeQuantState.QAT)
    fake_quantize_base.check_nan_scale = "forward"
    model(X)
    model.backbone[0].bias.data[1] = float("nan")
    with pytest.raises(CalibrationError, match=r"`backbone.0`: 144 of the 1152 values that reach it are NaN"):
        model(X)


@pytest.fixture
def nash() -> Iterator[None]:
    set_march(March.NASH_P)
    yield
    set_march(March.BAYES)


@pytest.mark.usefixtures("nash")
def test_float_state_without_casts_is_the_float_model() -> None:
    half = QConfig(activation=default_fp16_fake_cast, weight=default_fp16_fake_cast)
    torch.manual_seed(0)
    float_model = Net().eval()
    wanted = float_model(X)
    model = prepare(float_model, (X,), qconfig_dict={"": STE, "module_name": [("backbone", half)]}, out_dir=None)
    calibrate(model, [X], progress=False)
    set_fake_quantize(model, FakeQuantState._FLOAT)
    assert 1e-6 < float((model(X) - wanted).detach().abs().max()) < 1e-2
    FakeCast.disable()
    try:
        torch.testing.assert_close(model(X), wanted, rtol=1e-4, atol=1e-5)
    finally:
        FakeCast.enable()


NAN = float("nan")


def spoil_bias(model: nn.Module) -> Tensor:
    model.get_submodule("head").bias.data[2] = NAN
    return X


def spoil_weight(model: nn.Module) -> Tensor:
    model.get_submodule("head").weight.data[2] = NAN
    return X


def spoil_input(model: nn.Module) -> Tensor:
    return torch.where(X > 2, NAN, X)


@pytest.mark.usefixtures("nash")
@pytest.mark.parametrize("state", list(FakeQuantState))
@pytest.mark.parametrize("head", ["integers", "high precision", "float16"])
@pytest.mark.parametrize(("spoil", "place"), [(spoil_bias, "head"), (spoil_weight, "head"), (spoil_input, "quant")])
def test_nan_is_found_in_every_state_and_format(state, head, spoil, place) -> None:
    """Before the first module that has it, none is blamed."""

    class Plain(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.head(self.backbone(self.quant(x))))

    qconfigs = {
        "integers": STE,
        "high precision": get_default_qconfig(activation_fake_quant=None),
        "float16": QConfig(activation=default_fp16_fake_cast, weight=default_fp16_fake_cast),
    }
    rules = {"": STE, "module_name": [("head", qconfigs[head])]}
    model = prepare(Plain().eval(), (X,), qconfig_dict=rules, out_dir=None)
    calibrate(model, [X], progress=False)
    set_fake_quantize(model, state)
    fake_quantize_base.check_nan_scale = "forward"
    model(X)
    x = spoil(model)
    with pytest.raises(CalibrationError, match=rf"^`{place}( \((weight|bias)\))?`: \d+ of the \d+ values"):
        model(x)


@pytest.mark.parametrize("state", [FakeQuantState.QAT, FakeQuantState.VALIDATION])
def test_a_scale_that_is_nan_is_found_in_training_and_validation(state) -> None:
    for qconfig in (STE, LSQ):
        model = net(qconfig)
        set_fake_quantize(model, FakeQuantState.VALIDATION)  # an observer would heal it
        set_fake_quantize(model.backbone, state if qconfig is LSQ else FakeQuantState.VALIDATION)
        with torch.no_grad():
            model.backbone[0].weight_fake_quant.scale[2] = float("nan")
        fake_quantize_base.check_nan_scale = "forward"
        with pytest.raises(CalibrationError, match=r"`backbone.0 \(weight\)`: its scale is nan.*optimizer"):
            model(X)
        fake_quantize_base.check_nan_scale = None


def test_only_documented_values_switch_the_search_for_nan_on() -> None:
    fake_quantize_base.check_nan_scale = "sometimes"
    with pytest.raises(QuantizationConfigError, match='None or "forward"'):
        FakeQuantize()(torch.ones(3))


class Reads(TorchDispatchMode):
    """Counts the values that Python reads from tensors: on a GPU, each of them waits for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("qconfig", [STE, LSQ], ids=["ste", "lsq"])
def test_training_reads_no_values_from_a_device_and_computes_the_same(qconfig, monkeypatch) -> None:
    """By construction: the routes of an accelerator, taken on the CPU."""
    wanted, model = (net(qconfig).train() for _ in range(2))
    for each in (wanted, model):
        set_fake_quantize(each, FakeQuantState.QAT)
    with Reads() as reads:
        train(wanted)
    assert reads.count > 0  # on a CPU that is cheap
    for module in (observer_base, rounding, fake_quantize, learnable_fake_quantize):
        monkeypatch.setattr(module, "is_asynchronous", lambda x: True)
    for quantizer in (m for m in model.modules() if isinstance(m, FakeQuantize)):
        assert quantizer.is_observing and quantizer.is_quantizing and quantizer.has_statistics
        assert quantizer.activation_post_process.has_statistics
    with Reads() as reads:
        train(model)
    assert reads.count == 0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_batches_with_nan_are_left_out_on_a_device_and_reported_at_the_end(monkeypatch) -> None:
    monkeypatch.setattr(observer_base, "is_asynchronous", lambda x: True)
    quantizer = FakeQuantize(averaging_constant=0.5)
    quantizer(torch.tensor([-1.0, 1.0]))
    for bad in (float("nan"), float("inf")):
        quantizer(torch.tensor([0.0, bad]))
    quantizer(torch.tensor([-3.0, 3.0]), (0.0, 2.0))
    ranged = quantizer.activation_post_process
    assert (float(ranged.min_val), float(ranged.max_val)) == (-0.5, 1.5)
    with pytest.warns(UserWarning, match="left out 2 batches.*NaN or infinite"):
        quantizer.set_state(FakeQuantState.VALIDATION)


@pytest.mark.parametrize("qconfig", [STE, LSQ], ids=["ste", "lsq"])
@pytest.mark.parametrize(
    ("switch", "off", "name"),
    [
        (torch.quantization.disable_observer, torch.quantization.enable_observer, "observer_enabled"),
        (torch.quantization.disable_fake_quant, torch.quantization.enable_fake_quant, "fake_quant_enabled"),
    ],
    ids=["observer", "rounding"],
)
def test_the_switches_of_torch_reach_every_fake_quantizer(qconfig: QConfig, switch: Any, off: Any, name: str) -> None:
    """``model.apply(torch.quantization.disable_observer)``, as loops written for torch's own quantization have it."""
    set_march(March.NASH_E)
    model = prepare(Net().eval(), (X,), qconfig_dict={"": qconfig}, out_dir=None)
    calibrate(model, [X], progress=False)
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    quantizers = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    model.apply(off)
    before = [bool(getattr(q, name)) for q in quantizers]
    model.apply(switch)
    assert any(before)
    assert not any(bool(getattr(q, name)) for q in quantizers)


def test_scales_stay_when_torch_switches_observers_off() -> None:
    set_march(March.NASH_E)
    model = prepare(Net().eval(), (X,), qconfig_dict={"": STE}, out_dir=None)
    calibrate(model, [X], progress=False)
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    model.apply(torch.quantization.disable_observer)
    scales = {key: value.clone() for key, value in model.state_dict().items() if key.endswith(".scale")}
    model(X * 9)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in scales.items())
    model.apply(torch.quantization.enable_observer)
    model(X * 9)
    assert not torch.equal(
        model.state_dict()["quant.activation_post_process.scale"], scales["quant.activation_post_process.scale"]
    )


def test_the_switches_of_torch_reach_scales_of_single_tensors() -> None:
    quantizer = DynamicFakeQuantize()
    quantizer.apply(torch.quantization.disable_fake_quant).apply(torch.quantization.disable_observer)
    assert torch.equal(quantizer(X), X)
    quantizer.apply(torch.quantization.enable_fake_quant).apply(torch.quantization.enable_observer)
    assert not torch.equal(quantizer(X), X)


@pytest.mark.parametrize("bad", [[torch.inf, -torch.inf], [torch.nan, 1.0], [-torch.inf, 0.0]])
def test_parameters_that_are_no_numbers_are_counted(bad: list[float]) -> None:
    fake_quantize_base.require_finite("head", torch.full((4,), 3e38))  # their sum is infinite, and they are not
    values = torch.tensor([*bad, 2.0])
    count = 2 - sum(v in (0.0, 1.0) for v in bad)
    with pytest.raises(CalibrationError, match=f"`head`: {count} of its 3 values are NaN or infinite"):
        fake_quantize_base.require_finite("head", values)
