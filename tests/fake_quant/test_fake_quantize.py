"""FakeQuantize: states, order, values, gradients, and life in a checkpoint."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import CalibrationWarning, QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.fake_quant import rounding
from horizon_plugin_pytorch.fake_quant.rounding import integer_limits, round_to_grid
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import FakeQuantize, FakeQuantState, QuantStub, convert_fx, set_fake_quantize
from horizon_plugin_pytorch.quantization.fake_quantize import LoadedScale
from horizon_plugin_pytorch.quantization.learnable_fake_quantize import LearnableFakeQuantize
from horizon_plugin_pytorch.quantization.observer import (
    FixedScaleObserver,
    MinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from tests.routes import prepared
from tests.strategies import formats

RELU, RELU6 = (0.0, math.inf), (0.0, 6.0)
X = torch.tensor([-1.0, -0.3, 0.004, 0.7, 2.55])


def per_channel(**kwargs) -> FakeQuantize:
    return FakeQuantize(MovingAveragePerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric, ch_axis=0, **kwargs)


@pytest.mark.parametrize("cls", [FakeQuantize, LearnableFakeQuantize])
@pytest.mark.parametrize("state", [FakeQuantState.CALIBRATION, FakeQuantState.QAT])
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_next_batch_does_not_move_the_scale_of_a_tensor(context, state, cls) -> None:
    quantizer = cls(observer=MinMaxObserver)
    set_fake_quantize(quantizer, state)
    with context():
        before = quantizer(X)
        scale = before.q_scale().clone()
        assert torch.equal(scale, quantizer.scale)
        if cls is LearnableFakeQuantize:  # in training it moves by its gradient
            quantizer.scale.data.mul_(2)
        after = quantizer(100 * X)
    assert torch.equal(before.q_scale(), scale) and torch.equal(after.q_scale(), quantizer.scale)
    assert not torch.equal(after.q_scale(), scale)
    assert not before.q_scale().is_inference() and not before.q_scale().requires_grad  # what keeps it may train later


def test_it_observes_then_updates_the_scale_then_rounds_with_it() -> None:
    fq = FakeQuantize(averaging_constant=1.0)
    fq(X)
    assert fq.scale.item() == pytest.approx(0.02)
    out = fq(X * 10)  # already on the new grid
    assert fq.scale.item() == pytest.approx(0.2)
    assert out.scale.item() == pytest.approx(0.2)
    torch.testing.assert_close(out.plain(), (X * 10 / fq.scale).round().clamp(-128, 127) * fq.scale)


STATES = {  # state: observes, quantizes
    FakeQuantState.QAT: (True, True),
    FakeQuantState.CALIBRATION: (True, False),
    FakeQuantState.VALIDATION: (False, True),
    FakeQuantState._FLOAT: (False, False),
}


@pytest.mark.parametrize("state", STATES)
def test_states_observe_and_quantize_as_documented(state: FakeQuantState) -> None:
    observes, quantizes = STATES[state]
    fq = FakeQuantize()
    fq.set_qparams(0.5)
    set_fake_quantize(fq, state)
    assert (bool(fq.observer_enabled), bool(fq.fake_quant_enabled)) == (observes, quantizes)
    out = fq(X)
    assert fq.activation_post_process.has_statistics == observes
    assert fq.scale.item() == pytest.approx(0.02 if observes else 0.5)
    assert out.is_rounded == quantizes
    if quantizes:
        torch.testing.assert_close(out.plain(), (X / fq.scale).round().clamp(-128, 127) * fq.scale)
    else:
        assert torch.equal(out.plain(), X)


def test_state_values_are_the_documented_strings() -> None:
    assert [s.value for s in FakeQuantState if not s.name.startswith("_")] == ["qat", "calibration", "validation"]


def test_state_can_be_set_on_a_part_of_a_model() -> None:
    model = nn.ModuleDict({"backbone": nn.Sequential(FakeQuantize(), FakeQuantize()), "head": FakeQuantize()})
    set_fake_quantize(model, FakeQuantState.QAT)
    set_fake_quantize(model["backbone"], FakeQuantState.VALIDATION)
    assert [m.is_exact for m in model["backbone"]] == [True, True]
    assert not model["head"].is_exact


@pytest.mark.parametrize("state", ["qat", None, 3])
def test_a_state_that_is_not_one_is_refused(state) -> None:
    with pytest.raises(TypeError, match=r"FakeQuantState\.QAT.*FakeQuantState\.VALIDATION"):
        set_fake_quantize(FakeQuantize(), state)


def test_switches_can_be_set_one_by_one() -> None:
    fq = FakeQuantize()
    fq.disable_observer()
    fq.disable_fake_quant()
    assert (fq.observer_enabled.item(), fq.fake_quant_enabled.item()) == (0, 0)
    assert torch.equal(fq(X).plain(), X)
    assert not fq.has_statistics
    fq.enable_observer()
    fq.enable_fake_quant()
    assert fq(X).scale.item() == pytest.approx(0.02)


def test_buffers_are_the_documented_ones() -> None:
    found = {name: (tuple(b.shape), b.dtype) for name, b in per_channel(channel_len=3).state_dict().items()}
    assert found == {
        "fake_quant_enabled": ((1,), torch.uint8),
        "observer_enabled": ((1,), torch.uint8),
        "scale": ((3,), torch.float32),
        "zero_point": ((3,), torch.int64),
        "activation_post_process.min_val": ((3,), torch.float32),
        "activation_post_process.max_val": ((3,), torch.float32),
        "quant_range": ((2,), torch.int32),  # not a documented one: it says what the scale is for
    }
    assert {name for name, _ in per_channel(channel_len=3).named_buffers()} == found.keys() - {"quant_range"}


def test_repr_is_the_one_that_the_guide_prints() -> None:
    """development-guide.md, the printed QAT model after "Print the results of the QAT model"."""
    fq = FakeQuantize()
    fq(torch.tensor([-0.9995, 0.9995]))
    assert repr(fq) == (
        "FakeQuantize(\n"
        "  fake_quant_enabled=tensor([1], dtype=torch.uint8), observer_enabled=tensor([1], dtype=torch.uint8), "
        "quant_min=-128, quant_max=127, dtype=qint8, qscheme=torch.per_tensor_symmetric, ch_axis=-1, "
        "scale=tensor([0.0078]), zero_point=tensor([0])\n"
        "  (activation_post_process): MovingAverageMinMaxObserver(min_val=tensor([-0.9995]), "
        "max_val=tensor([0.9995]))\n"
        ")"
    )
    weight = per_channel(channel_len=3)
    weight(torch.tensor([[-0.4881, -0.1213], [-0.4944, 0.5284], [0.0787, 0.1981]]))
    assert repr(weight) == (
        "FakeQuantize(\n"
        "  fake_quant_enabled=tensor([1], dtype=torch.uint8), observer_enabled=tensor([1], dtype=torch.uint8), "
        "quant_min=-128, quant_max=127, dtype=qint8, qscheme=torch.per_channel_symmetric, ch_axis=0, "
        "scale=tensor([0.0038, 0.0041, 0.0016]), zero_point=tensor([0, 0, 0])\n"
        "  (activation_post_process): MovingAveragePerChannelMinMaxObserver("
        "min_val=tensor([-0.4881, -0.4944,  0.0787]), max_val=tensor([-0.1213,  0.5284,  0.1981]))\n"
        ")"
    )


def test_with_args_gives_a_constructor_that_can_be_extended_copied_and_compared() -> None:
    partial = FakeQuantize.with_args(dtype=qint16, averaging_constant=0)
    fq = partial(channel_len=1)
    assert (fq.dtype, fq.quant_min, fq.quant_max, fq.activation_post_process.averaging_constant) == (
        qint16,
        -32768,
        32767,
        0,
    )
    assert partial.with_args(dtype=qint8)().dtype == qint8
    assert partial().dtype == qint16
    for other in (copy.deepcopy(partial), pickle.loads(pickle.dumps(partial))):
        assert other == partial
        assert hash(other) == hash(partial)
    assert partial != FakeQuantize.with_args(dtype=qint8, averaging_constant=0)
    assert {partial: 1}[FakeQuantize.with_args(averaging_constant=0, dtype=qint16)] == 1


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.tensor([0.5])])
def test_set_qparams_holds_until_an_observer_sees_data(scale) -> None:
    fq = FakeQuantize()
    fq.set_qparams(scale, 0)
    assert fq.has_statistics
    set_fake_quantize(fq, FakeQuantState.VALIDATION)
    assert torch.equal(fq(X).int_repr(), torch.tensor([-2, -1, 0, 1, 5], dtype=torch.int8))
    set_fake_quantize(fq, FakeQuantState.QAT)
    fq(X)
    assert fq.scale.item() == pytest.approx(0.02)


def test_set_qparams_per_channel_replaces_all_scales() -> None:
    fq = per_channel()
    fq.set_qparams(torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3))
    assert fq.scale.shape == fq.zero_point.shape == (3,)


@pytest.mark.parametrize(
    ("scale", "zero_point", "text"),
    [
        (0.0, None, "positive"),
        (-1.0, None, "positive"),
        (math.nan, None, "finite"),
        (math.inf, None, "finite"),
        (torch.tensor([1.0, 0.0]), None, "positive"),
        (0.1, 3, "zero_point must be 0"),
        (0.1, torch.tensor([1]), "symmetric"),
    ],
)
def test_set_qparams_refuses_what_is_no_scale(scale, zero_point, text: str) -> None:
    fq = per_channel()
    with pytest.raises(QuantizationConfigError, match=text):
        fq.set_qparams(scale, zero_point)


def test_several_scales_without_channels_are_refused() -> None:
    with pytest.raises(QuantizationConfigError, match="per_channel_symmetric"):
        FakeQuantize().set_qparams(torch.tensor([0.1, 0.2]))


def test_a_fixed_scale_stays_whatever_is_seen_or_loaded() -> None:
    fq = FakeQuantize(FixedScaleObserver, scale=1 / 128)
    assert fq.is_fixed
    assert fq.has_statistics
    fq(X * 100)
    assert fq.scale.item() == 1 / 128
    other = FakeQuantize()
    other(X)
    fq.load_state_dict(other.state_dict())
    assert fq.scale.item() == 1 / 128
    fq.copy_statistics(other)
    assert fq.scale.item() == 1 / 128


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [qint8, qint16])
@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=20))
def test_values_land_on_the_grid_at_most_half_a_step_away(dtype, values: list[float]) -> None:
    x = torch.tensor([*values, 1.0])
    fq = FakeQuantize(dtype=dtype)
    out = fq(x)
    assert isinstance(out, QTensor)
    steps = out.plain().double() / fq.scale.double()
    assert float((steps - steps.round()).abs().max()) < 1e-2
    # float32 numbers of 2**15 steps have spacings of up to 2**-9 of a step: division, product and difference round.
    assert float((out.plain() - x).abs().max()) <= fq.scale.item() * (0.5 + 3 * 2.0**-9)
    assert int(out.int_repr().min()) >= dtype.min
    assert int(out.int_repr().max()) <= dtype.max


def gradient(fq_or_none: FakeQuantize | None, x: Tensor, limits=(-math.inf, math.inf), **kwargs) -> list[float]:
    x = x.clone().requires_grad_()
    out = fq_or_none(x, limits).plain() if fq_or_none is not None else round_to_grid(x, limits=limits, **kwargs)
    out.backward(torch.arange(1.0, x.numel() + 1).reshape(x.shape))
    assert x.grad is not None
    return x.grad.flatten().tolist()


def fixed(scale: float = 0.1, **kwargs) -> FakeQuantize:
    return FakeQuantize(FixedScaleObserver, scale=scale, **kwargs)


def test_gradients_pass_inside_the_range_and_stop_outside() -> None:
    x = torch.tensor([-13.5, -12.8, -0.04, 0.0, 3.3, 12.7, 13.5])
    assert gradient(fixed(), x) == [0, 2, 3, 4, 5, 6, 0]
    assert gradient(fixed(saturate=False), x) == [1, 2, 3, 4, 5, 6, 7]


def test_the_value_that_sets_the_scale_keeps_its_gradient() -> None:
    for x in (torch.tensor([-1.0, 0.2, 3.0]), torch.tensor([-3.0, 0.2, 1.0])):
        assert gradient(FakeQuantize(), x) == [1, 2, 3]


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("scale", [0.1, 0.01])
def test_fused_relu_and_relu6_limit_values_and_gradients(scale: float, saturate: bool) -> None:
    x = torch.tensor([-20.0, -1.0, -0.001, 0.5, 1.2, 5.9, 6.1, 20.0])
    top = 127 * scale
    for limits in (RELU, RELU6):
        fq = fixed(scale, saturate=saturate)
        out = fq(x, limits).plain()
        torch.testing.assert_close(out, x.clamp(0, min(top, limits[1])), atol=scale / 2 + 1e-6, rtol=0)
        ends = min(limits[1], 128 * scale) if saturate else limits[1]
        expected = [float(i + 1) if 0 < v < ends else 0.0 for i, v in enumerate(x.tolist())]
        assert gradient(fq, x, limits) == expected


def test_limits_hold_without_quantization_too() -> None:
    fq = FakeQuantize()
    set_fake_quantize(fq, FakeQuantState.CALIBRATION)
    out = fq(torch.tensor([-1.0, 3.0, 9.0]), RELU6)
    assert out.plain().tolist() == [0.0, 3.0, 6.0]
    assert fq.activation_post_process.max_val.item() == 6.0


def test_gradients_per_channel() -> None:
    fq = FakeQuantize(
        FixedScaleObserver, scale=torch.tensor([0.1, 1.0]), qscheme=torch.per_channel_symmetric, ch_axis=0
    )
    assert gradient(fq, torch.tensor([[100.0, 1.0], [100.0, 200.0]])) == [0, 2, 3, 0]


@pytest.mark.parametrize("size", [rounding._AT_ONCE, 2 * rounding._AT_ONCE, 3 * rounding._AT_ONCE + 5])
def test_a_large_tensor_is_rounded_in_pieces_to_the_same_bits(size: int) -> None:
    threads = torch.get_num_threads()
    x = (torch.randn(size) * 40).requires_grad_()
    x.data[:256] = (torch.arange(256) - 128 + 0.5) * 0.3  # halves, where every other order of steps shows
    x.data[-3:] = torch.tensor([math.nan, math.inf, -math.inf])
    wanted = torch.div(x.detach(), 0.3).round_().clamp_(-128, 127).mul_(0.3)
    try:
        torch.set_num_threads(1)
        out = round_to_grid(x, torch.tensor([0.3], dtype=torch.float64), -1, -128, 127)
        out.nansum().backward()
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(out.detach(), wanted, rtol=0, atol=0, equal_nan=True)
    inside = (x.detach() > -128.5 * 0.3) & (x.detach() < 128 * 0.3)
    assert torch.equal(x.grad, inside.float())


@pytest.mark.parametrize("grown", [[], [0], [3, 100, 255], list(range(200))])
@pytest.mark.parametrize("shape", [(256, 300), (256, 30, 3, 3)])
def test_large_weights_have_the_mask_of_every_row_that_leaves_its_range(shape, grown) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    scale = weight.abs().flatten(1).amax(1) / 127.5
    weight[grown] *= 1.5
    if grown:
        weight[grown[-1]].view(-1)[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    weight.requires_grad_()
    upstream = torch.randn(shape, generator=generator)
    before = upstream.clone()
    round_to_grid(weight, scale, 0, -128, 127).backward(upstream)
    step = scale.reshape(-1, *[1] * (len(shape) - 1))
    is_inside = (weight.detach() > -128.5 * step) & (weight.detach() < 128 * step)
    assert torch.equal(weight.grad, torch.where(is_inside, upstream, 0.0))
    assert torch.equal(upstream, before)


@pytest.mark.parametrize("make", [FakeQuantize, per_channel])
def test_weights_beyond_their_range_get_no_gradient_also_where_the_observer_has_just_seen_them(make) -> None:
    """What the observer found is taken for the question whether anything lies beyond, and only for that tensor."""
    fq = make(averaging_constant=0.0, channel_len=2) if make is per_channel else make(averaging_constant=0.0)
    first = nn.Parameter(torch.tensor([[-1.0, 0.5], [0.2, 1.0]]))
    fq.weight(first).sum().backward()
    assert torch.equal(first.grad, torch.ones(2, 2))
    wide = nn.Parameter(torch.tensor([[-1.0, 9.0], [0.2, 1.0]]))
    fq.weight(wide).sum().backward()  # the range is frozen
    assert torch.equal(wide.grad, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert fq.activation_post_process.ends_of is None  # nothing is kept
    lost = nn.Parameter(torch.tensor([[-1.0, math.nan], [0.2, 1.0]]))
    with pytest.warns(CalibrationWarning, match="NaN"):
        fq.weight(lost).nansum().backward()
    assert torch.equal(lost.grad, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))


def test_weights_come_back_as_ordinary_tensors_that_train() -> None:
    fq = per_channel(channel_len=2)
    w = nn.Parameter(torch.tensor([[0.5, -1.0], [0.01, 0.02]]))
    out = fq.weight(w)
    assert type(out) is Tensor
    assert fq.scale.tolist() == pytest.approx([1 / 127.5, 0.02 / 127.5])
    out.sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("scale", "limits", "expected"),
    [
        (0.1, RELU, (0, 127)),
        (0.1, RELU6, (0, 60)),
        (0.01, RELU6, (0, 127)),
        (100.0, RELU6, (0, 0)),
        (0.1, (-math.inf, math.inf), (-128, 127)),
        (torch.tensor([12 / 255]), RELU6, (0, 127)),
    ],
)
def test_integer_limits_of_an_activation(scale, limits, expected) -> None:
    assert integer_limits(scale, -128, 127, limits) == expected


@pytest.mark.parametrize("make", [FakeQuantize, per_channel, lambda: FakeQuantize(dtype=qint16)])
def test_copies_pickles_and_checkpoints_carry_scale_range_and_state(make) -> None:
    fq = make()
    x = torch.randn(3, 5)
    fq(x)
    set_fake_quantize(fq, FakeQuantState.VALIDATION)
    file = io.BytesIO()
    torch.save(fq.state_dict(), file)
    file.seek(0)
    fresh = make()
    missing = fresh.load_state_dict(torch.load(file, weights_only=True))
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    for other in (copy.deepcopy(fq), pickle.loads(pickle.dumps(fq)), fresh):
        assert torch.equal(other.scale, fq.scale)
        assert other.scale is not fq.scale
        assert other.is_exact
        assert other.has_statistics
        assert torch.equal(other(x).plain(), fq(x).plain())
        set_fake_quantize(other, FakeQuantState.QAT)
        other(x * 100)
        assert not torch.equal(other.scale, fq.scale)


def test_a_checkpoint_with_another_number_of_channels_is_taken_over() -> None:
    source, target = per_channel(channel_len=5), per_channel()
    source(torch.randn(5, 2))
    target.load_state_dict(source.state_dict())
    assert target.scale.shape == target.zero_point.shape == target.activation_post_process.min_val.shape == (5,)
    assert torch.equal(target.scale, source.scale)


def test_a_checkpoint_of_a_scale_of_one_still_counts_as_calibrated_if_its_range_is_there() -> None:
    source = FakeQuantize()
    source(torch.tensor([127.5, -1.0]))
    assert source.scale.item() == 1.0
    target = FakeQuantize()
    target.load_state_dict(source.state_dict())
    assert target.has_statistics


def test_a_fresh_checkpoint_does_not_count_as_calibrated() -> None:
    target = FakeQuantize()
    target.load_state_dict(FakeQuantize().state_dict())
    assert not target.has_statistics
    observer = target.activation_post_process
    observer(X)
    assert observer.has_statistics
    observer.load_state_dict(FakeQuantize().activation_post_process.state_dict())
    assert not observer.has_statistics


def test_a_given_scale_in_a_checkpoint_counts_as_calibrated() -> None:
    source, target = FakeQuantize(), FakeQuantize()
    source.set_qparams(0.5)
    target.load_state_dict(source.state_dict())
    assert target.has_statistics and target.scale.item() == 0.5


def test_only_the_last_checkpoint_says_whether_its_format_was_another() -> None:
    narrow, wide = FakeQuantize(), FakeQuantize(dtype=qint16)
    narrow(X), wide(X)
    own = copy.deepcopy(wide.state_dict())
    for state, is_converted in ((narrow.state_dict(), True), (own, False)):
        wide.load_state_dict(state)
        assert (wide.loaded is LoadedScale.CONVERTED) == is_converted
        assert wide.scale.item() == pytest.approx(2.55 / 32767.5)


@pytest.mark.parametrize(
    ("source", "target", "ratio"), [(qint8, qint8, 1.0), (qint8, qint16, 127.5 / 32767.5), (qint16, qint8, 257.0)]
)
def test_statistics_can_be_copied_to_another_format(source, target, ratio: float) -> None:
    a, b = FakeQuantize(dtype=source), FakeQuantize(dtype=target)
    b.copy_statistics(a)
    assert not b.has_statistics
    a(X)
    b.copy_statistics(a)
    assert b.scale.item() == pytest.approx(a.scale.item() * ratio, rel=1e-5)
    assert b.activation_post_process.max_val.item() == a.activation_post_process.max_val.item()
    a(X * 100)
    assert b.activation_post_process.max_val.item() == pytest.approx(2.55)


CALLS = st.tuples(st.integers(-9, -1), st.integers(1, 9), st.sampled_from([0.5, 1.0, 2.0]), formats)


@pytest.mark.slow
@given(st.lists(CALLS, min_size=1, max_size=4), formats)
def test_joined_statistics_cover_those_of_all(calls, dtype) -> None:
    sources = [FakeQuantize(), FakeQuantize(dtype=qint16)]  # which have seen nothing
    for low, high, trained, source_dtype in calls:
        source = LearnableFakeQuantize(dtype=source_dtype)
        source(torch.tensor([low, high]).float())
        with torch.no_grad():
            source.scale.mul_(trained)  # away from its range
        sources.append(source)
    joined = FakeQuantize(dtype=dtype)
    joined.join_statistics(sources)
    lowest, highest = min(low * trained for low, _, trained, _ in calls), max(c[1] * c[2] for c in calls)
    observer = joined.activation_post_process
    assert (observer.min_val.item(), observer.max_val.item()) == pytest.approx((lowest, highest))
    assert joined.scale.item() * observer.half_range == pytest.approx(max(-lowest, highest))


def test_joining_leaves_what_is_fixed_and_takes_what_was_given() -> None:
    given_scale, seen, wide, fixed_one = FakeQuantize(), FakeQuantize(), FakeQuantize(), fixed(0.25)
    given_scale.set_qparams(0.5)
    seen(X), wide(100 * X)
    fixed_one.load_state_dict(wide.state_dict())  # it has a range now, which means nothing
    before = copy.deepcopy(fixed_one.state_dict())
    fixed_one.join_statistics([seen])
    assert all(torch.equal(value, before[name]) for name, value in fixed_one.state_dict().items())
    joined = FakeQuantize()
    joined.join_statistics([seen, given_scale, fixed_one])
    assert joined.scale.item() == 0.5
    assert joined.activation_post_process.max_val.item() == pytest.approx(2.55)
    nothing = FakeQuantize()
    nothing.join_statistics([FakeQuantize()])
    assert not nothing.has_statistics


def test_messages_name_the_module() -> None:
    fq = FakeQuantize()
    fq.set_owner("encoder.layer3")
    with pytest.warns(UserWarning, match="`encoder.layer3`"):
        fq(torch.zeros(3))


def test_an_input_that_is_quantized_already_is_rounded_anew() -> None:
    q = QTensor(torch.tensor([0.5, -1.0]), 0.5, "qint8")
    out = FakeQuantize()(q)
    assert out.scale.item() == pytest.approx(1 / 127.5)


def test_documented_constructor_arguments_are_accepted() -> None:
    FakeQuantize(observer=FixedScaleObserver, saturate=None, in_place=False, compat_mask=True, channel_len=1, scale=0.1)


@pytest.mark.parametrize("argument", [{"in_place": True}, {"compat_mask": False}])
def test_arguments_that_change_nothing_say_so(argument: dict[str, bool]) -> None:
    with pytest.warns(QuantizationWarning, match=f"FakeQuantize: {next(iter(argument))}=.* has no effect"):
        FakeQuantize(**argument)


def test_a_kept_result_does_not_change_when_training_goes_on() -> None:
    x = torch.randn(2, 4, 6, 6)
    qat = prepared(nn.Sequential(QuantStub(), nn.Conv2d(4, 4, 1)), (x,))
    with torch.no_grad():
        kept = qat(x)
        values = convert_fx(qat)(x).dequantize()
        set_fake_quantize(qat, FakeQuantState.QAT)
        qat(100 * x)
    assert torch.equal(kept.dequantize(), values)


def test_the_switch_buffers_switch() -> None:
    quantizer = FakeQuantize()
    quantizer(torch.tensor([1.0]))
    quantizer.observer_enabled[0] = 0
    scale = quantizer.scale.clone()
    quantizer(torch.tensor([100.0]))
    assert torch.equal(quantizer.scale, scale)
    quantizer.fake_quant_enabled[0] = 0
    assert float(quantizer(torch.tensor([0.333])).dequantize()) == pytest.approx(0.333)


def test_a_frozen_range_keeps_a_scale_that_was_given() -> None:
    quantizer = FakeQuantize(averaging_constant=0)
    quantizer.set_qparams(0.5)
    quantizer(torch.tensor([1.0]))
    assert float(quantizer.scale) == 0.5


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.0, 0.0), (-1e-30, 1e-30), (2.0, -2.0)])
@pytest.mark.parametrize("finest", [0.0, 0.5])
@pytest.mark.parametrize("settings", [{}, {"unclipped": True}, {"pow_quantization": True}], ids=str)
def test_a_scale_that_is_written_at_once_is_that_of_the_observer(low, high, finest, settings) -> None:
    fq = FakeQuantize(**settings)
    fq.finest_scale = finest
    fq.activation_post_process.set_range(torch.tensor([low]), torch.tensor([high]))
    before = fq.scale._version
    fq.refresh_scale()
    assert torch.equal(fq.scale, fq.activation_post_process.calculate_scale().clamp(min=finest))
    assert fq.scale._version > before and fq.scale.shape == (1,)


def test_an_observer_may_have_a_scale_of_its_own() -> None:
    class Own(MinMaxObserver):
        def calculate_scale(self) -> torch.Tensor:
            return self.max_val / 4

    fq = FakeQuantize(observer=Own)
    fq(torch.tensor([-1.0, 2.0]))
    assert fq.scale.tolist() == [0.5]
