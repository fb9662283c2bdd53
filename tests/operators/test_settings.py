"""Settings of modules that are set after the model was prepared and has run: they act, everywhere, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as hnn
from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn import matmul as floats
from horizon_plugin_pytorch.nn.operator_table import row_of_module
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    QuantWrapper,
    convert_fx,
    get_default_qconfig,
    get_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_setter import QconfigSetter
from tests.operators.cases import CASES, Case
from tests.routes import as_numbers, calibrate, mismatches, prepared, qconfig

_WORDS = {
    "zeros": "border", "border": "zeros", "nearest": "bilinear", "bilinear": "nearest", "none": "tanh",
}  # fmt: skip
# Torch's layers only tell these; what they compute is in the weight.
_TOLD = ("in_channels", "out_channels", "in_features", "out_features", "num_features", "num_channels", "kernel_size")


def _others(value: Any) -> list[Any]:
    """Other values that a setting might take."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, value - 1]
    if isinstance(value, float):
        return [value * 2 + 0.25, value / 2]
    if isinstance(value, str):
        return [_WORDS[value]] if value in _WORDS else []
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, int) for v in value):
        return [tuple(v + 1 for v in value), list(value), value[0] + 1, tuple(v - 1 for v in value)]
    return [1, True] if value is None else []


def _settings() -> Iterator[tuple[Case, str, Any]]:
    """Every setting of every float class with a QAT form, with one other value that the float model can have."""
    seen = set()
    for case in CASES:
        body = case.model().body
        if row_of_module(type(body)) is None:
            continue
        for name, value in vars(body).items():
            if name.startswith("_") or name in ("training", *_TOLD) or (type(body), name) in seen:
                continue
            for other in _others(value):
                if _runs(case, name, other):
                    seen.add((type(body), name))
                    yield case, name, other
                    break


def _runs(case: Case, name: str, value: Any) -> bool:
    model = case.model()
    setattr(model.body, name, value)
    try:
        with torch.no_grad():
            model(*case.inputs())
    except Exception:
        return False
    return True


SETTINGS = list(_settings())


def _outputs(model: nn.Module, inputs: tuple) -> list[Tensor]:
    with torch.no_grad():
        return as_numbers(model(*inputs))


def _built(model: nn.Module, like: nn.Module) -> nn.Module:
    """A float model prepared anew, with the scales of another one."""
    qat = prepare_qat_fx(model, {"": qconfig()}).eval()
    qat.load_state_dict(like.state_dict())
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return qat


def test_the_walk_meets_every_kind_of_module() -> None:
    classes = {type(case.model().body) for case, _, _ in SETTINGS}
    wanted = {nn.Conv2d, nn.ConvTranspose2d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Softmax, nn.LeakyReLU, nn.ELU}
    wanted |= {nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Upsample, hnn.GridSample, nn.Dropout, nn.Hardtanh}
    assert wanted <= classes and len(SETTINGS) > 150


@pytest.mark.parametrize(
    ("case", "name", "value"), SETTINGS, ids=[f"{type(c.model().body).__name__}-{n}" for c, n, _ in SETTINGS]
)
def test_a_setting_that_is_set_after_a_run_acts_as_if_the_model_had_been_built_so(
    case: Case, name: str, value: Any
) -> None:
    set_march(case.march)
    inputs, model = case.inputs(), case.model()
    qat = prepared(copy.deepcopy(model), inputs)
    _outputs(qat, inputs)
    quantized = convert_fx(qat)
    setattr(model.body, name, value)
    setattr(qat.body, name, value)
    try:
        wanted = _outputs(_built(model, qat), inputs)
    except Exception as error:
        with pytest.raises(type(error)):
            _outputs(qat, inputs)
        with pytest.raises(type(error)):
            _outputs(convert_fx(qat), inputs)
        wanted = None
    if wanted is not None:
        validation = _outputs(qat, inputs)
        assert mismatches(validation, wanted) == 0
        assert mismatches(validation, _outputs(convert_fx(qat), inputs)) == 0
    _acts_or_is_refused(quantized, inputs, name, value, wanted)


def _acts_or_is_refused(model: Any, inputs: tuple, name: str, value: Any, wanted: list[Tensor] | None) -> None:
    """Set a setting of a converted module."""
    before = _outputs(model, inputs)
    try:
        setattr(model.body, name, value)
        after = _outputs(model, inputs)
    except QuantizationConfigError:
        with pytest.raises(QuantizationConfigError, match=rf"\.{name}` at `body` .*cannot become .*prepared"):
            setattr(model.body, name, value)
        assert mismatches(before, _outputs(model, inputs)) == 0
    except NotImplementedError:  # torch's own module, which has no such form on integers
        assert wanted is None
    else:
        assert wanted is not None and mismatches(after, wanted) == 0


def test_a_setting_of_a_converted_module_may_be_set_to_what_it_is() -> None:
    set_march(March.BAYES)
    model = convert_fx(_small())
    for layer in (model.conv, model.last):
        layer.stride, layer.padding_mode, layer.extra = [1, 1], "zeros", "the user's own"
    with pytest.raises(QuantizationConfigError, match=r"`Conv2d.stride` at `conv` .*cannot become \(2, 2\): .*convert"):
        copy.deepcopy(model).conv.stride = (2, 2)


class _Structure(nn.Module):
    """Operators whose parts are made once."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.rnn, self.lstm = nn.RNN(4, 6, batch_first=True), nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True)
        self.attention, self.sum = nn.MultiheadAttention(8, 2, 0.5, batch_first=True), floats.AddMatmul(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.rnn(self.quant(x))[0])
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.dequant(self.sum(x, x @ x.transpose(1, 2), x))


@pytest.mark.in_turns("is_converted", "path")
@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("rnn", "hidden_size", 3), ("rnn", "nonlinearity", "relu"), ("lstm", "num_layers", 1),
        ("lstm", "bidirectional", False), ("lstm", "proj_size", 2), ("attention", "embed_dim", 4),
        ("attention", "add_zero_attn", True), ("sum", "beta", 0), ("sum", "alpha", -1.0),
    ],
)  # fmt: skip
def test_a_setting_that_parts_were_made_for_is_refused(path: str, name: str, value: Any, is_converted: bool) -> None:
    set_march(March.BAYES)
    data = (torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)),)
    model = prepared(_Structure().eval(), data)
    model = convert_fx(model) if is_converted else model
    part, kind = model.get_submodule(path), type(_Structure().get_submodule(path)).__name__
    setattr(part, name, getattr(part, name))
    with pytest.raises(QuantizationConfigError, match=rf"`{kind}\.{name}` at `{path}` \(.*float model, and prepare"):
        setattr(part, name, value)


@pytest.mark.slow
def test_settings_that_parts_follow_act() -> None:
    set_march(March.BAYES)
    data = (torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)),)
    torch.manual_seed(0)
    model = _Structure().eval()
    qat = prepared(copy.deepcopy(model), data)
    before = _outputs(qat, data)
    for m in (model, qat):
        m.lstm.batch_first, m.attention.num_heads, m.sum.beta = False, 4, 0.25
    after = _outputs(qat, data)
    assert mismatches(before, after) > 0
    assert mismatches(after, _outputs(_built(model, qat), data)) == 0
    assert mismatches(after, _outputs(convert_fx(qat), data)) == 0
    set_fake_quantize(qat.train(), FakeQuantState.QAT)
    qat.attention.dropout = 0.0
    assert torch.equal(qat(*data), qat(*data))
    qat.attention.dropout = 0.9
    assert not torch.equal(qat(*data), qat(*data))


class _Reader(nn.Module):
    """A forward that reads the settings of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
        self.plain = nn.Conv2d(4, 4, 3, padding=1)
        self.pool, self.up = nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        if self.conv.padding[0] > 0:
            x = self.conv(x)
        if self.plain.padding_mode == "zeros" and self.plain.stride == (1, 1):
            x = self.plain(x)
        if self.pool.kernel_size == 2:
            x = self.pool(x)
        if self.up.align_corners is None:
            x = self.up(x)
        return self.dequant(x)


def test_a_forward_reads_the_settings_of_converted_modules_as_those_of_float() -> None:
    set_march(March.BAYES)
    torch.manual_seed(0)
    setter = QconfigSetter(get_qconfig(), [])
    qat = prepare(_Reader().eval(), example_inputs=IMAGES, qconfig_setter=setter, method=PrepareMethod.JIT_STRIP)
    calibrate(qat, IMAGES)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    assert mismatches(_outputs(qat, IMAGES), _outputs(convert_fx(qat), IMAGES)) == 0


class _ReadsAll(nn.Module):
    """Reads all settings of its layers, as exporters and losses of users do."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.read = QuantStub(), DeQuantStub(), []
        self.layers = nn.ModuleList([
            nn.RMSNorm(8), nn.LayerNorm(8), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.Threshold(0.1, 0.2),
            nn.LeakyReLU(0.2), nn.ELU(0.5), nn.Hardtanh(-2, 2), nn.Softplus(), nn.Hardshrink(0.1), nn.Softmax(1),
            nn.AvgPool2d(2), nn.Upsample(scale_factor=2), nn.ConstantPad2d(1, 0.5), nn.PReLU(),
        ])  # fmt: skip
        self.names = [(i, name) for i, layer in enumerate(self.layers) for name in getattr(layer, "__constants__", ())]

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.quant(x)
        results = [self.dequant(layer(x)) for layer in self.layers]
        self.read = [(name, getattr(self.layers[i], name)) for i, name in self.names]
        return results


@pytest.mark.slow
def test_every_setting_is_read_as_in_float() -> None:
    set_march(March.NASH_M)
    net, x = _ReadsAll().eval(), torch.randn(2, 4, 8, 8)
    net(x)
    qat = prepare(net, x, QconfigSetter(get_qconfig(), []), method=PrepareMethod.JIT_STRIP, out_dir=None)
    calibrate(qat, (x,))
    assert qat.read == net.read
    assert ("value", 0.2) in net.read and ("eps", None) in net.read
    quantized = convert_fx(qat)
    quantized.read = []
    quantized(x)
    assert quantized.read == net.read
    assert [(name, getattr(quantized.layers[i], name)) for i, name in net.names] == net.read


class _Small(nn.Module):
    """A fused layer, and a layer that an add takes in."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU6()
        self.last = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        return self.dequant(self.last(x) + x)


IMAGES = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


def _small(mode: QATMode = QATMode.FuseBN) -> nn.Module:
    torch.manual_seed(0)
    set_qat_mode(mode)
    model = _Small().eval()
    model.bn.running_var.uniform_(0.5, 2)
    return prepared(model, IMAGES)


def _layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "weight_fake_quant")]


def _wide_output(model: nn.Module) -> None:
    observer = _layers(model)[0].activation_post_process.activation_post_process
    observer.dtype, observer.quant_min, observer.quant_max = qint16, qint16.min, qint16.max


def _narrow_output(model: nn.Module) -> None:
    _layers(model)[0].activation_post_process.activation_post_process.quant_max = 15


def _new_quantizer(model: nn.Module) -> None:
    layer = _layers(model)[0]
    layer.weight_fake_quant = layer.qconfig.weight(channel_len=4)
    layer.weight_fake_quant.set_qparams(torch.full((4,), 0.05))
    set_fake_quantize(layer.weight_fake_quant, FakeQuantState.VALIDATION)


def _new_scales(model: nn.Module) -> None:
    for layer in _layers(model):
        layer.weight_fake_quant.set_qparams(layer.weight_fake_quant.scale * 2)


def _new_layer(model: nn.Module) -> None:
    other = copy.deepcopy(_layers(model)[0])
    with torch.no_grad():
        other.weight.mul_(0.5)
    model.conv = other


def _dilate(model: nn.Module) -> None:
    model.last.dilation, model.last.padding = [2, 2], 2


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "settings of a layer that an add took in": _dilate,
    "a member of a fused layer": lambda model: setattr(model.last, "padding_mode", "circular"),
    "the format": _wide_output,
    "the range": _narrow_output,
    "a fake quantizer": _new_quantizer,
    "scales": _new_scales,
    "a layer": _new_layer,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_replaced_after_a_run_reaches_the_integers(change: Callable[[nn.Module], None]) -> None:
    set_march(March.BAYES)
    model = _small()
    before = _outputs(model, IMAGES)
    change(model)
    after = _outputs(model, IMAGES)
    assert mismatches(before, after) > 0
    assert mismatches(after, _outputs(convert_fx(model), IMAGES)) == 0


@pytest.mark.parametrize("mode", [QATMode.WithBN, QATMode.WithBNReverseFold])
def test_settings_of_a_batch_norm_that_goes_on_training_reach_the_integers(mode: QATMode) -> None:
    set_march(March.BAYES)
    model = _small(mode)
    before = _outputs(model, IMAGES)
    model.bn.eps = 0.5
    after = _outputs(model, IMAGES)
    assert mismatches(before, after) > 0
    assert mismatches(after, _outputs(convert_fx(model), IMAGES)) == 0


@pytest.mark.parametrize(("path", "name", "value"), [("bn", "eps", 0.5), ("relu", "max_val", 4.0)])
@pytest.mark.parametrize("is_traced", [True, False])
def test_settings_that_went_into_a_fused_module_are_refused(
    path: str, name: str, value: float, is_traced: bool
) -> None:
    set_march(March.BAYES)
    set_qat_mode(QATMode.FuseBN)
    method = PrepareMethod.SYMBOLIC if is_traced else PrepareMethod.JIT_STRIP
    model = prepare(
        _Small().eval(), example_inputs=IMAGES, qconfig_setter=QconfigSetter(get_qconfig(), []), method=method
    )
    member = model.get_submodule(path)
    with pytest.raises(QuantizationConfigError, match=rf"{name}` at `{path}` cannot become"):
        setattr(member, name, value)
    member.inplace = True
    member.train()


def test_a_float16_operator_takes_settings() -> None:
    set_march(March.NASH_E)
    half = get_qconfig(out_dtype=torch.float16)
    model = prepare_qat_fx(
        QuantWrapper(nn.Softmax(1)).eval(), {"": get_default_qconfig(), "module_name": [("module", half)]}
    )
    data = torch.randn(2, 3, 4)
    calibrate(model, (data,))
    model.module.dim = 2
    assert model.module.dim == 2
    assert torch.allclose(model(data).sum(2), torch.ones(2, 3), atol=1e-2)


def test_a_qconfig_on_a_prepared_module_is_told() -> None:
    model = _small()
    with pytest.warns(QuantizationWarning, match=r"`ConvReLU62d` at `conv` .* is set after the model was prepared"):
        model.conv.qconfig = get_default_qconfig()


def test_rounding_that_is_switched_off_is_told_at_conversion() -> None:
    set_march(March.BAYES)
    model = _small()
    model.conv.weight_fake_quant.disable_fake_quant()
    with pytest.warns(QuantizationWarning, match=r"conv \(weight\): rounding is switched off"):
        convert_fx(model)


def test_a_hook_that_keeps_what_it_sees_does_not_make_the_integers_anew() -> None:
    model = _small()

    def keep(module: Any, args: tuple, out: Any) -> None:
        module.seen_last, module.seen_plain = out, out.plain().detach()

    layer = _layers(model)[0]
    layer.register_forward_hook(keep)
    _outputs(model, IMAGES)
    twin = layer.twin()
    _outputs(model, IMAGES)
    assert layer.twin() is twin
