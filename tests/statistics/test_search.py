"""Searching a histogram for ranges: what is skipped could not have been better."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from horizon_plugin_pytorch.statistics import search
from horizon_plugin_pytorch.statistics.sketch import Sketch
from tests.statistics.test_sketch import DISTRIBUTIONS, noise


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, "hardtanh", "clamped, one side more"])
@pytest.mark.parametrize(("low", "high"), [(-128, 127), (-8, 7)])
def test_what_a_range_clips_is_a_part_of_the_error_of_every_smaller_one(name: str, low: int, high: int) -> None:
    torch.manual_seed(0)
    counted = Sketch.of(noise(name)).counted()
    spread = search._spread(counted, counted.counts, low, high)
    scales = counted.largest / high * np.linspace(1, 0.02, 50)
    errors = spread.errors(scales)
    clipped = np.array([spread.clipped(scale) for scale in scales])
    slack = 1e-9 * errors.max()
    assert (np.diff(clipped) >= -slack).all()
    assert (clipped <= np.minimum.accumulate(errors[::-1])[::-1] + slack).all()


@pytest.mark.parametrize("name", ["normal", "relu6", "heavy", "outlier", "-3 to 3"])
@pytest.mark.parametrize(("low", "high"), [(-128, 127), (-2, 1)])
def test_half_of_the_ranges_are_skipped_only_where_none_of_them_is_better(name, low, high, monkeypatch) -> None:
    torch.manual_seed(0)
    counted = Sketch.of(noise(name)).counted()
    found = search.best_scale(counted, low, high)
    monkeypatch.setattr(search.Spread, "clipped", lambda self, scale: -1.0)  # then nothing is skipped
    assert search.best_scale(counted, low, high) == found


@pytest.mark.parametrize("stride", [1, 2, 7, 34, 50])
def test_any_stride_finds_a_scale(stride: int) -> None:
    torch.manual_seed(0)
    for name in ("normal", "relu6", "outlier"):
        x = noise(name)
        assert 0 < Sketch.of(x).best_scale(-128, 127, stride) <= float(x.abs().max()) / 124


def test_the_largest_numbers_there_are_give_no_warning() -> None:
    for value in (torch.finfo(torch.float32).max, float(torch.tensor(1e-45))):
        counted = Sketch.of(torch.tensor([value, -value, value / 3] * 100)).counted()
        assert np.isfinite(search.best_scale(counted, -128, 127))
        assert 0 <= search.least_divergence(counted, 512, 128) <= value


def test_ranges_are_found_inside_a_transform() -> None:
    """Tensors of `torch.func` lend no memory to numpy."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    found = []

    def run(y: Tensor) -> Tensor:
        sketch = Sketch.of(y)
        found.append((sketch.best_scale(-128, 127), sketch.percentile(99.0), sketch.least_divergence(512, 128)))
        return y.square().sum()

    run(x)
    torch.func.grad(run)(x)
    assert found[0] == found[1]


def test_large_tensors_are_counted_inside_a_transform() -> None:
    """There the rows with large values are looked at, too."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    found = []

    def run(y: Tensor) -> Tensor:
        sketch = Sketch()
        sketch.update(y, (float(y.min()), float(y.max())))
        found.append((sketch.total, sketch.ends, sketch.counted().counts.tolist()))
        return y.square().sum()

    run(x)
    torch.func.grad(run)(x)
    assert found[0] == found[1]


@pytest.mark.parametrize("lowest", [0.31, 0.5, 0.77])
def test_a_parabola_says_where_the_error_is_least(lowest: float) -> None:
    scales = np.linspace(0.0, 1.0, 13)
    assert search._lowest_point(scales, 3 * (scales - lowest) ** 2 + 1) == pytest.approx(lowest)


def test_without_a_parabola_the_best_of_the_scales_is_taken() -> None:
    scales = np.linspace(1.0, 2.0, 5)
    assert search._lowest_point(scales, np.array([0.0, 1, 2, 3, 4])) == 1.0
    assert search._lowest_point(scales, np.array([4.0, 3, 2, 1, 0])) == 2.0
    assert search._lowest_point(scales, np.zeros(5)) == 1.0
    assert search._lowest_point(scales, np.array([2.0, 1, 1, 2, 3])) == pytest.approx(1.375)


@pytest.mark.parametrize(
    ("name", "is_uneven"),
    [("normal", False), ("relu", False), ("laplace", False), ("tanh", True), ("sigmoid", True), ("pixels", True)],
)
def test_errors_go_up_and_down_where_values_lie_on_a_grid_or_near_the_end(name: str, is_uneven: bool) -> None:
    torch.manual_seed(0)
    assert Sketch.of(noise(name)).counted().is_uneven == is_uneven


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_percentiles_are_reached_where_sums_of_counts_do(name: str) -> None:
    torch.manual_seed(0)
    sketch = Sketch.of(noise(name))
    below = sketch.counts.cumsum(0).tolist()
    for share in (1.0, 50.0, 99.0, 99.99):
        place = next(i for i, count in enumerate(below) if count >= share / 100 * sketch.total)
        assert sketch.percentile(share) == min(search._middle(sketch._first, place), sketch.largest)


def test_sums_of_very_many_values_fit() -> None:
    sketch = Sketch.of(torch.tensor([0.5, 1.0, 2.0]))
    sketch.replace(sketch.counts * (2**30 - 1), sketch.ends, 3 * (2**30 - 1), (0, 2**30 - 1))
    assert sketch.percentile(90.0) == 2.0 and sketch.linear(4).tolist() == [0, 2**30 - 1, 2**30 - 1, 2**30 - 1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gelu", "silu", "mish", "hardswish"])
def test_where_a_function_turns_the_least_error_is_found_among_many_that_are_nearly_as_small(
    name: str, seed: int
) -> None:
    normal = torch.randn(100_000, generator=torch.Generator().manual_seed(seed))
    x = getattr(torch.nn.functional, name)(2 * normal if name == "hardswish" else normal)

    def error(scale: float) -> float:
        return float(((x / scale).round().clamp(-128, 127) * scale - x).double().square().sum())

    sketch = Sketch.of(x)
    assert sketch.counted().has_fold and not Sketch.of(normal).counted().has_fold
    tried = torch.linspace(0.3, 1.0, 281) * float(x.abs().max()) / 127
    assert error(sketch.best_scale(-128, 127)) <= 1.03 * min(map(error, tried.tolist()))


@pytest.mark.parametrize("numbers", [8192, 65536])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.3, 0.05])
@pytest.mark.parametrize("values", [(1.738,), (0.719,), (1.2345, -0.31), (0.5, 1.5, -2.0)], ids=str)
def test_scales_on_whose_grid_a_background_lies_are_found(
    values: tuple[float, ...], share: float, numbers: int
) -> None:
    """What is the same everywhere may be 60 steps from 0: a scale that is 1 % larger misses it by half a step."""
    generator = torch.Generator().manual_seed(numbers)
    background = torch.tensor(values)[torch.randint(len(values), (numbers,), generator=generator)]
    x = torch.randn(numbers, generator=generator)
    x = torch.where(torch.rand(numbers, generator=generator) < share, background, x)

    def error(scale: float) -> float:
        return float(((x / scale).round().clamp(-128, 127) * scale - x).double().square().sum())

    tried = torch.linspace(0.4, 1.0, 1201) * float(x.abs().max()) / 127
    assert error(Sketch.of(x).best_scale(-128, 127)) <= 1.08 * min(map(error, tried.tolist()))


@pytest.mark.parametrize("place", [0.9945, 0.97, 0.6])
def test_a_background_near_the_end_of_the_range(place: float) -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(2)).square()
    end = float(x.max())
    x[:7000], x[7000:11_000], x[11_000:16_600], x[-1] = 0, 1.87875, end * place, end

    def error(scale: float) -> float:
        return float(((x / scale).round().clamp(-128, 127) * scale - x).double().square().sum())

    tried = torch.linspace(0.4, 1.0, 1201) * end / 127
    assert error(Sketch.of(x).best_scale(-128, 127)) <= 1.08 * min(map(error, tried.tolist()))


def test_where_bins_are_wider_than_steps_no_value_has_a_place_on_the_grid() -> None:
    """With int16 each of many backgrounds would bring thousands of ranges to look at."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).relu()
    x[:9000], x[9000:40_000] = 0.37, 0.5069

    def error(scale: float) -> float:
        return float(((x.double() / scale).round().clamp(-32768, 32767) * scale - x.double()).square().sum())

    assert error(Sketch.of(x).best_scale(-32768, 32767)) <= 1.05 * error(float(x.max()) / 32767)
    assert not len(search._spikes(Sketch.of(x).counted(), 32767)) and len(search._spikes(Sketch.of(x).counted(), 127))
