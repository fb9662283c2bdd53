"""What every observer promises, whatever range it chooses: a new one is found by itself and must keep it too."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from horizon_plugin_pytorch.dtype import as_dtype
from horizon_plugin_pytorch.errors import CalibrationWarning
from horizon_plugin_pytorch.quantization import observer_v2
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase
from tests.strategies import seeds

ABSTRACT = {
    observer_v2.SketchObserver,  # does not say what it chooses
    observer_v2.CountingObserver,  # nor does this
}
ARGUMENTS: dict[type, dict[str, Any]] = {observer_v2.FixedScaleObserver: {"scale": 0.5}}  # it has no default
SCHEMES = {torch.per_tensor_symmetric: {}, torch.per_channel_symmetric: {"ch_axis": 0}}


def _subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


# Other tests have subclasses of their own.
CLASSES: list[Any] = [c for c in _subclasses(ObserverBase) if c.__module__.startswith("horizon_plugin_pytorch.")]
Make = Callable[..., Any]


def _maker(cls: type, scheme: torch.qscheme, dtype: str) -> Make:
    def make(**kwargs: Any) -> Any:
        return cls(**{"qscheme": scheme, "dtype": dtype, **SCHEMES[scheme], **ARGUMENTS.get(cls, {}), **kwargs})

    return make


MAKERS = [
    pytest.param(_maker(cls, scheme, dtype), id=f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}-{scheme}-{dtype}")
    for cls in CLASSES
    if cls not in ABSTRACT
    for scheme in cls._schemes
    for dtype in ("qint8", "qint16")
]
every_observer = pytest.mark.parametrize("make", MAKERS)


def data(seed: int, rows: int = 3, columns: int = 400) -> Tensor:
    """Rows of different sizes, within [-0.5, 0.5]: `ClipObserver` does not look beyond 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator).clamp_(-4, 4) / 8
    return x * torch.rand(rows, 1, generator=generator).clamp_(min=0.1)


def scale_after(ob: Any, *batches: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # of constant and empty tensors
        for batch in batches:
            ob(batch)
    scale, zero_point = ob.calculate_qparams()
    assert scale.shape == zero_point.shape and not zero_point.any()
    assert bool((scale.isfinite() & (scale > 0)).all())
    return scale.clone()


def test_the_observers_are_found() -> None:
    assert len(CLASSES) > len(ABSTRACT) + 10
    assert all(SCHEMES.keys() >= set(cls._schemes) for cls in CLASSES)


@every_observer
def test_data_give_a_scale_of_their_size(make: Make) -> None:
    ob, x = make(), data(0)
    scale = scale_after(ob, x, x)
    largest = x.abs().amax(1) if ob.is_per_channel else x.abs().max()
    if ob.learns:
        assert scale.shape == (3 if ob.is_per_channel else 1,)
        assert ((scale * ob.half_range <= largest * 1.03) & (scale * ob.half_range > 0.5 * largest)).all()
    else:
        assert torch.equal(scale, make().calculate_scale())


@every_observer
def test_zeros_one_value_and_nothing_are_data_too(make: Make) -> None:
    fresh = make()
    assert torch.equal(scale_after(make(), torch.zeros(3, 0)), fresh.calculate_scale())
    x = data(1)
    assert torch.equal(scale_after(make(), x, x[:, :0]), scale_after(make(), x))
    zeros = scale_after(make(), torch.zeros(3, 5))
    unknown = 1 / fresh.half_range if fresh.learns else float(fresh.calculate_scale())  # as a range from -1 to 1
    assert zeros.tolist() == pytest.approx([unknown] * len(zeros)) and len(zeros) in (1, 3)
    for value in (torch.tensor([0.3]), torch.tensor([-0.3]), *([] if fresh.is_per_channel else [torch.tensor(0.3)])):
        scale = scale_after(make(), value)
        rounded = (value / scale).round().clamp(fresh.quant_min, fresh.quant_max) * scale
        if fresh.learns:  # to a step and a bin of a histogram
            assert rounded.item() == pytest.approx(value.item(), abs=scale.item() + 0.3 / 2048)


@every_observer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_infinity_and_nan_in_any_format_count_as_nothing(make: Make, dtype: torch.dtype) -> None:
    x = data(3).to(dtype)
    spoilt = x.clone()
    spoilt[:, :2] = torch.tensor([torch.inf, torch.nan])
    torch.testing.assert_close(scale_after(make(), x, spoilt), scale_after(make(), x, x[:, 2:]), rtol=0.02, atol=0)


@every_observer
def test_the_scale_is_frozen_by_a_constant_of_zero(make: Make) -> None:
    x = data(2)
    ob = make(averaging_constant=0.0)
    first = scale_after(ob, x)
    assert torch.equal(first, scale_after(make(), x))
    assert torch.equal(scale_after(ob, 3 * x), first)
    ob.begin_calibration()
    assert torch.equal(scale_after(ob, 3 * x, 9 * x), first)


@every_observer
def test_a_new_calibration_forgets_the_one_before(make: Make) -> None:
    x, y = data(3), data(4)
    used, fresh = make(), make()
    for batches, observers in (((9 * y, y, x), [used]), ((x, y), [used, fresh])):
        for ob in observers:
            ob.begin_calibration()
            scale_after(ob, *batches)
            ob.finish()
    assert torch.equal(scale_after(used), scale_after(fresh))


@every_observer
def test_calls_that_are_held_are_one_batch(make: Make) -> None:
    scales = []
    for counts_together in (False, True):  # told when a batch begins, or not
        ob = make()
        ob.counts_together = counts_together
        ob.begin_calibration()
        for factor in (1, 3, 2):
            ob.hold()
            scale_after(ob, factor * data(1), 0.5 * factor * data(1))
            ob.release()
        scales.append(scale_after(ob))
    assert torch.equal(*scales)


@every_observer
def test_a_checkpoint_and_a_state_keep_the_scale(make: Make) -> None:
    source = make()
    source.begin_calibration()
    scale = scale_after(source, data(5), data(6))
    loaded, restored = make(), make()
    loaded.load_state_dict(source.state_dict())
    restored.restore(source.statistics())
    assert torch.equal(scale_after(loaded), scale) and torch.equal(scale_after(restored), scale)
    gone_on = scale_after(restored, data(7))
    assert torch.equal(scale_after(source), scale)  # the two have nothing in common
    source.load_state_dict({}, strict=False)  # that of another part of a model changes nothing
    assert torch.equal(scale_after(source, data(7)), gone_on)


@every_observer
@given(seeds, st.sampled_from([1, 2, 7, 400]))
@settings(max_examples=10)
def test_the_scale_follows_the_size_of_the_data_and_not_their_sign(make: Make, seed: int, columns: int) -> None:
    x = data(seed, columns=columns)
    plain = make()
    scale = scale_after(plain, x)
    if plain.learns:
        torch.testing.assert_close(scale_after(make(), 2 * x), 2 * scale, rtol=1e-6, atol=0)
    ends = {"quant_min": -plain.quant_max}  # as many integers below 0 as above
    torch.testing.assert_close(scale_after(make(**ends), -x), scale_after(make(**ends), x), rtol=1e-6, atol=0)


def _with_parameter(name: str) -> list[Any]:
    return [cls for cls in CLASSES if name in inspect.signature(cls).parameters]


@pytest.mark.parametrize("cls", _with_parameter("update_interval"))
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_the_range_is_computed_at_the_interval(cls: Any, interval: int) -> None:
    ob = cls(update_interval=interval)
    scale_after(ob, data(0))
    ob.begin_calibration()  # what was before does not count, nor does its waiting
    for step in range(1, 7):
        before = ob.max_val.clone()
        scale_after(ob, step * data(step))
        assert torch.equal(ob.max_val, before) == bool(step % interval)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("cls", [*_with_parameter("stride"), observer_v2.HistogramObserver])
def test_a_stride_leaves_candidates_out(cls: Any, scheme: torch.qscheme) -> None:
    """Of every fiftieth share there are two, with a coarse neighbourhood: the best scale is not among them."""
    x = torch.distributions.Laplace(0.0, 1.0).sample((1, 20000))
    half = as_dtype("qint8").max + 0.5
    errors = []
    for stride in (1, 50):
        given_as = {"stride": stride} if cls in _with_parameter("stride") else {"method_kwargs": {"stride": stride}}
        scale = scale_after(cls(qscheme=scheme, **SCHEMES[scheme], **given_as), x)
        assert scale * half <= x.abs().max() * 1.01
        errors.append(float(((x / scale).round().clamp(-128, 127) * scale - x).square().sum()))
    assert errors[0] < errors[1]
