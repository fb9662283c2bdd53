"""Observers: the documented formula, the moving average, and data that calibration should not contain."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.errors import CalibrationWarning, QuantizationConfigError
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import observer, observer_v2
from horizon_plugin_pytorch.statistics.ends import extremes
from horizon_plugin_pytorch.statistics.observer_v2 import (
    FixedScaleObserver,
    HistogramObserver,
    KLObserver,
    MinMaxObserver,
    MSEObserver,
    ObserverBase,
    PercentileObserver,
)

PER_TENSOR = [MinMaxObserver, observer.MovingAverageMinMaxObserver]
PER_CHANNEL = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}


def scale_of(ob: ObserverBase) -> Tensor:
    scale, zero_point = ob.calculate_qparams()
    assert zero_point.dtype == torch.long
    assert not zero_point.any()
    assert scale.isfinite().all()
    assert (scale > 0).all()
    return scale


@pytest.mark.parametrize("cls", PER_TENSOR)
@pytest.mark.parametrize(
    ("dtype", "largest", "scale"),
    [  # printed in the guides' tables, api-facts.md 6.3
        (qint8, 0.9995295, 0.0078394),
        (qint8, 2.9943717, 0.0234853),
        (qint8, 0.9999191, 0.0078425),
        (qint16, 0.4471186, 0.0000136),
        (qint16, 5.9043884, 0.0001802),
    ],
)
def test_published_scales_come_out_of_published_ranges(cls, dtype: QuantDType, largest: float, scale: float) -> None:
    ob = cls(dtype=dtype)
    ob(torch.tensor([-largest / 2, largest, 0.0]))
    assert f"{scale_of(ob).item():.7f}" == f"{scale:.7f}"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2), st.sampled_from([(qint8, 127.5), (qint16, 32767.5)]))
def test_scale_is_the_largest_magnitude_over_half_the_steps(
    values: list[float], kind: tuple[QuantDType, float]
) -> None:
    ob = MinMaxObserver(dtype=kind[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        ob(torch.tensor(values))
    largest = max(abs(v) for v in values)
    assert ob.min_val.item() == min(values)
    assert ob.max_val.item() == max(values)
    assert scale_of(ob).item() == pytest.approx(max((largest or 1.0) / kind[1], 2.0**-60), rel=1e-6)


@pytest.mark.parametrize(("quant_min", "quant_max", "half"), [(-127, 127, 127), (0, 127, 63.5), (-8, 7, 7.5)])
def test_a_narrower_range_of_integers_gives_fewer_steps(quant_min: int, quant_max: int, half: float) -> None:
    ob = MinMaxObserver(quant_min=quant_min, quant_max=quant_max)
    ob(torch.tensor([-1.0, 2.0]))
    assert scale_of(ob).item() == pytest.approx(2 / half)


@pytest.mark.parametrize("cls", PER_TENSOR)
@pytest.mark.parametrize("constant", [0.01, 0.3, 1.0])
def test_the_first_value_initialises_and_later_ones_are_averaged(cls, constant: float) -> None:
    ob = cls(averaging_constant=constant)
    assert not ob.has_statistics
    batches = [(-1.0, 2.0), (-3.0, 1.0), (0.0, 10.0)]
    low, high = batches[0]
    for a, b in batches:
        ob(torch.tensor([a, b]))
        if (a, b) != batches[0]:
            low, high = low + constant * (a - low), high + constant * (b - high)
        assert ob.has_statistics
        assert ob.min_val.item() == pytest.approx(low, rel=1e-6)
        assert ob.max_val.item() == pytest.approx(high, rel=1e-6)


def test_an_averaging_constant_of_zero_freezes_the_first_range() -> None:
    ob = MinMaxObserver(averaging_constant=0)
    ob(torch.tensor([-1.0, 2.0]))
    ob(torch.tensor([-100.0, 200.0]))
    assert (ob.min_val.item(), ob.max_val.item()) == (-1.0, 2.0)


@pytest.mark.parametrize("shape", [(3, 4), (3,), (2, 3, 4), (2, 3, 4, 5), (2, 5, 3)])
@pytest.mark.parametrize("cls", [MinMaxObserver, observer.MovingAveragePerChannelMinMaxObserver])
def test_each_channel_has_its_own_range(cls, shape: tuple[int, ...]) -> None:
    axis = shape.index(3)
    ob = cls(qscheme=torch.per_channel_symmetric, ch_axis=axis, averaging_constant=0.5)
    x, y = torch.randn(shape), torch.randn(shape)
    ob(x)
    ob(y)
    for c in range(3):
        a, b = x.select(axis, c), y.select(axis, c)
        torch.testing.assert_close(ob.min_val[c], (a.min() + b.min()) / 2)
        torch.testing.assert_close(ob.max_val[c], (a.max() + b.max()) / 2)
    assert scale_of(ob).shape == (3,)


@torch.no_grad()
def test_a_constant_counts_in_every_batch_whose_calls_count_together() -> None:
    ob, constant = MinMaxObserver(averaging_constant=0.5), nn.Parameter(torch.tensor([-1.0, 1.0]))
    ob.counts_together = True
    ob(constant)
    for _ in range(3):
        ob.begin_batch()
        ob(constant), ob(constant / 2)
        assert ob.max_val.item() == 1.0


@torch.no_grad()
def test_a_constant_counts_in_every_batch_that_is_held() -> None:
    ob, constant = MinMaxObserver(), nn.Parameter(torch.tensor([-1.0, 1.0]))
    ob.begin_calibration()
    for batch in ([constant], [constant], [constant, constant / 2], [constant / 2, constant]):
        ob.hold()
        for x in batch:
            ob(x)
        ob.release()
    assert ob.max_val.item() == 1.0 and ob.batches == 4


def test_observing_gives_back_the_tensor_and_leaves_its_graph_alone() -> None:
    x = torch.randn(4, requires_grad=True)
    ob = MinMaxObserver()
    assert ob(x) is x
    assert not ob.min_val.requires_grad
    q = QTensor(torch.tensor([1.0, -0.5]), 0.5, "qint8")
    ob(q)
    assert type(ob.min_val) is Tensor


def test_a_fused_activation_limits_what_is_seen() -> None:
    ob = MinMaxObserver()
    ob.observe(torch.tensor([-5.0, 9.0]), 0.0, 6.0)
    assert (ob.min_val.item(), ob.max_val.item()) == (0.0, 6.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int32])
def test_other_input_types_are_observed(dtype: torch.dtype) -> None:
    ob = MinMaxObserver()
    ob(torch.tensor([0, 64, 255]).to(dtype))
    assert ob.max_val.dtype == torch.float32
    assert ob.max_val.item() in (255.0, 256.0)


NAN, INF = math.nan, math.inf
UNUSABLE = {
    "nan": ([1.0, NAN, -2.0], -2.0, 1.0, "1 values of 3"),
    "inf": ([1.0, INF, -2.0], -2.0, 1.0, "1 values of 3"),
    "both infinities": ([-INF, INF, 3.0, 4.0], 3.0, 4.0, "2 values of 4"),
    "minus inf": ([-INF, 0.5, 0.25], 0.25, 0.5, "1 values of 3"),
}


@pytest.mark.parametrize("cls", [*PER_TENSOR, PercentileObserver])
@pytest.mark.parametrize("name", UNUSABLE)
def test_values_that_are_not_finite_are_ignored_with_a_warning_that_names_the_module(cls, name: str) -> None:
    values, low, high, counted = UNUSABLE[name]
    ob = cls()
    ob.owner = "backbone.conv1"
    with pytest.warns(CalibrationWarning, match="`backbone.conv1`.*" + counted):
        ob(torch.tensor(values))
    expected = (low, high)
    if cls is PercentileObserver:  # symmetric, to the lower edge of the last bin
        expected = (-max(-low, high) * 2047 / 2048, max(-low, high) * 2047 / 2048)
    assert (ob.min_val.item(), ob.max_val.item()) == pytest.approx(expected)
    scale_of(ob)


@pytest.mark.parametrize("cls", [*PER_TENSOR, PercentileObserver])
@pytest.mark.parametrize("values", [[NAN, NAN], [INF, -INF], [INF, INF], [NAN]])
def test_a_tensor_without_any_finite_value_changes_nothing(cls, values: list[float]) -> None:
    ob = cls()
    with pytest.warns(CalibrationWarning, match="NaN or infinite.*masked_fill"):
        ob(torch.tensor(values))
    assert not ob.has_statistics
    assert scale_of(ob).item() == 1.0
    ob(torch.tensor([-1.0, 2.55]))
    # A percentile ends at the lower edge of its bin.
    assert scale_of(ob).item() == pytest.approx(0.02 * 2047 / 2048 if cls is PercentileObserver else 0.02)


def test_a_channel_of_nan_does_not_spoil_the_others() -> None:
    ob = MinMaxObserver(**PER_CHANNEL)
    with pytest.warns(CalibrationWarning, match="2 values of 6"):
        ob(torch.tensor([[1.0, -3.0], [NAN, NAN], [0.5, 0.25]]))
    assert scale_of(ob).tolist() == pytest.approx([3 / 127.5, 1 / 127.5, 0.5 / 127.5])


def test_empty_tensors_are_ignored_with_a_warning_that_names_the_module() -> None:
    ob = MinMaxObserver()
    ob.owner = "head"
    with pytest.warns(CalibrationWarning, match="`head` saw an empty tensor"):
        ob(torch.empty(0, 3))
    assert not ob.has_statistics
    assert scale_of(ob).item() == 1.0


@pytest.mark.parametrize(("value", "scale"), [(0.0, 1 / 127.5), (-0.0, 1 / 127.5), (5.0, 5 / 127.5), (-5.0, 5 / 127.5)])
def test_constant_tensors_give_a_usable_scale_and_a_warning_that_names_the_module(value: float, scale: float) -> None:
    ob = MinMaxObserver()
    ob.owner = "neck.add"
    with pytest.warns(
        CalibrationWarning, match=f"`neck.add` saw a tensor whose values are all {value + 0.0:g};"
    ) as seen:
        ob(torch.full((3, 3), value))
    assert seen[0].filename == __file__  # the user's line, not one of the package
    assert scale_of(ob).item() == pytest.approx(scale)


def test_each_kind_of_warning_is_given_once() -> None:
    ob = MinMaxObserver()
    with pytest.warns(CalibrationWarning) as seen:
        for _ in range(3):
            ob(torch.zeros(2))
            ob(torch.empty(0))
            ob(torch.tensor([NAN, 1.0, 2.0]))
    assert len(seen) == 3


@pytest.mark.parametrize("value", [1e-45, 1e-40, 1e-30, 1e-3, 1e30, 3.4e38])
@pytest.mark.parametrize(
    "make",
    [MinMaxObserver, lambda: MinMaxObserver(**PER_CHANNEL), lambda: MinMaxObserver(dtype=qint16), PercentileObserver],
)
def test_tiny_and_huge_values_give_finite_positive_scales_without_false_alarm(value: float, make) -> None:
    ob = make()
    x = torch.tensor([[value, value / 2], [value, value]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ob(x)
    top = x.max() * (2047 / 2048 if isinstance(ob, PercentileObserver) else 1)  # the lower edge of its bin
    torch.testing.assert_close(ob.max_val.max(), top)
    scale = scale_of(ob).max().item()
    assert scale == pytest.approx(max(top.item() / ob.half_range, 2.0**-60), rel=1e-5)


def test_a_different_number_of_channels_is_an_error_that_says_so() -> None:
    ob = MinMaxObserver(**PER_CHANNEL)
    ob(torch.randn(4, 2))
    with pytest.raises(
        QuantizationConfigError, match=r"has seen 4 channels on axis 0, now there are 5.*per_tensor_symmetric"
    ):
        ob(torch.randn(5, 2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MinMaxObserver(averaging_constant=1.5), r"averaging_constant must lie in \[0, 1\], got 1.5"),
        (lambda: MinMaxObserver(averaging_constant=-0.1), "averaging_constant"),
        (lambda: MinMaxObserver(qscheme=torch.per_tensor_affine), "per_tensor_symmetric.*got torch.per_tensor_affine"),
        (
            lambda: observer.MovingAverageMinMaxObserver(qscheme=torch.per_channel_symmetric),
            "supports torch.per_tensor_symmetric",
        ),
        (
            lambda: observer.MovingAveragePerChannelMinMaxObserver(qscheme=torch.per_tensor_symmetric),
            "per_channel_symmetric",
        ),
        (lambda: MinMaxObserver(qscheme=torch.per_channel_symmetric), "needs ch_axis >= 0"),
        (lambda: MinMaxObserver(quant_min=5, quant_max=5), "do not fit"),
        (lambda: MinMaxObserver(quant_min=-128, quant_max=-1), "quant_max positive; got quant_min=-128, quant_max=-1"),
        (lambda: MinMaxObserver(quant_min=-1, quant_max=0), "quant_max positive"),
        (lambda: MinMaxObserver(quant_min=3), "represents 0"),
        (lambda: MinMaxObserver(quant_max=128), r"quant_max=128 do not fit qint8.*\[-128, 127\]"),
        (lambda: MinMaxObserver(quant_min=-129), "do not fit qint8"),
        (lambda: MinMaxObserver(dtype="qint7"), "unknown quantized dtype 'qint7'"),
        (
            lambda: MinMaxObserver(qscheme=torch.per_channel_symmetric, ch_axis=3)(torch.ones(2, 2)),
            r"ch_axis=3.*\(2, 2\)",
        ),
        (lambda: PercentileObserver(percentile=0), "percentile"),
        (lambda: PercentileObserver(percentile=101), "percentile"),
        (lambda: PercentileObserver(bins=1), "bins"),
        (lambda: MSEObserver(stride=0), "stride"),
        (lambda: KLObserver(bins=2), "bins"),
        (lambda: HistogramObserver(method="best"), "one of min_max, percentile"),
        (lambda: HistogramObserver(method="mse", method_kwargs={"bins": 3}), "no parameter 'bins'"),
        (lambda: HistogramObserver(method="percentile", method_kwargs={"percentile": 99.9}), "share between 0 and 1"),
        (lambda: FixedScaleObserver(scale=0.0), "positive and finite, got 0.0"),
        (lambda: FixedScaleObserver(scale=-1.0), "positive"),
        (lambda: FixedScaleObserver(scale=NAN), "positive and finite"),
        (lambda: FixedScaleObserver(scale=INF), "positive and finite"),
        (lambda: FixedScaleObserver(scale=torch.tensor([0.1, 0.0]), **PER_CHANNEL), "positive"),
        (
            lambda: FixedScaleObserver(scale=torch.tensor([0.1, 0.2])),
            "2 scales need qscheme=torch.per_channel_symmetric",
        ),
        (lambda: FixedScaleObserver(scale=0.1, zero_point=3), "zero_point must be 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make, text: str) -> None:
    with pytest.raises(QuantizationConfigError, match=text):
        make()


def test_fixed_scales_are_used_as_given_and_never_change() -> None:
    ob = FixedScaleObserver(scale=1 / 128)
    ob(torch.tensor([100.0, -5.0]))
    assert scale_of(ob).item() == 1 / 128
    assert ob.has_statistics
    assert observer.FixedScaleObserver is FixedScaleObserver
    per_channel = FixedScaleObserver(scale=torch.tensor([0.1, 0.2]), **PER_CHANNEL)
    assert scale_of(per_channel).tolist() == pytest.approx([0.1, 0.2])
    assert "0.0078" in repr(ob)


def test_percentile_leaves_out_the_rare_outlier() -> None:
    x = torch.linspace(-1, 1, 100001)
    x[0] = 1000.0
    ob = PercentileObserver(percentile=99.99, bins=200000)
    ob(x)
    assert scale_of(ob).item() == pytest.approx(1 / 127.5, rel=0.02)
    all_of_it = PercentileObserver(percentile=100)
    all_of_it(x)
    assert scale_of(all_of_it).item() == pytest.approx(1000 / 127.5)


@settings(max_examples=40, deadline=None)
@given(
    # A scale is at least 2**-60: in which bin a subnormal number falls makes no difference.
    st.lists(st.floats(-1e3, 1e3, width=32, allow_subnormal=False), min_size=2, max_size=50),
    st.floats(50, 100),
    st.integers(2, 4096),
)
def test_percentile_covers_at_least_its_share_and_no_more_than_the_range(values, percentile: float, bins: int) -> None:
    x = torch.tensor(values)
    ob = PercentileObserver(percentile=percentile, bins=bins)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        ob(x)
    cut = max(abs(ob.min_val.item()), abs(ob.max_val.item()))
    top = float(x.abs().max())
    assert cut <= top
    # Rounding in the histogram may put a value one bin away.
    covered = float((x.abs() <= cut + 2 * top / bins).float().mean())
    assert covered >= percentile / 100 - 1e-6


@pytest.mark.parametrize("make", [MinMaxObserver, lambda: MinMaxObserver(**PER_CHANNEL), PercentileObserver])
def test_copies_and_checkpoints_keep_the_range(make) -> None:
    ob = make()
    ob(torch.tensor([[1.0, -2.0], [0.5, 4.0]]))
    fresh = make()
    fresh.load_state_dict(ob.state_dict())
    for other in (copy.deepcopy(ob), pickle.loads(pickle.dumps(ob)), fresh):
        assert torch.equal(other.min_val, ob.min_val)
        assert torch.equal(scale_of(other), scale_of(ob))
        other(torch.tensor([[100.0, -2.0], [0.5, 400.0]]))
        assert not torch.equal(other.max_val, ob.max_val)


def test_repr_shows_the_range_as_the_guide_prints_it() -> None:
    ob = observer.MovingAverageMinMaxObserver()
    ob(torch.tensor([-0.9995, 0.9995]))
    assert repr(ob) == "MovingAverageMinMaxObserver(min_val=tensor([-0.9995]), max_val=tensor([0.9995]))"


def test_with_args_gives_a_constructor() -> None:
    partial = MinMaxObserver.with_args(dtype=qint16).with_args(averaging_constant=0.5)
    made = partial(ch_axis=-1)
    assert (type(made), made.dtype, made.averaging_constant) == (MinMaxObserver, qint16, 0.5)
    assert partial() is not partial()
    assert repr(partial) == "MinMaxObserver.with_args(dtype='qint16', averaging_constant=0.5)"


def test_documented_parameters_are_accepted() -> None:
    common = dict(
        averaging_constant=0.01,
        dtype="qint8",
        quant_min=None,
        quant_max=None,
        is_sync_quantize=False,
        factory_kwargs=None,
    )
    MinMaxObserver(ch_axis=-1, qscheme=torch.per_tensor_symmetric, **common)
    PercentileObserver(percentile=99.99, bins=2048, ch_axis=-1, qscheme=torch.per_tensor_symmetric, **common)
    observer.MovingAverageMinMaxObserver(**{**common, "dtype": torch.qint8}, qscheme=torch.per_tensor_symmetric)
    observer.MovingAveragePerChannelMinMaxObserver(ch_axis=1, qscheme=torch.per_channel_symmetric, **common)
    FixedScaleObserver(scale=0.1, zero_point=0, dtype=qint8, qscheme=torch.per_tensor_symmetric, ch_axis=-1)
    made = observer_v2.MinMaxObserver(factory_kwargs={"device": "cpu", "dtype": torch.float64})
    assert made.min_val.dtype == torch.float64


def test_the_percentile_of_uniform_data_is_the_one_that_the_guide_prints() -> None:
    """development-guide.md, printed QAT model: five batches of torch.rand give min_val=-0.9995, max_val=0.9995."""
    torch.manual_seed(0)
    ob = PercentileObserver()
    for _ in range(5):
        ob(torch.rand(1, 3, 224, 224))
    assert f"{ob.min_val.item():.4f} {ob.max_val.item():.4f}" == "-0.9995 0.9995"


def test_the_percentile_of_a_fused_relu_is_that_of_its_output() -> None:
    x = torch.cat([torch.linspace(-100, 0, 9000), torch.linspace(0, 1, 1000)])
    fused, plain = PercentileObserver(99.0), PercentileObserver(99.0)
    fused.observe(x, 0.0)
    plain.observe(x.relu())
    assert fused.max_val == plain.max_val and float(fused.max_val) < 1


def test_an_observer_of_ones_own_may_compute_in_another_format() -> None:
    class Quantiles(MinMaxObserver):
        def _look_at(self, usable):
            values = usable.values.double()
            return values.quantile(0.01).reshape(1), values.quantile(0.99).reshape(1)

    ob = Quantiles(averaging_constant=0.5)
    for largest in (1.0, 3.0):
        ob(torch.linspace(-largest, largest, 101))
    assert ob.max_val.dtype is torch.float32
    assert ob.max_val.item() == pytest.approx(1.96)


def test_a_range_that_is_no_range_is_no_batch() -> None:
    class Wrong(MinMaxObserver):
        def _look_at(self, usable):
            return usable.smallest * torch.nan, usable.largest

    ob = Wrong()
    ob(torch.tensor([-1.0, 1.0]))
    assert not ob.has_statistics


@pytest.mark.parametrize("ends", [(-1.0, float("nan")), (float("nan"), 1.0)])
def test_the_scale_of_a_range_with_nan_is_1(ends: tuple[float, float]) -> None:
    ob = MinMaxObserver()
    ob.set_range(*(torch.tensor([end]) for end in ends))
    assert ob.calculate_scale().item() == 1


def test_a_scale_beyond_float32_is_infinite() -> None:
    ob = MinMaxObserver(quant_min=0, quant_max=1)
    ob(torch.tensor([-1.0, 3e38]))
    assert ob.calculate_scale().item() == torch.inf


LIMITS = [(-math.inf, math.inf), (0.0, 6.0), (0.0, math.inf)]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("kind", [observer.MovingAverageMinMaxObserver, observer.MovingAveragePerChannelMinMaxObserver])
def test_a_training_step_takes_in_a_tensor_as_any_other_call_does(kind, limits, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 3, 5, generator=generator) * scale for scale in (1.0, 3.0, 0.2, 7.0)]
    batches += [torch.full((4, 3, 5), -1.0), torch.full((4, 3, 5), 2.0), batches[0] + 50, batches[0] - 50]
    batches += [batches[1].double(), batches[1].half(), torch.zeros(4, 0)]
    for value in (math.nan, math.inf):
        batches.append(batches[0].clone())
        batches[-1][1, 1, 1] = value
    here, there = (kind(channel_len=4) for _ in range(2))
    for x in batches:
        if here.is_per_channel and not x.numel():
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            here.observe(x.clone().requires_grad_(), *limits)
            with torch.no_grad():
                there.observe(x, *limits)
        assert torch.equal(here.min_val, there.min_val) and torch.equal(here.max_val, there.max_val)
        assert torch.equal(here.calculate_scale(), there.calculate_scale())
        assert here.extreme == there.extreme and here._warned == there._warned
    monkeypatch.setattr(ObserverBase, "_usable", None)  # the short way asks for nothing else
    here.observe(batches[0].requires_grad_(), *limits)


@pytest.mark.parametrize("size", [40, 200], ids=["few", "many"])
@pytest.mark.parametrize(
    "laid",
    [
        lambda x: x,
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x[..., ::2],
        Tensor.double,
    ],
    ids=["dense", "channels last", "with gaps", "float64"],
)
def test_ends_are_those_of_all_values_however_they_lie_in_memory(size: int, laid: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(size)
    x = laid(torch.randn(2, 3, size, size))
    assert [end.item() for end in extremes(x)] == [end.item() for end in torch.aminmax(x)]
    x[1, 2, -1, -1] = math.nan
    assert all(end.isnan() for end in extremes(x))
