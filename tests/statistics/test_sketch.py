"""Sketches against what one would find by looking at every value."""

from __future__ import annotations

import copy
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from horizon_plugin_pytorch.errors import CalibrationWarning
from horizon_plugin_pytorch.statistics import samples
from horizon_plugin_pytorch.statistics.observer_v2 import MSEObserver
from horizon_plugin_pytorch.statistics.row_ranges import best_ranges
from horizon_plugin_pytorch.statistics.samples import each_of, sample_of
from horizon_plugin_pytorch.statistics.sketch import BINS, Sketch

ONE_VALUE = (0.0, -0.0, 1e-42, 1e-37, -0.3)
RANGES = {"int8": (-128, 127), "int16": (-32768, 32767)}


def noise(name: str, size: int = 40000) -> Tensor:
    x = torch.randn(size)
    made = {
        "normal": x,
        "small": x * 1e-20,
        "huge": x * 1e30,
        "relu": x.relu(),
        "negative": -x.relu(),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((size,)),
        "heavy": torch.distributions.StudentT(2.5).sample((size,)),
        "uniform": torch.rand(size),
        "relu6": (x * 5).clamp(0, 6),
        "outlier": torch.cat([x, torch.tensor([100.0])]),
        "two hills": torch.cat([x * 0.01 + 3, x * 0.01]),
        "hardtanh": x.clamp(-1, 1),
        "clamped, one side more": (3 * x).clamp(-1, 0.6),
        "mostly clamped": (3 * x).clamp(-2, 2),
        "tanh": (2 * x).tanh(),
        "sigmoid": (5 * x).sigmoid(),
        "-3 to 3": torch.randint(-3, 4, (size,)).float(),
        "a grid": torch.linspace(-1, 1, 64).repeat(size // 64),
        "pixels": torch.randint(0, 256, (size,)) / 255,
    }
    return made[name]


def squared_error(x: Tensor, scale: float, low: int, high: int) -> float:
    x = x.double()
    return float(((x / scale).round().clamp(low, high) * scale - x).square().sum())


def exhaustive(x: Tensor, low: int, high: int) -> float:
    whole = float(x.abs().max()) * 2 / (high - low)
    return min(squared_error(x, whole * float(share), low, high) for share in torch.linspace(0.002, 1.005, 700))


DISTRIBUTIONS = ["normal", "small", "huge", "relu", "negative", "laplace", "heavy", "uniform", "relu6", "outlier"]


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, "two hills"])
@pytest.mark.parametrize("form", RANGES)
def test_the_best_scale_is_within_half_a_percent_of_exhaustive_search(name: str, form: str) -> None:
    x = noise(name)
    low, high = RANGES[form]
    found = squared_error(x, Sketch.of(x).best_scale(low, high), low, high)
    assert found <= 1.005 * exhaustive(x, low, high)


@pytest.mark.parametrize(
    "name", ["hardtanh", "clamped, one side more", "mostly clamped", "tanh", "sigmoid", "-3 to 3", "a grid", "pixels"]
)
def test_what_is_clamped_or_on_a_grid_is_within_half_a_percent_too(name: str) -> None:
    x = noise(name)
    found = squared_error(x, Sketch.of(x).best_scale(-128, 127), -128, 127)
    assert found <= 1.005 * exhaustive(x, -128, 127)


@pytest.mark.slow
@given(st.lists(st.floats(-1, 0.25, width=16), min_size=2, max_size=20), st.integers(1, 50))
@settings(max_examples=30)
def test_few_values_that_are_mostly_negative_use_the_lowest_integer(values: list[float], times: int) -> None:
    """Of four bits, 8 steps down and 7 up."""
    x = torch.tensor([-1.0] + values * times)
    found = squared_error(x, Sketch.of(x).best_scale(-8, 7), -8, 7)
    assert found <= 1.005 * exhaustive(x, -8, 7) + 1e-6


def test_a_clamped_tensor_keeps_its_scale_when_counts_are_halved() -> None:
    """Counts are 32 bits wide; those at the ends must be halved with the others."""
    sketch = Sketch.of(noise("mostly clamped"))
    scale = sketch.best_scale(-128, 127)
    for _ in range(20):
        sketch.merge(copy.deepcopy(sketch))
    assert sketch.total < 2**31 < 2**20 * 40000
    assert sum(sketch.peaks) <= int(sketch.counts[sketch.counts.nonzero()[-1]])
    assert sketch.best_scale(-128, 127) == pytest.approx(scale, rel=1e-3)


@pytest.mark.parametrize("add", [Sketch.update, lambda sketch, x: sketch.merge(Sketch.of(x))])
def test_there_is_room_for_more_and_what_is_rare_stays(add) -> None:
    x = torch.tensor([0.5, 1.0, 2.0])
    sketch = Sketch.of(x)
    sketch.replace(sketch.counts * (2**30 - 1), sketch.ends, 3 * (2**30 - 1), (0, 2**30 - 1))
    add(sketch, x[:0])
    assert sketch.total == 3 * (2**30 - 1)  # each bin has room yet
    add(sketch, torch.tensor([2.0, 7.0, 7.5]))
    assert sketch.counts[sketch.counts > 0].tolist() == [2**29, 2**29, 2**29, 1, 1]
    assert sketch.total == 3 * 2**29 + 2 and sketch.largest == 7.5


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, "hardtanh", "clamped, one side more", "mostly clamped"])
def test_errors_are_those_of_quantizing(name: str) -> None:
    x = noise(name)
    sketch = Sketch.of(x)
    scales = sketch.largest / 127.5 * torch.tensor([1.0, 0.7, 0.4, 0.1], dtype=torch.float64)
    expected = [squared_error(x, float(s), -128, 127) for s in scales]
    assert sketch.errors(scales, -128, 127).tolist() == pytest.approx(expected, rel=0.01)


@given(st.floats(1, 99.999), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_percentiles_are_within_one_bin_of_two_thousand(percentile: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = noise(DISTRIBUTIONS[seed % len(DISTRIBUTIONS)], 5000)
    magnitudes = x.abs().double().sort().values
    exact = float(magnitudes[max(-(-len(x) * percentile // 100), 1).__int__() - 1])
    assert Sketch.of(x).percentile(percentile) == pytest.approx(exact, abs=float(magnitudes[-1]) / 2048)


@given(st.lists(st.sampled_from(DISTRIBUTIONS), min_size=2, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_merging_is_counting_everything_in_any_order(names: list[str], random) -> None:
    parts = [noise(name, 500) for name in names]
    whole = Sketch.of(torch.cat(parts))
    random.shuffle(parts)
    merged = Sketch()
    for part in parts:
        merged.merge(Sketch.of(part))
    one_by_one = Sketch()
    for part in parts:
        one_by_one.update(part)
    for other in (merged, one_by_one):
        assert torch.equal(other.counts, whole.counts)
        assert (other.ends, other.total, other.peaks) == (whole.ends, whole.total, whole.peaks)


def test_a_sketch_is_64_kibibytes_whatever_it_saw() -> None:
    sketch = Sketch()
    for exponent in range(-40, 40, 4):
        sketch.update(torch.randn(1000) * 2.0**exponent)
    assert sketch.counts.numel() * sketch.counts.element_size() == 64 * 1024
    assert int(sketch.counts.sum()) == sketch.total == 20000
    assert copy.deepcopy(sketch).largest == sketch.largest


def test_values_that_are_not_finite_are_left_out_and_zeros_are_no_trouble() -> None:
    sketch = Sketch.of(torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0, 0.0]))
    assert (sketch.total, sketch.largest) == (2, 2.0)
    empty = Sketch.of(torch.tensor([float("nan")]))
    assert empty.total == 0
    empty.merge(sketch)
    assert empty.total == 2
    zeros = Sketch.of(torch.zeros(5))
    assert zeros.best_scale(-128, 127) == 0 and zeros.percentile(50) == 0
    assert float(zeros.edges()[-1]) > 0 and len(zeros.edges()) == BINS + 1


@pytest.mark.parametrize("value", ONE_VALUE, ids=str)
def test_errors_of_one_value_only(value: float) -> None:
    scales = torch.tensor([1e-3, 0.1, 2.0], dtype=torch.float64)
    found = Sketch.of(torch.full((50,), value)).errors(scales, -128, 127)
    expected = [squared_error(torch.full((50,), value), float(s), -128, 127) for s in scales]
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-60 if abs(value) < 1e-30 else 1e-9)


@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.0, 6.0), (0.5, math.inf), (-1.0, 1.0), (-math.inf, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_limits_count_as_clamping_does(limits: tuple[float, float], dtype: torch.dtype) -> None:
    """The range of a fused activation is not applied to the tensor, only to what is counted of it."""
    x = (torch.randn(5000) * 4).to(dtype)
    clamped = x.clamp(*limits)
    sketch = Sketch()
    sketch.update(x, (float(clamped.min()), float(clamped.max())), limits)
    expected = Sketch.of(clamped)
    assert torch.equal(sketch.counts, expected.counts)
    assert (sketch.ends, sketch.peaks, sketch.total) == (expected.ends, expected.peaks, expected.total)


@pytest.mark.parametrize("limits", [(0.0, 0.7), (0.0, 0.9), (-0.7, 0.7), (-math.inf, 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_limits_that_are_rounded(limits: tuple[float, float], dtype: torch.dtype) -> None:
    """The end that is known was clamped in the tensor's type, in which the limit may be a little less or more."""
    x = (torch.randn(5000) * 4).to(dtype)
    clamped = x.clamp(*limits)
    sketch = Sketch()
    sketch.update(x, (float(clamped.min()), float(clamped.max())), limits)
    expected = Sketch.of(clamped)
    assert (sketch.ends, sketch.total) == (expected.ends, 5000)
    if dtype is torch.float32:
        assert torch.equal(sketch.counts, expected.counts) and sketch.peaks == expected.peaks
    for share in (10.0, 50.0, 90.0, 99.0):
        assert sketch.percentile(share) == pytest.approx(expected.percentile(share), rel=0.005)


def test_the_divergence_is_that_of_the_textbook() -> None:
    """Every end of the range, written out with loops."""
    x = noise("laplace", 3000)
    sketch = Sketch.of(x)
    bins, levels = 64, 16
    counts = sketch.linear(bins)

    def divergence(end: int) -> float:
        p = counts[:end].clone()
        q = torch.zeros(end, dtype=torch.float64)
        for level in range(levels):
            inside = [j for j in range(end) if j * levels // end == level]
            filled = [j for j in inside if counts[j] > 0]
            for j in filled:
                q[j] = sum(counts[i] for i in inside) / len(filled)
        p[end - 1] += counts[end:].sum()
        p, q = p / p.sum(), q / q.sum()
        return float(sum(a * (a / max(b, 1e-9)).log() for a, b in zip(p, q, strict=True) if a > 0))

    best = min(range(levels, bins + 1), key=divergence)
    assert sketch.least_divergence(bins, levels) == pytest.approx(sketch.largest * best / bins)


def test_a_clamped_tensor_has_its_limit_on_the_grid() -> None:
    """ReLU6: the many values that are exactly 6 should cost nothing."""
    scale = Sketch.of(noise("relu6")).best_scale(-128, 127)
    assert 6 / scale == pytest.approx(round(6 / scale), abs=0.02)


def test_channels_are_searched_on_their_own() -> None:
    rows = torch.stack([noise("normal", 500), noise("uniform", 500), torch.zeros(500), noise("laplace", 500) * 50])
    ends = best_ranges(rows, -128, 127, 127.5)
    for row, end in zip(rows, ends, strict=True):
        if not row.any():
            assert end == 0
            continue
        error = squared_error(row, float(end) / 127.5, -128, 127)
        assert error <= 1.005 * exhaustive(row, -128, 127)
        assert error <= squared_error(row, float(row.abs().max()) / 127.5, -128, 127)


@pytest.mark.parametrize("size", [9, 27, 64, 576])
@pytest.mark.parametrize("name", ["normal", "uniform", "laplace", "heavy"])
def test_small_kernels_are_within_half_a_percent_of_exhaustive_search(name: str, size: int) -> None:
    """Of few weights the error goes up and down with every step; on the mean, as single ones may be luckier."""
    rows = noise(name, 32 * size).view(32, size)
    largest = rows.abs().amax(1)
    shares = torch.linspace(0.2, 1.0, 2000)
    scales = (largest.unsqueeze(1) * shares / 127.5).unsqueeze(2)
    best = (
        (((rows.unsqueeze(1) / scales).round().clamp(-128, 127) * scales) - rows.unsqueeze(1)).square().sum(2).amin(1)
    )
    ends = best_ranges(rows, -128, 127, 127.5)
    found = [squared_error(row, float(end) / 127.5, -128, 127) for row, end in zip(rows, ends, strict=True)]
    ratios = torch.tensor(found) / best
    assert float(ratios.mean()) <= 1.005 and float(ratios.max()) <= 1.02


def test_zeros_do_not_move_the_range_of_least_divergence() -> None:
    x = torch.randn(20000).abs()
    with_zeros = Sketch.of(torch.cat([x, torch.zeros(30000)]))
    assert with_zeros.least_divergence(512, 128) == Sketch.of(x).least_divergence(512, 128) > 0.5 * float(x.max())
    assert Sketch.of(torch.zeros(8)).least_divergence(512, 128) == 0


def test_nothing_is_clipped_where_there_is_a_level_for_every_bin() -> None:
    """As in int16: the whole range diverges by nothing."""
    sketch = Sketch.of(noise("laplace"))
    assert sketch.least_divergence(512, 32768) == sketch.least_divergence(512, 512) == sketch.largest
    assert sketch.least_divergence(512, 128) < sketch.least_divergence(512, 400) < sketch.largest


# -- samples of large tensors


@pytest.mark.parametrize("name", ["normal", "relu", "laplace", "relu6", "outlier", "mostly clamped"])
def test_a_sample_of_a_large_tensor_says_what_all_of_it_says(name, monkeypatch) -> None:
    torch.manual_seed(0)
    x = noise(name, 1 << 20)
    sampled = Sketch.of(x)
    monkeypatch.setattr(samples, "_ENOUGH", 1 << 30)
    whole = Sketch.of(x)
    assert int(sampled.counts.sum()) == sampled.total == pytest.approx(whole.total, rel=1e-3)
    assert sampled.ends == whole.ends and sampled.peaks == pytest.approx(whole.peaks, rel=0.01)
    for share in (90.0, 99.0, 99.9):
        assert sampled.percentile(share) == pytest.approx(whole.percentile(share), rel=0.02)
    errors = [squared_error(x, sketch.best_scale(-128, 127), -128, 127) for sketch in (sampled, whole)]
    assert errors[0] < 1.03 * errors[1]


@pytest.mark.parametrize("count", [1, 3, 10, 100])
@pytest.mark.parametrize("times", [20.0, -200.0])
def test_rare_values_of_a_large_tensor_are_counted_as_they_are(count: int, times: float, monkeypatch) -> None:
    """However few, they decide whether `mse` clips them: a sample has none of them, or takes them for many."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1 << 20) + 77, generator=generator)
    places = torch.randperm(x.numel(), generator=generator)[:count]
    places[-1] = x.numel() - 1  # in the rest that fills no row
    x[places] = times * (1 + torch.rand(count, generator=generator))
    sampled = Sketch.of(x)
    monkeypatch.setattr(samples, "_ENOUGH", 1 << 30)
    whole = Sketch.of(x)
    assert sampled.ends == whole.ends and int(sampled.counts.sum()) == sampled.total
    rare = sampled._bin(abs(times) / 2)
    assert torch.equal(sampled.counts[rare:], whole.counts[rare:]) and int(whole.counts[rare:].sum()) == count
    assert sampled.percentile(99.99) == pytest.approx(whole.percentile(99.99), rel=0.05)
    errors = [squared_error(x, sketch.best_scale(-128, 127), -128, 127) for sketch in (sampled, whole)]
    assert errors[0] < 1.01 * errors[1]


@pytest.mark.parametrize("limits", [(0.0, 6.0), (0.0, 5.7), (-5.7, 5.7), (-math.inf, 5.9)])
@pytest.mark.parametrize("beyond", [1, 127, 128, 129, 200, 256, 257, 500])
def test_a_sample_of_which_some_rows_are_clamped(beyond, limits, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(beyond)
    x = torch.randn(150_000, generator=generator).clamp_(-5, 5)
    rows = torch.randperm(150_000 // 256, generator=generator)[:beyond]
    x[rows * 256 + 100] = 9.0
    ends = tuple(float(end.clamp(*limits)) for end in torch.aminmax(x))
    sampled, whole = Sketch(), Sketch()
    sampled.update(x, ends, limits)
    monkeypatch.setattr("horizon_plugin_pytorch.statistics.sketch.each_of", lambda x, enough=None: 1)
    whole.update(x, ends, limits)
    assert int(sampled.counts.sum()) == sampled.total == pytest.approx(whole.total, rel=1e-3)
    assert sampled.ends == whole.ends
    if beyond > 100:
        assert whole.peaks[1] == beyond
        assert sampled.percentile(99.99) == pytest.approx(whole.percentile(99.99), rel=0.01)
        assert sampled.peaks[1] == pytest.approx(beyond, rel=0.4)


@pytest.mark.parametrize("limits", [(-math.inf, math.inf), (0.0, 6.0), (-math.inf, 0.5), (-1.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_largest_values_are_all_counted_whatever_clamps_them(limits, dtype, monkeypatch) -> None:
    x = (torch.randn(5, 83, 777, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    each = each_of(x)
    ends = tuple(float(end.clamp(*limits)) for end in torch.aminmax(x))
    sampled, whole = Sketch(), Sketch()
    sampled.update(x, ends, limits)
    monkeypatch.setattr(samples, "_ENOUGH", 1 << 30)
    whole.update(x, ends, limits)
    assert int(sampled.counts.sum()) == sampled.total == pytest.approx(whole.total, rel=1e-3)
    assert sampled.ends == whole.ends
    for found, peak in zip(sampled.peaks, whole.peaks, strict=True):  # common values, as well as a sample knows them
        assert abs(found - peak) <= 4 * math.sqrt(peak * each)
    if not any(whole.peaks):
        known = int(torch.searchsorted(whole.counts.flip(0).cumsum(0), 100)) + 1  # bins with the hundred largest
        assert torch.equal(sampled.counts[-known:], whole.counts[-known:])


def test_rows_have_the_ends_of_a_tensor() -> None:
    for size in (256, 257, 1000, 100_000):
        x = torch.randn(size)
        assert torch.equal(torch.stack(samples.rows_of(x).ends()), torch.stack(list(torch.aminmax(x))))
        x[-1] = math.nan
        assert torch.stack(samples.rows_of(x).ends()).isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_left_out_of_a_large_tensor_too(value: float) -> None:
    x = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0))
    wanted, found = MSEObserver(), MSEObserver()
    wanted(x)
    y = torch.cat([x[:1000], torch.tensor([value]), x[1000:]])
    with pytest.warns(CalibrationWarning, match="1 values of 524289 that are NaN or infinite"):
        found(y)
    assert torch.equal(found.max_val, wanted.max_val)


@pytest.mark.parametrize("shape", [
    (8, 64, 64, 64), (32, 1024, 96), (4, 96, 112, 112), (3, 1000, 1000), (22, 1024, 48), (64, 512, 7, 7),
    (16, 197, 384), (64, 56, 56, 24),
])  # fmt: skip
def test_a_sample_is_in_step_with_neither_rows_nor_channels(shape) -> None:
    for axis in range(1, len(shape)):
        place, count = [-1 if a == axis else 1 for a in range(len(shape))], shape[axis]
        parts = min(count, 8)
        for kinds in (torch.arange(count) % parts, torch.arange(count) * parts // count):
            x = kinds.float().reshape(place).expand(shape)
            taken = sample_of(x.reshape(-1), each_of(x)).long().bincount(minlength=parts) / kinds.bincount()
            assert taken.min() > 0.8 * taken.max(), axis


def _in_memory(how: str, x: Tensor) -> Tensor:
    """The same numbers, which lie in memory in another way."""
    match how:
        case "part":
            return torch.cat([x, x])[len(x) :]
        case "every second":
            return x.repeat_interleave(2)[::2]
        case "turned sign":
            return torch.complex(x, -x).conj().imag  # whose memory has the other sign
        case _:
            return x.clone()


@pytest.mark.parametrize("limits", [(-math.inf, math.inf), (0.0, 2.0), (-1.0, 2.0)])
@pytest.mark.parametrize("how", ["whole", "part", "every second", "turned sign"])
@pytest.mark.parametrize("size", [5000, 300_007])
def test_how_a_tensor_lies_in_memory_changes_no_count(size, how, limits) -> None:
    for numbers in (torch.randn(size), torch.randn(size).relu()):
        x = _in_memory(how, numbers)
        assert torch.equal(x, numbers)
        each = each_of(x)
        assert torch.equal(torch.from_numpy(samples.sample_array(x, each)).reshape(-1), sample_of(numbers, each))
        ends = tuple(float(end.clamp(*limits)) for end in numbers.aminmax())
        found, wanted = Sketch(), Sketch()
        found.update(x, ends, limits)
        wanted.update(numbers.clamp(*limits), ends)
        assert torch.equal(found.counts, wanted.counts)
        assert (found.total, found.ends) == (wanted.total, wanted.ends)


def test_places_of_samples_lie_in_the_tensor() -> None:
    for size in (98_304, 98_305, 100_000, 163_839, 1_000_003, 33 * 32_768 + 7):
        for enough in (None, samples.MANY):
            x = torch.arange(size)
            each = each_of(x, enough)
            taken = sample_of(x, each)
            assert len(taken) == samples.sample_size(size, each) == len(taken.unique())
            assert taken[0] < size / 50 and taken[-1] > size * 0.98
            assert len(taken) * each == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("limits", [(-math.inf, math.inf), (0.0, 6.0), (-1.0, 2.0), (-math.inf, 0.5)])
def test_other_devices_count_as_the_host_does(limits) -> None:
    for x in (torch.randn(5000) * 5, torch.randn(5000).relu(), torch.randn(300).half()):
        low, high = torch.aminmax(x.float().clamp(*limits))
        ends = float(low), float(high)
        sketch = Sketch()
        sketch.update(x, ends, limits)
        assert torch.equal(sketch._count_on_device(x, limits), sketch.counts)


def test_of_a_sparse_sample_more_of_the_large_values_are_counted(monkeypatch) -> None:
    """Those beyond the largest, of which each stands for eight: a sample has a few of them only."""
    deviations: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(4):
        x = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed))
        wanted = float(x.abs().kthvalue(math.ceil(0.9999 * x.numel())).values)
        for has_more in (True, False):
            with monkeypatch.context() as patch:
                if not has_more:
                    patch.setattr(samples, "_NEXT_ROWS", 0)
                deviations[has_more].append(abs(Sketch.of(x).percentile(99.99) / wanted - 1))
    assert max(deviations[True]) < 0.01 < max(deviations[False])


def test_of_large_values_that_lie_together_few_rows_are_looked_at(monkeypatch) -> None:
    """Those of one channel, and all that are as large: about five hundred, whatever else its rows hold."""
    looked_at: list[int] = []
    find = samples.rows_that_reach

    def finding(magnitudes, least, *args):
        found = find(magnitudes, least, *args)
        looked_at.append(len(found.places))
        return found

    monkeypatch.setattr("horizon_plugin_pytorch.statistics.sketch.rows_that_reach", finding)
    x = torch.randn(32, 24, 1000, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 20
    sampled = Sketch.of(x)
    monkeypatch.setattr(samples, "_ENOUGH", 1 << 30)
    whole = Sketch.of(x)
    known = int(torch.searchsorted(whole.counts.flip(0).cumsum(0), 200)) + 1
    assert torch.equal(sampled.counts[-known:], whole.counts[-known:])
    assert 4 <= looked_at[0] <= 32 * 5  # of 3000
    errors = [squared_error(x, sketch.best_scale(-128, 127), -128, 127) for sketch in (sampled, whole)]
    assert errors[0] < 1.01 * errors[1]
