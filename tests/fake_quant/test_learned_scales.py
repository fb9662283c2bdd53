"""Scales that are trained: gradients, soundness under any step, one arithmetic."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning
from horizon_plugin_pytorch.qat_mode import QATMode, set_qat_mode
from horizon_plugin_pytorch.qtensor import LentValuesError
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    convert_fx,
    get_default_qconfig,
    load_calib_state_dict,
    load_observer_params,
    parameter_groups,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.learnable_fake_quantize import LearnableFakeQuantize, PACTFakeQuantize
from horizon_plugin_pytorch.quantization.observer_v2 import FixedScaleObserver, MinMaxObserver
from horizon_plugin_pytorch.quantization.qconfig import default_qat_8bit_lsq_quant_qconfig
from tests.routes import assert_one_arithmetic, calibrate


def ready(cls=LearnableFakeQuantize, scale: float = 0.02, **kwargs) -> LearnableFakeQuantize:
    quantizer = cls(**kwargs)
    quantizer.set_qparams(scale)
    return quantizer


@given(st.floats(0.005, 0.05), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_the_gradient_is_that_of_the_paper(scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(300, generator=generator) * 2
    upstream = torch.randn(300, generator=generator)
    quantizer = ready(scale=scale)
    x.requires_grad_()
    quantizer(x).dequantize().mul(upstream).sum().backward()
    v = (x / quantizer.scale).detach()
    is_inside = (v > -128.5) & (v < 128)
    by_value = torch.where(is_inside, v.round().clamp(-128, 127) - v, v.sign().clamp(min=0) * 255 - 128)
    expected = (by_value * upstream).sum() / (300 * 127) ** 0.5
    torch.testing.assert_close(quantizer.scale.grad[0], expected, rtol=1e-3, atol=1e-5)
    assert torch.equal(x.grad, torch.where(is_inside, upstream, 0.0))


@pytest.mark.parametrize("grown", [[], [7], [3, 100, 255], list(range(200))])
@pytest.mark.parametrize("cls", [LearnableFakeQuantize, PACTFakeQuantize])
def test_rows_of_large_weights_that_leave_their_range_move_their_scales(cls, grown) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 30, 3, 3, generator=generator)
    quantizer = cls(
        MinMaxObserver, use_grad_scaling=False, qscheme=torch.per_channel_symmetric, ch_axis=0, channel_len=256
    )
    quantizer.weight(weight)
    weight[grown] *= 1.5
    weight.requires_grad_()
    upstream = torch.randn(weight.shape, generator=generator)
    rounded = quantizer.weight(weight)
    rounded.backward(upstream)
    expected = sum_in_float64(weight, rounded, upstream, quantizer, (1, 2, 3))
    torch.testing.assert_close(quantizer.scale.grad.double(), expected, rtol=1e-4, atol=1e-3)
    step = quantizer.scale.detach().reshape(-1, 1, 1, 1)
    is_inside = (weight.detach() > -128.5 * step) & (weight.detach() < 128 * step)
    assert torch.equal(weight.grad, torch.where(is_inside, upstream, 0.0))


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "a slice": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
    "expanded": lambda x: x[:1].expand_as(x),
}


def sum_in_float64(x, y, upstream, quantizer, axes=(0, 1, 2, 3)) -> torch.Tensor:
    scale = quantizer.scale.detach().double().reshape([-1 if d not in axes else 1 for d in range(4)])
    x, y = x.detach().double(), y.detach().double()
    is_inside = (x > (quantizer.quant_min - 0.5) * scale) & (x < (quantizer.quant_max + 1) * scale)
    by_value = torch.where(is_inside, y * 0 if isinstance(quantizer, PACTFakeQuantize) else y - x, y)
    return (by_value / scale * upstream).sum(axes).reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("cls", [LearnableFakeQuantize, PACTFakeQuantize])
def test_the_gradient_of_many_values_is_no_rounding_noise(cls, dtype, by_channel, layout) -> None:
    """All values pull one way: the sums of ``g * y`` and ``g * x`` have far more digits than float32 keeps."""
    size = 512 if layout == "contiguous" else 128
    x = LAYOUTS[layout](torch.rand(4, 4, size, size, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    channels = {"qscheme": torch.per_channel_symmetric, "ch_axis": 1, "channel_len": 4} if by_channel else {}
    quantizer = cls(MinMaxObserver, dtype=dtype, use_grad_scaling=False, **channels)
    largest = 2.99 if cls is PACTFakeQuantize else 3.5
    quantizer.set_qparams(torch.full((4 if by_channel else 1,), largest / quantizer.quant_max))
    y = quantizer(x).dequantize()
    y.sum().backward()
    expected = sum_in_float64(x, y, 1.0, quantizer, (0, 2, 3) if by_channel else (0, 1, 2, 3))
    torch.testing.assert_close(quantizer.scale.grad.double(), expected, rtol=1e-3, atol=0.01)
    assert torch.equal(x.grad, (x < (quantizer.quant_max + 1) * quantizer.scale[0]).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_coarse_floats_is_that_of_their_values(dtype) -> None:
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    quantizer = ready(scale=0.0123, use_grad_scaling=False)
    quantizer(x).dequantize().sum().backward()
    v = x.detach().double() / quantizer.scale.detach().double()
    assert float(quantizer.scale.grad) == pytest.approx(float((v.round() - v).sum()), rel=1e-3)
    assert x.grad.dtype == dtype


def test_gradients_have_gradients() -> None:
    x = torch.randn(20, requires_grad=True)
    (slope,) = torch.autograd.grad(ready()(x).dequantize().square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert torch.equal(x.grad.ne(0), slope.ne(0))


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(4, 6, 3),
    "strided": lambda: nn.Conv2d(4, 6, 5, stride=(2, 3), padding=(2, 1), bias=False),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2),
    "same": lambda: nn.Conv2d(4, 6, 3, padding="same"),
    "uneven": lambda: nn.Conv2d(4, 6, 2, padding="same"),
    "reflecting": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3),
    "one axis": lambda: nn.Conv1d(4, 6, 3, padding=1),
    "three axes": lambda: nn.Conv3d(4, 6, 3, padding=1),
    "activation": lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()),
    "bn": lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU6()),
    "twice": lambda: Twice(),
}


class Twice(nn.Module):
    """The input goes to two convolutions and past them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x) + x


@pytest.mark.in_turns("kind", "mode", "name")
@pytest.mark.parametrize("kind", ["lsq", "pact"])
@pytest.mark.parametrize("mode", list(QATMode))
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_scale_of_data_has_the_same_gradient_without_that_of_the_data(name, mode, kind) -> None:
    set_qat_mode(mode)
    torch.manual_seed(0)
    shape = (2, 4, *[9] * {"one axis": 1, "three axes": 3}.get(name, 2))
    x, layer = torch.randn(shape), CONVOLUTIONS[name]()
    model = prepare_qat_fx(
        QuantWrapper(layer), {"": get_default_qconfig(activation_fake_quant=kind, weight_fake_quant=kind)}
    )
    calibrate(model, [x / 2])  # some values are clipped
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    found = {}
    for has_gradient in (False, True):
        trained = copy.deepcopy(model)
        trained(x.clone().requires_grad_(has_gradient)).sin().sum().backward()
        found[has_gradient] = {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}
    assert found[True]["quant.activation_post_process.scale"].abs().item() > 1e-5
    assert found[False].keys() == found[True].keys()
    for parameter, expected in found[True].items():
        torch.testing.assert_close(found[False][parameter], expected, rtol=2e-4, atol=1e-6, msg=parameter)


def test_data_may_have_no_batch_and_weights_no_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, 8)
    model = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 4, 3)), {"": default_qat_8bit_lsq_quant_qconfig})
    calibrate(model, [x])
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    scale = model.quant.activation_post_process.scale
    model(x).sum().backward()
    alone, scale.grad = scale.grad, None
    model.module.weight.requires_grad_(False)
    model(x[None]).sum().backward()
    torch.testing.assert_close(scale.grad, alone)


@pytest.mark.parametrize("is_early", [True, False])
def test_data_that_change_before_the_gradient_are_noticed(is_early: bool) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 4, 3)), {"": default_qat_8bit_lsq_quant_qconfig})
    calibrate(model, [x])
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    rounded = model.quant(x)
    if is_early:
        x.add_(1)
        with pytest.raises(LentValuesError, match="changed in place afterwards"):
            model.module(rounded)
        return
    out = model.module(rounded).dequantize()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_of_a_layer_on_data_have_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 4, 3)), {"": default_qat_8bit_lsq_quant_qconfig})
    calibrate(model, [x])
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    found = []
    for has_gradient in (False, True):
        model.zero_grad()
        out = model(x.clone().requires_grad_(has_gradient)).sin().sum()
        (gradient,) = torch.autograd.grad(out, model.module.weight, create_graph=True)
        gradient.square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and "quant.activation_post_process.scale" in found[0]
    for name, expected in found[1].items():
        torch.testing.assert_close(found[0][name], expected, msg=name)


def test_pact_moves_by_what_is_clipped_only() -> None:
    inside, outside = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.5, 9.0, -9.0, 8.0])
    for values, expected in ((inside, 0.0), (outside, 127 - 128 + 127)):
        quantizer = ready(PACTFakeQuantize, use_grad_scaling=False)
        quantizer(values.requires_grad_()).dequantize().sum().backward()
        assert float(quantizer.scale.grad) == pytest.approx(expected, abs=1e-3)


def test_channels_have_gradients_of_their_own() -> None:
    quantizer = default_qat_8bit_lsq_quant_qconfig.weight(channel_len=3)
    weight = torch.randn(3, 4, 2)
    weight[1] = 0
    quantizer.weight(weight)
    loss = (quantizer.weight(weight) * torch.randn(3, 4, 2)).sum()
    loss.backward()
    assert quantizer.scale.grad.shape == (3,) and quantizer.scale.grad[0] != 0 and quantizer.scale.grad[1] == 0


@pytest.mark.slow
@given(st.lists(st.sampled_from([-1e30, -5.0, -1e-3, 0.0, 1e-12, 3.0, 1e30, float("nan"), float("inf")]), min_size=1))
@settings(max_examples=50, deadline=None)
def test_whatever_step_is_taken_the_scale_stays_positive_and_finite(steps: list[float]) -> None:
    quantizer = ready()
    for step in steps:
        with torch.no_grad():
            quantizer.scale -= step
        out = quantizer(torch.randn(20, requires_grad=True)).dequantize()
        assert out.isfinite().all()
        assert (quantizer.scale > 0).all() and quantizer.scale.isfinite().all()
        out.sum().backward()


def test_a_step_beyond_zero_halves_the_scale_and_is_mended_in_checkpoints_too() -> None:
    quantizer = ready(scale=0.5)
    quantizer(torch.randn(5))
    with torch.no_grad():
        quantizer.scale -= 0.7
    assert quantizer.state_dict()["scale"].tolist() == [0.25]
    with torch.no_grad():
        quantizer.scale.fill_(float("nan"))
    assert quantizer.state_dict()["scale"].tolist() == [0.25]


OPTIMIZERS = [
    torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1), torch.optim.Adam,
    torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop, torch.optim.ASGD,
]  # fmt: skip
NAN, INF = float("nan"), float("inf")


def is_sound(scale: torch.Tensor) -> bool:
    return bool((scale > 0).all() & scale.isfinite().all())


@pytest.mark.slow
@given(
    st.sampled_from(OPTIMIZERS),
    st.floats(-8, 35).map(lambda exponent: 10.0**exponent),
    st.sampled_from([LearnableFakeQuantize, PACTFakeQuantize]),
    st.sampled_from(["qint8", "qint16"]),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from([1.0, 0.0, -1e-30, 1e10, -1e38, NAN, INF, -INF]), min_size=1, max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_scales_stay_sound_under_any_optimizer_rate_and_gradient(
    make, rate: float, cls: type, dtype: str, by_channel: bool, use_grad_scaling: bool, upstream: list[float]
) -> None:
    channels = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0, "channel_len": 3} if by_channel else {}
    quantizer = cls(MinMaxObserver, dtype=dtype, use_grad_scaling=use_grad_scaling, **channels)
    x = torch.randn(3, 20)
    quantizer(x)
    optimizer = make([quantizer.scale], lr=rate)
    for factor in upstream:
        optimizer.zero_grad()
        quantizer(x * 3).dequantize().mul(factor).sum().backward()
        optimizer.step()
        assert is_sound(copy.deepcopy(quantizer).state_dict()["scale"])  # right after a step
        with torch.no_grad():
            assert is_sound(copy.deepcopy(quantizer).sound_scale())
        out = quantizer(x)
        assert out.dequantize().isfinite().all() and is_sound(quantizer.scale) and is_sound(out.q_scale())
    quantizer.set_state(FakeQuantState.VALIDATION)
    assert is_sound(quantizer.scale)


def test_an_optimizer_that_writes_to_data_is_noticed() -> None:
    """Torch counts no writes to ``parameter.data``."""
    quantizer = ready(scale=0.5)
    x = torch.randn(20)
    for value, expected in ((2.0, 2.0), (-3.0, 1.0), (NAN, 1.0)):
        quantizer(x)
        quantizer.scale.data.fill_(value)
        out = quantizer(x)
        assert quantizer.scale.tolist() == out.q_scale().tolist() == [expected]
    quantizer.scale.data.fill_(-1.0)
    assert quantizer.state_dict()["scale"].tolist() == [0.5]
    quantizer.scale.data.fill_(-1.0)
    quantizer.set_state(FakeQuantState.VALIDATION)
    assert quantizer(x).q_scale().tolist() == [0.25]


@pytest.mark.in_turns("state", "step", "mode")
@pytest.mark.slow
@pytest.mark.parametrize("mode", list(QATMode))
@pytest.mark.parametrize("step", [-1.0, 0.0, NAN, INF])
@pytest.mark.parametrize("state", [FakeQuantState.QAT, FakeQuantState.VALIDATION])
def test_a_model_converts_right_after_a_step_that_spoilt_its_scales(mode, step, state, tmp_path) -> None:
    model, _ = trained(default_qat_8bit_lsq_quant_qconfig, 2, mode)
    set_fake_quantize(model.eval(), state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".scale"):
                parameter[-1:] = step
    untouched = copy.deepcopy(model)
    quantized = convert_fx(model)  # before anything else looks at the scales
    assert all(is_sound(v) for name, v in quantized.named_buffers() if name.endswith("scale"))
    x = torch.randn(2, 3, 6, 6)
    if state is FakeQuantState.VALIDATION:
        assert torch.equal(untouched(x), quantized(x))
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    assert torch.equal(model(x), quantized(x))
    assert_one_arithmetic(model, (x,), tmp_path)


def test_a_scale_that_cannot_be_mended_is_named_at_conversion() -> None:
    model, _ = trained(get_default_qconfig(), 0)
    model.module.head.weight_fake_quant.scale[2] = NAN
    with pytest.raises(CalibrationError, match=r"`module.head \(weight\)`: its scale is nan.*calibrate anew"):
        convert_fx(model)


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU6()
        self.head = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.relu(self.bn(self.conv(x)))).sigmoid()


@pytest.mark.in_turns("mode", "value", "where")
@pytest.mark.parametrize("mode", list(QATMode))
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("quant.activation_post_process.scale", "quant"),
        ("module.conv.activation_post_process.scale", "module.conv"),
        ("module.head.activation_post_process.scale", "module.head"),
        ("module.head.weight_fake_quant.scale", r"module.head \(weight\)"),
        ("module.head.weight", r"module.head \(weight\)"),
        ("module.head.bias", r"module.head \(bias\)"),
        ("module.conv.bn.bias", r"module.conv \(bias\)"),
    ],
)
def test_numbers_that_integers_cannot_be_are_named(where: str, named: str, value: float, mode: QATMode) -> None:
    set_qat_mode(mode)
    try:
        model = prepare_qat_fx(QuantWrapper(Clipped()), {"": get_default_qconfig()})
    finally:
        set_qat_mode(QATMode.FuseBN)
    x = torch.randn(2, 3, 4, 4)
    calibrate(model, (x,))
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    if where not in state:  # folded
        where = where.replace(".bn", "")
    with torch.no_grad():
        state[where].reshape(-1)[0] = value
    for run in (lambda: model(x), lambda: convert_fx(model)):
        with pytest.raises(CalibrationError, match=f"`{named}`"):
            run()


@pytest.mark.parametrize("rate", [1e-4, 1e-2, 1.0])
def test_adamw_leaves_scales_sound_whatever_its_rate(rate: float) -> None:
    model, _ = trained(default_qat_8bit_lsq_quant_qconfig, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(6):
        optimizer.zero_grad()
        out = model(torch.randn(8, 3, 6, 6))
        out.square().mean().backward()
        optimizer.step()
        assert out.isfinite().all()
    scales = [v for name, v in model.state_dict().items() if name.endswith("scale")]
    assert len(scales) > 5 and all(bool((v > 0).all() & v.isfinite().all()) for v in scales)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn(self.conv(x)).relu()
        y = self.norm(y.mean((2, 3)))
        return self.head(y.softmax(-1) + y)


def trained(qconfig, steps: int = 5, mode: QATMode = QATMode.FuseBN) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(1)
    set_qat_mode(mode)
    try:
        model = prepare_qat_fx(QuantWrapper(Net()), {"": qconfig})
    finally:
        set_qat_mode(QATMode.FuseBN)
    x, target = torch.randn(8, 3, 6, 6), torch.randn(8, 4)
    calibrate(model, (x,))
    model.train()
    set_fake_quantize(model, FakeQuantState.QAT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return model, losses


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(QATMode))
@pytest.mark.parametrize("name", ["lsq", "pact"])
def test_scales_learn_and_the_integers_are_the_same_on_all_routes(name, mode, tmp_path) -> None:
    qconfig = get_default_qconfig(activation_fake_quant=name, weight_fake_quant=name)
    model, losses = trained(qconfig, mode=mode)
    assert losses[-1] < losses[0]
    learned = {n: p for n, p in model.named_parameters() if n.endswith(".scale")}
    assert learned and all(p.grad is not None for p in learned.values())  # nobody waits for a gradient: DDP would
    before, _ = trained(qconfig, 0, mode)
    moved = [n for n, p in before.named_parameters() if n in learned and not torch.equal(p, learned[n])]
    assert len(moved) > len(learned) / 2
    model.eval()
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    assert_one_arithmetic(model, (torch.randn(2, 3, 6, 6),), tmp_path)


@pytest.mark.slow
def test_checkpoints_go_either_way() -> None:
    learned, _ = trained(default_qat_8bit_lsq_quant_qconfig, 2)
    plain, _ = trained(get_default_qconfig(), 0)
    plain.load_state_dict(learned.state_dict())
    fresh = prepare_qat_fx(QuantWrapper(Net()), {"": default_qat_8bit_lsq_quant_qconfig})
    fresh.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 6, 6)
    results = []
    for model in (learned, plain, fresh, copy.deepcopy(learned)):
        model.eval()
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        results.append(model(x))
    assert all(torch.equal(r, results[0]) for r in results)


def ranges(model: nn.Module) -> dict[str, torch.Tensor]:
    quantizers = {name: m for name, m in model.named_modules() if isinstance(m, FakeQuantize)}
    return {name: m.scale.detach() * m.activation_post_process.half_range for name, m in quantizers.items()}


@pytest.mark.in_turns("load", "is_trained", "formats", of=2)
@pytest.mark.parametrize("load", ["load_state_dict", "load_calib_state_dict", "load_observer_params"])
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("formats", [("qint8", "qint16"), ("qint16", "qint8"), ("qint8", "qint8")])
def test_trained_scales_fit_another_format(formats, is_trained, load) -> None:
    lsq = {"activation_fake_quant": "lsq", "weight_fake_quant": "lsq"}
    qconfigs = [get_default_qconfig(**lsq, activation_qkwargs={"dtype": dtype}) for dtype in formats]
    source, _ = trained(qconfigs[0], 0)
    if is_trained:
        with torch.no_grad():
            for name, parameter in source.named_parameters():
                if name.endswith(".scale"):  # far beyond what its range is
                    parameter.mul_(torch.full_like(parameter, 300.0).pow(torch.rand_like(parameter) * 2 - 1))
    expected = ranges(source)
    target = prepare_qat_fx(QuantWrapper(Net()), {"": qconfigs[1]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if load == "load_observer_params":
            load_observer_params(source, target)
        elif load == "load_calib_state_dict":
            load_calib_state_dict(target, source.state_dict())
        else:
            target.load_state_dict(source.state_dict())
    is_told = load != "load_observer_params" and formats[0] != formats[1]
    assert sum("of another format" in str(w.message) for w in caught) == is_told
    for name, found in ranges(target).items():
        assert torch.allclose(found, expected[name], rtol=1e-5), name


def test_trained_scales_of_a_checkpoint_without_their_ranges_fit_another_format() -> None:
    """Checkpoints had the range of calibration beside the trained scale."""
    narrow, wide = ready(dtype="qint8", scale=0.01), LearnableFakeQuantize(dtype="qint16")
    state = narrow.state_dict()
    state["activation_post_process.min_val"], state["activation_post_process.max_val"] = -torch.ones(1), torch.ones(1)
    state["scale"] = torch.full((1,), 5 / 127.5)
    wide.load_state_dict(state)
    assert float(wide.scale) * 32767.5 == pytest.approx(5)
    narrow.load_state_dict(state)
    assert float(narrow.scale) * 127.5 == pytest.approx(5)


def test_a_given_scale_goes_along_to_another_format() -> None:
    source, target = FakeQuantize(), FakeQuantize(dtype="qint16")
    source(torch.randn(100))
    source.set_qparams(0.5)
    target.copy_statistics(source)
    assert float(target.scale) * 32767.5 == pytest.approx(0.5 * 127.5)


def test_a_scale_that_is_given_is_not_trained() -> None:
    quantizer = LearnableFakeQuantize(FixedScaleObserver, scale=0.5)
    assert not quantizer.scale.requires_grad
    assert isinstance(quantizer, FakeQuantize)
    quantizer(torch.randn(5, requires_grad=True)).dequantize().sum().backward()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_scales_of_a_frozen_part_stay_and_train_again_afterwards(make, set_to_none: bool) -> None:
    first, second = ready(), ready()
    optimizer = make([*first.parameters(), *second.parameters()], lr=1e-4)
    x = torch.randn(50)

    def steps() -> tuple[float, float]:
        before = first.scale.item(), second.scale.item()
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            (first(x).dequantize() + second(x * 3).dequantize()).square().sum().backward()
            optimizer.step()
        return abs(first.scale.item() - before[0]), abs(second.scale.item() - before[1])

    assert all(steps())
    first.set_state(FakeQuantState.VALIDATION)
    moved = steps()
    assert moved[0] == 0 and moved[1] > 0
    first.set_state(FakeQuantState.QAT)
    assert all(steps())


def test_an_optimizer_made_before_the_first_batch_trains_the_scales() -> None:
    quantizer = default_qat_8bit_lsq_quant_qconfig.weight()  # the number of channels is not known yet
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.1)
    weight = torch.randn(3, 5)
    for _ in range(2):
        before = quantizer.scale.detach().clone()
        quantizer.weight(weight).square().sum().backward()
        optimizer.step()
    assert quantizer.scale.shape == (3,) and not torch.equal(before, quantizer.scale)


def test_adam_moves_scales_of_all_sizes_by_the_same_share() -> None:
    """With one rate for all, the scale of an int16 tensor would be gone at the first step."""
    torch.manual_seed(0)
    model = QuantWrapper(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    lsq = {"activation_fake_quant": "lsq", "weight_fake_quant": "lsq"}
    qconfigs = [get_default_qconfig(**lsq, activation_qkwargs={"dtype": dtype}) for dtype in ("qint8", "qint16")]
    prepared = prepare_qat_fx(model, {"": qconfigs[0], "module_name": {"module.0": qconfigs[1]}})
    x = torch.randn(16, 4)
    calibrate(prepared, [x])
    prepared.train()
    set_fake_quantize(prepared, FakeQuantState.QAT)
    groups = parameter_groups(prepared, lr=0.01, scale_lr=0.02, weight_decay=0.1)
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(id(p) for p in prepared.parameters())
    assert groups[0]["weight_decay"] == 0.1 and all(group["weight_decay"] == 0 for group in groups[1:])
    before = {name: p.detach().clone() for name, p in prepared.named_parameters() if name.endswith(".scale")}
    assert max(float(s.max()) for s in before.values()) > 100 * min(float(s.min()) for s in before.values())
    optimizer = torch.optim.Adam(groups)
    prepared(x).square().sum().backward()
    optimizer.step()
    moved = {name: (prepared.get_parameter(name).detach() / old - 1).abs().max() for name, old in before.items()}
    assert all(0 <= float(share) <= 0.0201 for share in moved.values())
    assert sum(float(share) >= 0.0099 for share in moved.values()) >= len(moved) - 1  # one input scale may be exact


@pytest.mark.parametrize("smallest", [0.5, 0.1, 1e-4, 0.0])
def test_no_channel_moves_by_more_than_its_share(smallest: float) -> None:
    torch.manual_seed(0)
    weight = torch.rand(8, 50) + 0.5
    weight[2] *= smallest
    weight[5:] *= 0 if smallest == 0 else 1
    quantizer = default_qat_8bit_lsq_quant_qconfig.weight()
    quantizer.weight(weight)
    before = quantizer.scale.detach().clone()
    groups = parameter_groups(quantizer, lr=0.0, scale_lr=0.01)
    optimizer = torch.optim.Adam(groups)
    for _ in range(3):
        optimizer.zero_grad()
        (quantizer.weight(weight) * weight.square()).sum().backward()
        optimizer.step()
    moved = (quantizer.scale.detach() / before - 1).abs()
    assert float(moved.max()) < 0.0303
    counts = smallest in (0.5, 0.1)  # for one that is far smaller the others need not wait
    size = float(before[2] if counts else before[:5][weight[:5, 0] > 0.01].min())
    assert 0.005 * size <= groups[1]["lr"] <= 0.01 * size
    assert (float(moved[2]) > 0) == counts


def test_rates_need_scales() -> None:
    model = prepare_qat_fx(QuantWrapper(nn.Conv2d(3, 4, 3)), {"": default_qat_8bit_lsq_quant_qconfig})
    with pytest.raises(CalibrationError, match="none is known yet; calibrate first"):
        parameter_groups(model, lr=0.1)
    model.quant.activation_post_process.set_qparams(0.01)
    with pytest.warns(CalibrationWarning, match=r"no data have reached `module.*median of the others"):
        groups = parameter_groups(model, lr=0.1)
    assert [group["lr"] for group in groups] == [0.1, 1e-3 * 2**-7]
    assert not parameter_groups(nn.Conv2d(3, 4, 3), lr=0.1)[1:]


def test_gradients_beyond_float32_are_infinite_and_the_scale_outlives_them() -> None:
    quantizer = LearnableFakeQuantize(use_grad_scaling=False)
    quantizer.set_qparams(1e-4)
    x = torch.full((8,), 0.5, requires_grad=True)
    y = quantizer.round(x)
    y.backward(torch.full_like(y, 1e36))
    assert quantizer.scale.grad.item() == torch.inf
    torch.optim.SGD([quantizer.scale], 0.1).step()
    assert quantizer.current_scale().item() == pytest.approx(1e-4)


def test_an_infinite_value_leaves_the_scale_a_finite_gradient() -> None:
    quantizer = LearnableFakeQuantize(saturate=False, use_grad_scaling=False)
    quantizer.set_qparams(0.01)
    quantizer.round(torch.tensor([0.1, torch.inf, -0.25], requires_grad=True)).sum().backward()
    assert quantizer.scale.grad.item() == pytest.approx(127, abs=0.01)
