"""Requantization: the float32 and float64 routes equal the integer definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from horizon_plugin_pytorch.fixed_point import EXACT_FLOAT32, choose_factor, multiplier_and_shift, rescale_
from horizon_plugin_pytorch.fixed_point.rescaling import is_exact_in_float32
from tests.fixed_point import reference
from tests.strategies import ratios
from tests.tiers import in_soak

RANGES = {"int8": (-128, 127), "relu": (0, 127), "relu6": (0, 96), "empty": (0, 0), "int8 symmetric": (-127, 127)}
ranges = st.sampled_from(list(RANGES.values()))


def wide_factor(ratio: torch.Tensor) -> torch.Tensor:
    """The nearest ``M / 2**n``, without the search for a float32 form."""
    multiplier, shift = multiplier_and_shift(ratio)
    return torch.ldexp(multiplier.double(), -shift.double())


def as_integers(factor: float) -> tuple[int, int]:
    """M and n of a factor, with n at least 1."""
    multiplier, denominator = float(factor).as_integer_ratio()
    shift = denominator.bit_length() - 1
    return (multiplier, shift) if shift else (2 * multiplier, 1)


def assert_equals_definition(factor: Tensor, acc: Tensor, low: int, high: int) -> None:
    """Every acc, given as int64, for a factor of one element."""
    carrier = acc.to(factor.dtype if factor.dtype == torch.float64 else torch.float32)
    assert torch.equal(carrier.long(), acc)
    got = rescale_(carrier, factor, low, high)
    assert got.dtype == torch.float32
    m, n = as_integers(factor.item())
    expected = (
        reference.requantize_int64(acc.numpy(), m, n, low, high)
        if n <= 40
        else reference.requantize(acc.numpy().astype(object), factor.item(), low, high)
    )
    np.testing.assert_array_equal(got.long().numpy(), expected.astype(np.int64))


def near_steps(factor: float, low: int, high: int, bound: int) -> Tensor:
    """The integers around every place where the output steps, and around the ends of the range."""
    m, n = as_integers(factor)
    k = np.arange(low, high + 2, dtype=object)
    steps = -((-(2 * k - 1) * (1 << (n - 1))) // m)
    points = np.concatenate(
        [steps + d for d in range(-3, 4)] + [np.array([-bound, -bound + 1, bound - 1, bound], dtype=object)]
    )
    points = points[(points >= -bound) & (points <= bound)]
    return torch.tensor(sorted({int(p) for p in points}), dtype=torch.int64)


@settings(max_examples=60, deadline=None)
@given(ratios(), st.integers(1, 40000), ranges)
@example(0.5, 300, (-128, 127))
@example(1.0, 128, (-128, 127))
@example(2.0**-20, 40000, (-128, 127))
@example(2.0**6, 128, (-128, 127))
def test_every_reachable_accumulator_is_rounded_as_defined(ratio: float, bound: int, limits: tuple[int, int]) -> None:
    factor = choose_factor(torch.tensor([ratio]), *limits, bound)
    assert factor.dtype == torch.float32
    assert_equals_definition(factor, torch.arange(-bound, bound + 1), *limits)


@pytest.mark.parametrize(
    "exponent",
    [pytest.param(-20, marks=pytest.mark.slow), -14.2, -12, -9.9, -7.01, -3.3, 0, 5.5, *in_soak(-17.37, -16.5)],
)
def test_every_integer_below_2_to_24_is_rounded_as_defined(exponent: float) -> None:
    bound = EXACT_FLOAT32 - 1
    factor = choose_factor(torch.tensor([2.0**exponent], dtype=torch.float64), -128, 127, bound)
    reach = min(bound, int(140 / 2.0**exponent) + 2)  # beyond it both are saturated, and monotone
    for start in range(-reach, reach + 1, 1 << 22):
        assert_equals_definition(factor, torch.arange(start, min(start + (1 << 22), reach + 1)), -128, 127)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(ratios(), st.integers(1 << 16, EXACT_FLOAT32 - 1), ranges, st.randoms(use_true_random=False))
def test_wide_accumulators_are_rounded_as_defined_near_every_step(ratio, bound, limits, random) -> None:
    factor = choose_factor(torch.tensor([ratio]), *limits, bound)
    acc = near_steps(factor.item(), *limits, bound)
    anywhere = torch.tensor([random.randint(-bound, bound) for _ in range(500)])
    assert_equals_definition(factor, torch.cat([acc, anywhere]), *limits)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *in_soak(1, 2)])
@pytest.mark.parametrize("name", RANGES)
def test_the_integers_on_both_sides_of_every_step_at_many_ratios(name: str, part: int) -> None:
    """The last integer before a step counts as much as the step: after a ReLU, float32 rounds some up too early."""
    low, high = RANGES[name]
    for ratio in np.exp2(np.linspace(-22, 5, 298))[part::3].tolist():
        factor = choose_factor(torch.tensor([ratio], dtype=torch.float64), low, high)
        assert_equals_definition(factor, near_steps(factor.item(), low, high, EXACT_FLOAT32 - 1), low, high)


@pytest.mark.slow
def test_a_step_just_beyond_the_bound_is_not_taken_early() -> None:
    """The last reachable accumulators may round up to a tie in float32 although the next step is out of reach."""
    generator = torch.Generator().manual_seed(0)
    for exponent in np.linspace(-20, -15, 40):
        ratio = 2.0**exponent
        k = int(torch.randint(1, 16, (), generator=generator)) * 2
        for back in range(1, 5):
            bound = int((k - 0.5) / ratio) - back
            if not 0 < bound < EXACT_FLOAT32:
                continue
            factor = choose_factor(torch.tensor([ratio], dtype=torch.float64), -128, 127, bound)
            assert_equals_definition(factor, torch.arange(bound - 50, bound + 1), -128, 127)


@settings(max_examples=30, deadline=None)
@given(st.lists(ratios(-14, 2), min_size=1, max_size=17), st.integers(100, EXACT_FLOAT32 - 1), ranges)
def test_each_channel_has_its_own_proof(channels: list[float], bound: int, limits: tuple[int, int]) -> None:
    factors = choose_factor(torch.tensor(channels, dtype=torch.float64), *limits, bound)
    assert factors.shape == (len(channels),)
    for factor in factors:
        assert_equals_definition(factor.reshape(1), near_steps(factor.item(), *limits, bound), *limits)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(ratios(-24, 10), ranges, st.integers(1, EXACT_FLOAT32 - 1))
def test_the_factor_lies_close_to_the_ratio(ratio: float, limits: tuple[int, int], bound: int) -> None:
    wide = wide_factor(torch.tensor([ratio], dtype=torch.float64)).item()
    assert abs(wide / ratio - 1) <= 2.0**-20
    chosen = choose_factor(torch.tensor([ratio], dtype=torch.float64), *limits, bound).item()
    assert abs(chosen / ratio - 1) <= 2.0**-11
    assert abs(chosen - ratio) * min(bound, 127.5 / ratio) < 0.1, "the change must stay far below one step"


@pytest.mark.parametrize("ratio", [1e-9, 2.0**-14, 0.1, 0.5, 0.999999999, 1.0, 3.7, 2.0**20, 1e9])
def test_multiplier_has_twenty_bits(ratio: float) -> None:
    m, n = (int(v) for v in multiplier_and_shift(torch.tensor([ratio], dtype=torch.float64)))
    assert 1 << 19 <= m <= 1 << 20
    assert math.isclose(math.ldexp(m, -n), ratio, rel_tol=2.0**-20)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(ratios(-30, 10), st.randoms(use_true_random=False), st.booleans())
def test_int16_outputs_and_int32_accumulators_take_the_exact_float64_route(ratio, random, has_relu) -> None:
    low, high = (0 if has_relu else -32768), 32767
    factor = choose_factor(torch.tensor([ratio], dtype=torch.float64), low, high, 2.0**31)
    assert factor.dtype == torch.float64
    acc = [random.randint(-(2**32), 2**32) for _ in range(300)] + [-(2**32), -(2**31), 2**31 - 1, 2**32]
    k = [random.randint(low, high) for _ in range(100)]
    acc += [a + d for a in (math.floor((v - 0.5) / ratio) for v in k) for d in (-1, 0, 1, 2) if abs(a) < 2**32 - 2]
    got = rescale_(torch.tensor(acc, dtype=torch.float64), factor, low, high)
    reference.equal(got, reference.requantize(np.array(acc, dtype=object), factor.item(), low, high))


@pytest.mark.parametrize(
    ("ratio", "low", "high", "bound", "dtype"),
    [
        (0.01, -128, 127, 1e6, torch.float32),
        (0.01, -32768, 32767, 1e6, torch.float64),
        (0.01, -128, 127, 2.0**24, torch.float64),
        (2.0**21, -128, 127, 100, torch.float64),  # no shift to the right is left
    ],
)
def test_float32_is_chosen_only_where_it_can_be_exact(ratio, low, high, bound, dtype) -> None:
    assert choose_factor(torch.tensor([ratio]), low, high, bound).dtype == dtype


@settings(max_examples=50, deadline=None)
@given(ratios(-14, 2), st.integers(1, EXACT_FLOAT32 - 1))
def test_a_wider_bound_gives_the_same_multiplier_below_and_above_float32(ratio: float, bound: int) -> None:
    """Which route a layer takes must not change its integers."""
    narrow = choose_factor(torch.tensor([ratio], dtype=torch.float64), -128, 127)
    assert choose_factor(torch.tensor([ratio], dtype=torch.float64), -128, 127, 2.0**31).item() == narrow.item()


def test_a_float32_sum_of_two_exact_integers_may_pass_2_to_24() -> None:
    """Rounding is monotone, so beyond 2**24 both forms are saturated while every step lies below."""
    generator = torch.Generator().manual_seed(1)
    factor = choose_factor(torch.tensor([3e-5], dtype=torch.float64), -128, 127)
    assert factor.dtype == torch.float32
    a, b = torch.randint(-(1 << 24) + 1, 1 << 24, (2, 100000), generator=generator)
    got = rescale_(a.float() + b.float(), factor, -128, 127)
    m, n = as_integers(factor.item())
    np.testing.assert_array_equal(got.long().numpy(), reference.requantize_int64((a + b).numpy(), m, n, -128, 127))


def test_far_powers_of_two_survive_any_default_dtype() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        assert wide_factor(torch.tensor([2.0**-40], dtype=torch.float64)).item() == 2.0**-40
        assert wide_factor(torch.tensor([2.0**-200], dtype=torch.float64)).item() == 2.0**-200
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("limits", RANGES.values(), ids=RANGES.keys())
def test_a_float32_product_that_is_called_exact_is_the_definition(limits: tuple[int, int]) -> None:
    """Around every step, and beyond 2**24, where an int32 sum is rounded when it becomes a float32 number."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for ratio in [0.5, 0.25, 3 / 8, 2.0**-17, 1e-5, *torch.rand(40, generator=generator, dtype=torch.float64).tolist()]:
        for factor in (wide_factor(torch.tensor([ratio])), choose_factor(torch.tensor([ratio]), *limits).double()):
            reach = float(1 << 30)
            found.append(is_exact_in_float32(factor, *limits, reach))
            if not found[-1]:
                continue
            multiplier, shift = as_integers(float(factor))
            steps = [math.ceil(((2 * k - 1) << (shift - 1)) / multiplier) for k in range(limits[0] - 1, limits[1] + 3)]
            near = {t + d for t in steps for d in (-2, -1, 0, 1)} | {1 << 24, (1 << 24) + 1, (1 << 30) - 1}
            acc = torch.tensor(sorted(a for v in near for a in (v, -v) if abs(a) <= reach), dtype=torch.int32)
            got = torch.round(acc.float() * factor.float()).clamp(*limits)
            reference.equal(got, reference.requantize(reference.whole(acc), float(factor), *limits))
    assert any(found)
    if limits != RANGES["empty"]:
        assert not all(found)
