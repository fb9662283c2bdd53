"""Requantization in two float32 roundings, as integer kernels have it, and factors that were moved for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.fixed_point import EXACT_FLOAT32, choose_factor, multiplier_and_shift
from horizon_plugin_pytorch.fixed_point.lines import Line, choose_line, move_to_lines
from tests.fixed_point import reference
from tests.fixed_point.test_rescaling import RANGES, assert_equals_definition, near_steps, wide_factor
from tests.strategies import ratios

LIMITS = {name: limits for name, limits in RANGES.items() if name != "empty"} | {"two values": (0, 1)}


def assert_proved_lines_are_the_definition(line: Line, factor: Tensor, bias: Tensor, low: int, high: int, reach: int):
    """At every step that is reached, next to it, and at the ends of the reach."""
    for channel in line.is_proved.nonzero().flatten().tolist():
        shift = int(bias[channel])
        sums = near_steps(factor[channel].item(), low, high, EXACT_FLOAT32) - shift
        sums = torch.cat([sums, torch.tensor([-reach, 0, reach])])
        sums = sums[sums.abs() <= reach]
        got = sums.float().mul(line.scale[channel]).add(line.offset[channel]).round().clamp(low, high)
        expected = reference.requantize((sums + shift).numpy().astype(object), factor[channel].item(), low, high)
        np.testing.assert_array_equal(got.long().numpy(), expected.astype(np.int64))


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("reach", [100, 32768, EXACT_FLOAT32 - 1])
def test_lines_give_the_definition_at_every_step(name: str, reach: int) -> None:
    """Two roundings in float32, as integer kernels have them, of sums without their bias."""
    low, high = LIMITS[name]
    generator = torch.Generator().manual_seed(reach)
    ratio = 2 ** -(torch.rand(60, generator=generator, dtype=torch.float64) * 14 + 1)
    factor = choose_factor(ratio, low, high)
    assert factor.dtype == torch.float32
    bias = (torch.randn(60, generator=generator, dtype=torch.float64) * 90 / ratio).round()
    bias[:3] = torch.tensor([0.0, 2.0**23, -(2.0**23)], dtype=torch.float64)
    line = choose_line(factor, bias, low, high, torch.full((60,), float(reach)))
    assert float(line.is_proved.float().mean()) > 0.5
    assert len(line.unproved) == 60 - int(line.is_proved.sum())
    assert_proved_lines_are_the_definition(line, factor, bias, low, high, reach)


def test_lines_that_step_wrongly_are_not_called_proved() -> None:
    """Factors so small that float32 cannot tell neighbouring sums apart where the output is large."""
    ratio = 1e-5 * (1 + torch.arange(40, dtype=torch.float64) / 97)
    bias = torch.arange(40, dtype=torch.float64) * 99991 - 2_000_000
    line = choose_line(wide_factor(ratio).float(), bias, -128, 127, torch.full((40,), 1.6e7))
    assert not line.is_proved.any() and line.unproved.tolist() == list(range(40))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(ratios(-14, 3), st.floats(-200, 200), st.booleans()), min_size=1, max_size=9),
    st.sampled_from(list(LIMITS.values())),
    st.floats(0.5, 7.2),
)
def test_moved_factors_are_proved_in_both_forms(channels, limits, digits) -> None:
    """In one float32 rounding, as on float32 sums, and in two, as in kernels; and they lie close to the ratio."""
    ratio, reach = torch.tensor([value for value, _, _ in channels], dtype=torch.float64), int(10**digits)
    biases = [round((2**31 - 1) * steps / 200 if is_large else steps / value) for value, steps, is_large in channels]
    bias = torch.tensor(biases, dtype=torch.float64)
    factor = choose_factor(ratio, *limits)
    reaches = torch.full_like(ratio, float(reach))
    moved = move_to_lines(factor, ratio, bias, *limits, reaches)
    assert moved.dtype == factor.dtype
    if factor.dtype == torch.float32:
        assert float((moved.double() / factor.double() - 1).abs().max()) <= 2.0**-15
        for value in moved:
            assert_equals_definition(value.reshape(1), near_steps(value.item(), *limits, EXACT_FLOAT32 - 1), *limits)
        line = choose_line(moved, bias, *limits, reaches)
        assert_proved_lines_are_the_definition(line, moved, bias, *limits, reach)
        is_there = choose_line(factor, bias, *limits, reaches).is_proved
        assert torch.equal(moved[is_there], factor[is_there])


def test_nearly_every_channel_of_long_sums_is_moved_to_a_line() -> None:
    generator = torch.Generator().manual_seed(0)
    ratio = 2e-4 * (1 + 2 * torch.rand(500, generator=generator, dtype=torch.float64))
    bias = (torch.randn(500, generator=generator, dtype=torch.float64) * 30 / ratio).round()
    reach = torch.full_like(ratio, 2e6)
    factor = choose_factor(ratio, -128, 127)
    moved = move_to_lines(factor, ratio, bias, -128, 127, reach)
    before, after = (len(choose_line(x, bias, -128, 127, reach).unproved) for x in (factor, moved))
    assert before > 25 and after <= 5


def _hard_channels(typical: float, count: int = 1000) -> tuple[Tensor, Tensor, Tensor]:
    """Ratios, biases and factors of which many have no line."""
    generator = torch.Generator().manual_seed(0)
    ratio = typical * (1 + 2 * torch.rand(count, generator=generator, dtype=torch.float64))
    bias = (torch.randn(count, generator=generator, dtype=torch.float64) * 30 / ratio).round()
    return ratio, bias, choose_factor(ratio, -128, 127)


def test_factors_are_moved_by_at_most_sixteen_units() -> None:
    """Some would have a line if they were moved further."""
    ratio, bias, factor = _hard_channels(1e-4)
    reach = torch.full_like(ratio, 2e6)
    moved = move_to_lines(factor, ratio, bias, -128, 127, reach)
    units = torch.ldexp(moved.double() - factor.double(), multiplier_and_shift(ratio)[1]).abs()
    assert float(units.max()) == 16 and len(choose_line(moved, bias, -128, 127, reach).unproved) > 50
    assert float((moved.double() / factor.double() - 1).abs().max()) <= 2.0**-15


@pytest.mark.parametrize(("largest", "is_moved"), [(EXACT_FLOAT32 - 1, True), (EXACT_FLOAT32, False)])
def test_no_factor_is_moved_where_a_sum_may_pass_the_limit(largest: int, is_moved: bool) -> None:
    """A float32 number does not hold such a sum, whatever the factor."""
    ratio, bias, factor = _hard_channels(2e-4)
    reach = torch.full_like(ratio, 2e6)
    reach[-1] = largest
    assert torch.equal(move_to_lines(factor, ratio, bias, -128, 127, reach), factor) != is_moved


def test_lines_with_products_beyond_float64_are_not_called_proved() -> None:
    """Of 2**26 and more, less a half and what float32 rounds there: these may have more bits than float64."""
    shift = torch.tensor([-(2**23) + 1000, -(2**23) - 1000, -100_000], dtype=torch.float64)
    factor = torch.tensor([8.0, 8.0, 1000.0])
    line = choose_line(factor, shift, -128, 127, torch.full((3,), EXACT_FLOAT32 - 1.0))
    assert line.is_proved.tolist() == [True, False, False]
    assert_proved_lines_are_the_definition(line, factor, shift, -128, 127, EXACT_FLOAT32 - 1)


@pytest.mark.parametrize(
    "facts", [{"residual_scale": torch.tensor([0.37])}, {"weight_bits": 16}], ids=["residual", "int16 weights"]
)
def test_layers_that_no_kernel_requantizes_keep_their_factor(facts: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (300, 1, 3, 3), generator=generator).float()
    size = weight.flatten(1).abs().sum(1, dtype=torch.float64)
    scale = 100 / size / 128 * (1 + torch.rand(300, generator=generator, dtype=torch.float64))
    bias = torch.randn(300, generator=generator, dtype=torch.float64) * 30
    plain: dict[str, Any] = {"output_axis": 0, "groups": 300, "weight_bits": 8, "low": -128, "high": 127}
    plain["input_range"] = (-128, 127)
    chosen = choose_factor(scale, -128, 127).double()
    moved, kept = (
        fp.plan_accumulator(weight, bias, scale, torch.tensor([1.0]), **settings).factor.double()
        for settings in (plain, plain | facts)
    )
    assert torch.equal(kept, chosen) and not torch.equal(moved, chosen)


@pytest.mark.parametrize(
    "weight_shape", [(300, 1, 3, 3), (300, 64, 1, 1), (300, 200)], ids=["depthwise", "1x1", "linear"]
)
def test_what_is_known_of_the_input_moves_no_factor(weight_shape: tuple[int, ...]) -> None:
    """One route may know that an input has no negative numbers, and another not: they must have the same integers."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, weight_shape, generator=generator).float()
    size = weight.flatten(1).abs().sum(1, dtype=torch.float64)
    scale = 100 / size / 128 * (1 + torch.rand(300, generator=generator, dtype=torch.float64))
    bias = torch.randn(300, generator=generator, dtype=torch.float64) * 30
    groups = 300 if weight_shape[1] == 1 else 1
    facts = {"output_axis": 0, "groups": groups, "weight_bits": 8, "low": -128, "high": 127}
    plans = [
        fp.plan_accumulator(weight, bias, scale, torch.tensor([1.0]), input_range=ends, **facts)
        for ends in ((-128, 127), (0, 127), (0, 60), (-32768, 32767))
    ]
    assert all(torch.equal(plans[0].factor.double(), plan.factor.double()) for plan in plans)
    assert not torch.equal(plans[0].factor.double(), choose_factor(scale, -128, 127).double())
