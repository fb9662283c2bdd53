"""High percentiles of large tensors: those of all values, by looking at the largest only."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import CalibrationWarning
from horizon_plugin_pytorch.statistics import observer_v2, samples, tail
from horizon_plugin_pytorch.statistics.observer_names import range_methods
from horizon_plugin_pytorch.statistics.observer_v2 import PercentileObserver
from horizon_plugin_pytorch.statistics.sketch import Sketch
from horizon_plugin_pytorch.statistics.tail import Tail

NO_LIMITS = (-math.inf, math.inf)


def values(name: str, size: int = 300_077, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    made = {
        "normal": x,
        "relu": x.relu(),
        "negative": -x.relu(),
        "cubed": x**3,
        "small": x * 1e-30,
        "a grid": (x * 8).round() / 8,
        "one channel": torch.where((torch.arange(size) - size // 2).abs() < 2500, 3 * x, 0.1 * x),
        "outliers": torch.where(torch.arange(size) % 60_000 == 77, 1e4, x),
    }
    return made[name]


def end_of(x: Tensor, percentile: float, limits: tuple[float, float] = NO_LIMITS) -> float:
    observer = PercentileObserver(percentile)
    observer.observe(x, *limits)
    return float(observer.max_val)


@pytest.fixture
def tails(monkeypatch) -> list[Tail | None]:
    """The tails that observers take while a test runs."""
    taken: list[Tail | None] = []

    def taking(*args) -> Tail | None:
        taken.append(tail.tail_of(*args))
        return taken[-1]

    monkeypatch.setattr(observer_v2, "tail_of", taking)
    return taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("limits", [NO_LIMITS, (0.0, 6.0), (0.0, 3.0), (-1.0, 3.3)], ids=str)
@pytest.mark.parametrize("name", ["normal", "relu", "cubed", "a grid", "one channel", "outliers"])
def test_a_high_percentile_is_that_of_all_values(name, limits, dtype, tails, monkeypatch) -> None:
    x = values(name).to(dtype)
    percentiles = (99.9, 99.99, 99.999, 100.0)
    found = [end_of(x, percentile, limits) for percentile in percentiles]
    is_clamped = float((x.abs() >= min(limits[1], float(x.abs().max()))).float().mean()) > 0.001
    assert any(tails) or is_clamped
    monkeypatch.setattr(samples, "_ENOUGH", 1 << 30)
    for percentile, end, taken in zip(percentiles, found, tails, strict=True):
        wanted = end_of(x, percentile, limits)
        assert end == (wanted if taken is not None else pytest.approx(wanted, rel=0.05))


@pytest.mark.parametrize("name", ["negative", "small"])
def test_signs_and_sizes_do_not_matter(name, tails, monkeypatch) -> None:
    found = end_of(values(name), 99.99)
    assert tails[0] is not None
    monkeypatch.setattr(samples, "_ENOUGH", 1 << 30)
    assert end_of(values(name), 99.99) == found


def test_a_low_percentile_is_that_of_a_sample(tails) -> None:
    x = values("normal")
    assert end_of(x, 90.0) == pytest.approx(float(x.abs().quantile(0.9)), rel=0.03)
    assert tails == [None]


@pytest.mark.filterwarnings("ignore:.*whose values are all 0")
def test_the_largest_value_may_be_common(tails) -> None:
    """In too many rows to look at, or in a few."""
    for most in (3.0, 0.2):
        assert end_of(values("normal").clamp(-most, most), 99.99) == pytest.approx(most, rel=1e-3)
    assert tails[1] is None
    assert end_of(torch.zeros(300_000), 99.99) == 0


def test_calls_of_one_batch_count_together(tails) -> None:
    parts = [values("normal", 200_000, 1), 3 * values("relu", 300_000, 2), values("cubed", 1000, 3)]
    for some in (parts, parts[::-1]):
        together = PercentileObserver(99.99)
        together.hold()
        for part in some:
            together.observe(part)
        assert together.release()
        wanted = end_of(torch.cat(some), 99.99)
        assert float(together.max_val) == pytest.approx(wanted, rel=0.02)


def test_one_call_is_the_same_held_or_not(tails) -> None:
    x = values("normal")
    held = PercentileObserver()
    held.hold()
    held.observe(x)
    wanted = end_of(x, 99.99)
    x.zero_()  # the observer has nothing of the tensor's memory
    for observer in (pickle.loads(pickle.dumps(held)), copy.deepcopy(held), held):
        observer.release()
        assert float(observer.max_val) == wanted


@pytest.mark.parametrize("limits", [NO_LIMITS, (0.0, 6.0), (-1.0, 2.5)], ids=str)
@pytest.mark.parametrize("name", ["normal", "relu", "cubed", "one channel", "outliers"])
def test_a_tail_becomes_a_sketch(name, limits) -> None:
    x = values(name)
    low, high = (float(end.clamp(*limits)) for end in torch.aminmax(x))
    taken = tail.tail_of(x, (low, high), limits, samples.rows_of(x), 9, 31)
    if taken is None:
        assert limits[1] < math.inf  # very many are clamped
        return
    found, wanted = Sketch.of_tail(taken), Sketch()
    wanted.update(x, (low, high), limits, enough=1 << 40)
    assert int(found.counts.sum()) == found.total == pytest.approx(wanted.total, rel=1e-3)
    assert found.ends == wanted.ends and found.top == wanted.top
    above = found._bin(taken.least) + 1
    assert torch.equal(found.counts[above:], wanted.counts[above:])
    assert int(found.counts[above:].sum()) or taken.least == found.largest
    for share in (50.0, 90.0, 99.0):
        assert found.percentile(share) == pytest.approx(wanted.percentile(share), rel=0.04, abs=1e-4 * wanted.largest)


def test_a_subclass_that_chooses_for_itself_has_a_sketch() -> None:
    class Half(PercentileObserver):
        def choose(self, sketch: Sketch) -> float:
            assert isinstance(sketch, Sketch)
            return sketch.counted().largest / 2

    observer, x = Half(), values("normal")
    observer.observe(x)
    assert float(observer.max_val) == pytest.approx(float(x.abs().max()) / 2)


def test_whatever_the_memory_looks_like() -> None:
    x = values("normal", 8 * 24 * 40 * 40).view(8, 24, 40, 40)
    wanted = end_of(x, 99.99)
    for y in (x.to(memory_format=torch.channels_last), x.transpose(1, 3), torch.cat([x, x], 1)[:, :24]):
        assert end_of(y, 99.99) == pytest.approx(wanted, rel=0.02)
    assert end_of(x._neg_view(), 99.99) == end_of(x.double(), 99.99) == wanted
    with torch.inference_mode():
        assert end_of(x.clone(), 99.99) == wanted
    found = []
    torch.func.grad(lambda y: (found.append(end_of(y, 99.99)), y.sum())[1])(x)
    assert found == [wanted]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_left_out(value: float) -> None:
    x = values("normal")
    with pytest.warns(CalibrationWarning, match="NaN or infinite"):
        assert end_of(torch.cat([x, torch.tensor([value])]), 99.99) == end_of(x, 99.99)


def test_a_model_on_no_device_is_told_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert samples.each_of(torch.empty(1 << 20, device="meta")) == 1  # rows are looked at on the host alone


@pytest.mark.parametrize("how", ["channels_last", "strided", "flipped"])
def test_how_a_tensor_lies_in_memory_changes_no_percentile(how: str, tails) -> None:
    """Outliers that a sample would count often, or not at all."""
    x = values("normal", 2 * 48 * 60 * 60).reshape(2, 48, 60, 60)
    x.view(-1)[:: x.numel() // 40] *= 10
    if how == "channels_last":
        lying = x.contiguous(memory_format=torch.channels_last)
    elif how == "strided":
        lying = torch.stack([x, x + 99], -1)[..., 0]
    else:
        lying = x.as_strided(x.shape, x.stride()).transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(x, lying) and not lying.is_contiguous()
    assert end_of(lying, 99.99) == end_of(x, 99.99)
    assert len(tails) == 2 and None not in tails


@pytest.mark.parametrize("name", sorted(range_methods() | {"histogram": None}))
@pytest.mark.parametrize("rows", [20, 140, 260])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice in a batch"])
def test_the_smallest_float32_number_as_a_mask_leaves_it(name: str, rows: int, times: int) -> None:
    x = values("normal", 80_000)
    x[: rows * 256 : 256] = torch.finfo(torch.float32).min
    observer = (range_methods() | {"histogram": observer_v2.HistogramObserver})[name]()
    observer.hold()
    for _ in range(times):
        observer(x)
    observer.release()
    assert 0 < float(observer.max_val) <= torch.finfo(torch.float32).max


@pytest.mark.parametrize("name", sorted(range_methods() | {"histogram": None}))
def test_batches_in_inference_mode_and_outside_take_turns(name: str) -> None:
    observer = (range_methods() | {"histogram": observer_v2.HistogramObserver})[name]()
    for _ in range(2):
        with torch.inference_mode():
            observer(values("normal", 1000))
        with torch.no_grad():
            observer(values("normal", 1000, seed=1))
    assert float(observer.max_val) > 1
