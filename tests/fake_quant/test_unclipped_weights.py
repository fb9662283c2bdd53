"""The largest weight of a channel is the last integer, where the guides print no scale; where they do, it is theirs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantize,
    FakeQuantState,
    QconfigSetter,
    QuantStub,
    QuantWrapper,
    auto_calibrate,
    calibrate,
    convert,
    get_default_qconfig,
    get_qconfig,
    load_observer_params,
    prepare,
    prepare_qat_fx,
    qconfig,
    qconfig_template,
    set_fake_quantize,
    weight_reconstruction,
)
from horizon_plugin_pytorch.quantization.learnable_fake_quantize import LearnableFakeQuantize
from horizon_plugin_pytorch.quantization.observer_v2 import HistogramObserver, MinMaxObserver, MixObserver, MSEObserver
from horizon_plugin_pytorch.quantization.qconfig_setter import (
    ConvDtypeTemplate,
    ModuleNameTemplate,
    SensitivityTemplate,
    SetDynamicQuantTemplate,
)
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase
from tests.routes import assert_one_arithmetic

TABLE = [["module", "activation", "", 1.0, ""], ["module", "weight", "", 0.5, ""]]
BY_TABLE = [name for name in qconfig_template.__all__ if name.startswith("sensitive_op_")]
READY = [
    name for name in qconfig_template.__all__ if name.endswith("_qconfig_setter") and not name.startswith("sensitive")
]
SETTERS: dict[str, Any] = {
    **{name: getattr(qconfig_template, name) for name in READY},
    **{name: (getattr(qconfig_template, name)(TABLE, topk=1), QconfigSetter(save_dir=None)) for name in BY_TABLE},
    "QconfigSetter": QconfigSetter(save_dir=None),
    "ModuleNameQconfigSetter": qconfig_template.ModuleNameQconfigSetter({"": get_qconfig()}),
    "int16 weights": QconfigSetter(get_qconfig(weight_dtype=qint16), save_dir=None),
    "int16 weights by name": QconfigSetter(None, [ModuleNameTemplate({"module": {"weight": qint16}})], save_dir=None),
    "int16 weights of all": QconfigSetter(None, [ConvDtypeTemplate(weight_dtype=qint16)], save_dir=None),
    "int16 weights by table": QconfigSetter(None, [SensitivityTemplate(TABLE, 1.0)], save_dir=None),
    "of float16": QconfigSetter(
        get_qconfig(weight_dtype=torch.float16, out_dtype=torch.float16),
        [ModuleNameTemplate({"": {"weight": qint8, "output": qint8}})],
        save_dir=None,
    ),
    "dynamic": QconfigSetter(None, [SetDynamicQuantTemplate({nn.Linear: {"block_size": "full"}})], save_dir=None),
}


@pytest.fixture(autouse=True)
def nash() -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)


def quantizers(model: nn.Module) -> dict[str, FakeQuantize]:
    """Those of the weights, by path of the layer."""
    return {
        path: module.weight_fake_quant
        for path, module in model.named_modules()
        if isinstance(module, QATGemm) and isinstance(module.weight_fake_quant, FakeQuantize)
    }


def steps_of(layer: Any) -> Tensor:
    """How many steps the largest weight of each channel has."""
    weight = layer.weight.detach().transpose(0, layer.weight_axis).flatten(1).abs().amax(1)
    scale = layer.weight_fake_quant.scale
    return weight / scale if scale.numel() > 1 else weight.amax() / scale


def last(layer: Any) -> float:
    return float(layer.weight_fake_quant.dtype.max)


@pytest.mark.parametrize("name", SETTERS)
@pytest.mark.filterwarnings("ignore")
def test_setters_and_templates_keep_the_largest_weight(name: str) -> None:
    set_march(March.NASH_P if name == "dynamic" else March.NASH_M)
    x = torch.randn(64, 16)
    model = prepare(QuantWrapper(nn.Linear(16, 8)).eval(), (x,), SETTERS[name], out_dir=None)
    calibrate(model, [x], progress=False)
    layer = model.module
    torch.testing.assert_close(steps_of(layer), torch.full((8,), last(layer)), rtol=1e-6, atol=0)
    assert str(layer.weight_fake_quant.dtype) == ("qint16" if name.startswith("int16") else "qint8")
    rounded = layer.weight_fake_quant.round_weight(layer.weight)
    assert bool(((rounded - layer.weight).abs() <= layer.weight_fake_quant.scale.reshape(-1, 1) * 0.5001).all())


class Layers(nn.Module):
    """Every kind of layer that has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.transposed = nn.ConvTranspose2d(8, 8, 2, 2, groups=2)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.free = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transposed(self.depthwise(torch.relu(self.bn(self.conv(self.quant(x))))))
        x = x.mean(3).transpose(1, 2)
        x = self.lstm(x)[0]
        x = self.attention(x, x, x)[0]
        x = F.linear(x, self.free)
        return self.dequant(self.head(x))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [QATMode.FuseBN, QATMode.WithBN])
@pytest.mark.parametrize("weight_dtype", [qint8, qint16])
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_layer_keeps_its_largest_weight(weight_dtype: Any, mode: QATMode, tmp_path: Path) -> None:
    x = torch.randn(2, 4, 6, 6)
    setter = QconfigSetter(get_qconfig(MinMaxObserver, weight_dtype=weight_dtype), save_dir=None)
    set_qat_mode(mode)
    try:
        model = prepare(Layers().eval(), (x,), setter, out_dir=None)
    finally:
        set_qat_mode(QATMode.FuseBN)
    calibrate(model, [x], progress=False)
    found = quantizers(model)
    assert {"conv", "depthwise", "transposed", "head"} <= set(found) and len(found) >= 9
    for path in found:
        layer: Any = model.get_submodule(path)
        torch.testing.assert_close(steps_of(layer).amax(), torch.tensor(last(layer)), rtol=1e-5, atol=0)
    assert_one_arithmetic(model, (x,), tmp_path)


@pytest.mark.parametrize("dtype", [qint8, qint16])
@pytest.mark.parametrize("scheme", [torch.per_channel_symmetric, torch.per_tensor_symmetric])
@pytest.mark.parametrize("quantizer", ["fake_quant", "lsq", "pact"])
@pytest.mark.parametrize("observer", ["min_max", "percentile"])
def test_the_first_generation_has_it_by_name(dtype: Any, scheme: Any, quantizer: str, observer: str) -> None:
    weight = torch.randn(4, 9)
    for unclipped, steps in ((False, -dtype.min - 0.5), (True, dtype.max)):
        if observer == "percentile" and not unclipped:
            continue  # takes the better of both
        settings = {"dtype": dtype, "qscheme": scheme, "unclipped": unclipped, "percentile": 100.0}
        settings = {name: value for name, value in settings.items() if observer == "percentile" or name != "percentile"}
        made = get_default_qconfig(weight_fake_quant=quantizer, weight_observer=observer, weight_qkwargs=settings)
        assert made.weight is not None
        found = made.weight(channel_len=4)
        found.weight(weight)
        largest = weight.abs().amax(1) if found.ch_axis == 0 else weight.abs().amax().reshape(1)
        torch.testing.assert_close(found.scale.detach(), largest / steps, rtol=1e-6, atol=0)


FIRST_GENERATION = [
    name
    for name in dir(qconfig)
    if isinstance(getattr(qconfig, name), qconfig.QConfig) and getattr(qconfig, name).weight is not None
]


@pytest.mark.parametrize("name", FIRST_GENERATION)
def test_the_names_of_the_first_generation_keep_the_printed_scale(name: str) -> None:
    """The development guide prints a convolution whose weights reach 0.5284 at a scale of 0.0041."""
    found = getattr(qconfig, name).weight(channel_len=1)
    found.weight(torch.tensor([[0.5284, -0.1]]))
    assert f"{found.scale.item():.4f}" == "0.0041"
    assert found.scale.item() == pytest.approx(0.5284 / 127.5)


def test_activations_keep_the_documented_scale() -> None:
    x = torch.randn(64, 16)
    model = prepare(
        QuantWrapper(nn.Linear(16, 8)).eval(), (x,), QconfigSetter(get_qconfig(MinMaxObserver)), out_dir=None
    )
    calibrate(model, [x], progress=False)
    assert float(x.abs().max() / model.quant.activation_post_process.scale) == pytest.approx(127.5)


@pytest.mark.parametrize("observer", [MSEObserver, MixObserver, HistogramObserver])
def test_observers_that_search_are_never_worse_than_the_largest_weight(observer: type) -> None:
    weight = torch.randn(32, 600) ** 3  # with tails
    errors = {}
    for cls in (observer, MinMaxObserver):
        found = get_qconfig(weight_observer=cls).weight(channel_len=32)
        found.weight(weight)
        errors[cls] = (found.round_weight(weight) - weight).square().sum(1)
    assert bool((errors[observer] <= errors[MinMaxObserver] * 1.0001).all())
    if observer is not MixObserver:  # which has few ends to choose from
        assert float(errors[observer].sum()) < float(errors[MinMaxObserver].sum())


@pytest.mark.parametrize(("quant_min", "quant_max", "steps"), [(-8, 7, 7), (-127, 127, 127), (-5, 7, 5), (0, 7, 7)])
def test_both_ends_of_any_range_of_integers_fit(quant_min: int, quant_max: int, steps: int) -> None:
    observer = MinMaxObserver(quant_min=quant_min, quant_max=quant_max, unclipped=True)
    observer(torch.tensor([-2.0, 2.0]))
    assert float(observer.calculate_qparams()[0]) == pytest.approx(2.0 / steps)


def test_an_observer_of_the_user_that_does_not_know_the_option_keeps_its_rule() -> None:
    class Own(ObserverBase):
        def __init__(self, dtype: Any, qscheme: Any, ch_axis: int, channel_len: int) -> None:
            super().__init__(dtype=dtype, qscheme=qscheme, ch_axis=ch_axis, channel_len=channel_len)

    found = get_qconfig(weight_observer=Own).weight(channel_len=1)
    found.weight(torch.tensor([[255.0]]))
    assert float(found.scale) == 2.0


# -- what comes after the scale


@pytest.mark.parametrize("method", [partial(auto_calibrate, observer_list=["min_max"]), weight_reconstruction])
def test_methods_keep_it(method: Any) -> None:
    data = [torch.randn(32, 16) for _ in range(2)]
    net = QuantWrapper(nn.Linear(16, 8)).eval()
    model = prepare(net, (data[0],), QconfigSetter(save_dir=None), out_dir=None)
    calibrate(model, data, progress=False)
    method(model, data)
    largest = net.module.weight.detach().abs().amax(1)
    torch.testing.assert_close(largest / model.module.weight_fake_quant.scale, torch.full((8,), 127.0))


def test_trained_scales_begin_there() -> None:
    made = get_qconfig()
    weight = LearnableFakeQuantize.with_args(**made.weight.kwargs)
    model = prepare_qat_fx(QuantWrapper(nn.Linear(16, 8)), {"": made._replace(weight=weight)})
    model(torch.randn(32, 16))
    torch.testing.assert_close(steps_of(model.module).detach(), torch.full((8,), 127.0))


def old_and_new() -> tuple[nn.Module, nn.Module, Tensor]:
    """A calibrated model with the documented scales, and one of `get_qconfig`."""
    x, net = torch.randn(64, 16), QuantWrapper(nn.Linear(16, 8)).eval()
    old = prepare(net, (x,), qconfig_dict={"": get_default_qconfig()}, out_dir=None)
    calibrate(old, [x], progress=False)
    return old, prepare(net, (x,), qconfig_dict={"": get_qconfig(MinMaxObserver)}, out_dir=None), x


@pytest.mark.parametrize("load", ["load_state_dict", "load_observer_params"])
def test_a_checkpoint_keeps_the_scales_and_the_integers_that_it_has(load: str) -> None:
    old, new, x = old_and_new()
    with torch.no_grad():
        old.module.weight[0, 0] = -old.module.weight[0].abs().max() * 1.003  # -128 in the documented scale
        old.module.weight_fake_quant.set_qparams(old.module.weight.abs().amax(1) / 127.5)
    if load == "load_state_dict":
        new.load_state_dict(old.state_dict())
    else:
        new.module.load_state_dict(old.module.state_dict())
        load_observer_params(old, new)
    set_fake_quantize(new.eval(), FakeQuantState.VALIDATION)
    assert torch.equal(new.module.weight_fake_quant.scale, old.module.weight_fake_quant.scale)
    assert torch.equal(convert(new).module.weight, convert(old).module.weight)
    with torch.no_grad():
        assert torch.equal(new(x), old(x))


@pytest.mark.parametrize(("source", "target"), [(qint8, qint16), (qint16, qint8)])
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_another_format_gives_weights_that_are_not_clipped(source: Any, target: Any) -> None:
    x, net = torch.randn(64, 16), QuantWrapper(nn.Linear(16, 8)).eval()
    models = [
        prepare(net, (x,), qconfig_dict={"": get_qconfig(weight_dtype=d)}, out_dir=None) for d in (source, target)
    ]
    calibrate(models[0], [x], progress=False)
    models[1].load_state_dict(models[0].state_dict())
    torch.testing.assert_close(steps_of(models[1].module), torch.full((8,), float(target.max)), rtol=1e-5, atol=0)
