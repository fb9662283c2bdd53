"""Quantize, requantize, sums, products and affine maps against Python integers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from tests.fixed_point import reference
from tests.strategies import fills, integers, ratios, seeds

INT8, INT16 = (-128, 127), (-32768, 32767)
ALL_INT8 = torch.arange(-128.0, 128.0)
outputs = st.sampled_from([INT8, INT16, (0, 127), (0, 32767), (0, 60)])
SHAPES = [
    ((), ()),
    ((3,), (3,)),
    ((), (4,)),
    ((2, 3, 5), (2, 3, 5)),
    ((1, 7), (5, 1)),
    ((5, 1), (1, 7)),
    ((4,), (2, 1, 4)),
    ((2, 1, 4), (4,)),
    ((1,), (3, 1, 1)),
    ((0, 3), (1, 3)),
]


def sum_reference(a: Tensor, b: Tensor, factor_a: float, factor_b: float, low: int, high: int) -> np.ndarray:
    """``clamp((a * Ma + b * Mb + 2**(n-1)) >> n)``, from the factors as exact fractions."""
    fa, fb = Fraction(factor_a), Fraction(factor_b)
    n = max(fa.denominator, fb.denominator)
    ma, mb = int(fa * n), int(fb * n)
    total = 2 * (reference.whole(a) * ma + reference.whole(b) * mb) + n
    return reference.clamp(total // (2 * n), low, high)


PAIRS = [
    (0.5, 0.5),
    (1.0, 1.0),
    (0.731, -0.123),
    (1.9999, 0.0001),
    (-1.3, 2.7),
    (2.0**-9, 2.0**-8),
    (63.9, 0.02),
    (1 / 3, 2 / 3),
]


@pytest.mark.parametrize(("ratio_a", "ratio_b"), PAIRS)
@pytest.mark.parametrize("limits", [INT8, (0, 127)])
def test_add_is_exact_for_all_pairs_of_int8(ratio_a: float, ratio_b: float, limits: tuple[int, int]) -> None:
    a, b = ALL_INT8.reshape(-1, 1), ALL_INT8.reshape(1, -1)
    factors = fp.choose_sum_factors(ratio_a, ratio_b, True)
    reference.equal(fp.add(a, b, *factors, True, *limits), sum_reference(a, b, *factors, *limits))


@pytest.mark.parametrize(("ratio_a", "ratio_b"), PAIRS)
@pytest.mark.parametrize("limits", [INT8, (0, 127)])
def test_add_of_bytes_is_exact_for_all_pairs(ratio_a: float, ratio_b: float, limits: tuple[int, int]) -> None:
    a, b = torch.meshgrid(ALL_INT8, ALL_INT8, indexing="ij")
    a, b = (x.repeat(3, 1, 1, 1).contiguous() for x in (a, b))  # more than a block
    factors = fp.choose_sum_factors(ratio_a, ratio_b, True)
    expected = sum_reference(a, b, *factors, *limits)
    small = a.to(torch.int8), b.to(torch.int8)
    for left, right in (small, (small[0], b), (a, small[1]), (small[0].mT.contiguous().mT, small[1])):
        out = fp.add(left, right, *factors, True, *limits)
        assert out.dtype == torch.int8
        reference.equal(out.float(), expected)


@pytest.mark.parametrize(("ratio_a", "ratio_b"), [(127.3, 128.7), (200.1, 55.499), (1.0, -254.9), (90.0001, 90.0002)])
def test_add_to_int16_is_exact_for_all_pairs_of_int8(ratio_a: float, ratio_b: float) -> None:
    """Here large sums are not saturated, so every bit of them counts."""
    a, b = ALL_INT8.reshape(-1, 1), ALL_INT8.reshape(1, -1)
    factors = fp.choose_sum_factors(ratio_a, ratio_b, True)
    reference.equal(fp.add(a, b, *factors, True, *INT16), sum_reference(a, b, *factors, *INT16))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    ratios(-9, 8),
    ratios(-9, 8),
    st.booleans(),
    outputs,
    st.sampled_from(SHAPES),
    seeds,
    fills,
    st.sampled_from([8, 16]),
)
def test_add_is_exact_for_any_shape_scale_and_format(
    a_ratio, b_ratio, is_sub, limits, shapes, seed, fill, bits
) -> None:
    a, b = integers(shapes[0], bits, seed, fill), integers(shapes[1], bits, seed + 1, fill)
    before = a.clone(), b.clone()
    factors = fp.choose_sum_factors(a_ratio, -b_ratio if is_sub else b_ratio, bits == 8)
    reference.equal(fp.add(a, b, *factors, bits == 8, *limits), sum_reference(a, b, *factors, *limits))
    assert torch.equal(a, before[0]) and torch.equal(b, before[1]), "operands must not change"


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(ratios(-7, 6), ratios(-7, 6), st.booleans())
def test_sum_factors_are_within_half_a_step_of_the_ratios(ratio_a: float, ratio_b: float, is_narrow: bool) -> None:
    found = fp.choose_sum_factors(ratio_a, -ratio_b, is_narrow)
    tolerance = 2.0 ** (-14 if is_narrow else -23) * max(ratio_a, ratio_b)
    assert abs(found[0] - ratio_a) <= tolerance
    assert abs(found[1] + ratio_b) <= tolerance


@pytest.mark.parametrize("ratio", [2.0**-14, 0.00377, 0.0078, 0.01, 0.25, 1.0, 3.3])
@pytest.mark.parametrize("limits", [INT8, (0, 127)])
def test_mul_is_exact_for_all_pairs_of_int8(ratio: float, limits: tuple[int, int]) -> None:
    a, b = ALL_INT8.reshape(-1, 1), ALL_INT8.reshape(1, -1)
    factor = fp.choose_factor(torch.tensor([ratio]), *limits, 2.0**14)
    assert factor.dtype == torch.float32
    product = reference.whole(a) * reference.whole(b)
    reference.equal(fp.mul(a, b, factor, *limits), reference.requantize(product, factor.item(), *limits))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    ratios(-24, 2),
    outputs,
    st.sampled_from(SHAPES),
    seeds,
    fills,
    st.sampled_from([(8, 8), (8, 16), (16, 8), (16, 16)]),
)
def test_mul_is_exact_for_any_shape_scale_and_format(ratio, limits, shapes, seed, fill, bits) -> None:
    a, b = integers(shapes[0], bits[0], seed, fill), integers(shapes[1], bits[1], seed + 1, fill)
    factor = fp.choose_factor(torch.tensor([ratio]), *limits, 2.0 ** (sum(bits) - 2))
    product = reference.whole(a) * reference.whole(b)
    reference.equal(fp.mul(a, b, factor, *limits), reference.requantize(product, factor.item(), *limits))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("ratio", [2.0**-10, 0.0039, 0.3333, 0.5, 0.999, 1.0, 1.5, 100.0])
@pytest.mark.parametrize("limits", [INT8, INT16, (0, 127)])
def test_requantize_is_exact_for_every_input(bits: int, ratio: float, limits: tuple[int, int]) -> None:
    q = torch.arange(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1))
    before = q.clone()
    factor = fp.choose_factor(torch.tensor([ratio]), *limits, 2.0 ** (bits - 1))
    got = fp.requantize(q, factor, -1, *limits)
    m, d = factor.double().item().as_integer_ratio()
    expected = np.clip((2 * q.long().numpy() * m + d) // (2 * d), *limits)
    np.testing.assert_array_equal(got.long().numpy(), expected)
    assert torch.equal(q, before)


def test_requantize_per_channel_uses_each_channels_factor() -> None:
    q = integers((2, 5, 3), 8, 0)
    factor = fp.choose_factor(torch.tensor([0.1, 0.9, 1.7, 0.5, 3.0]), *INT8, 128)
    expected = reference.requantize_channels(reference.whole(q), factor, 1, *INT8)
    reference.equal(fp.requantize(q, factor, 1, *INT8), expected)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(ratios(-40, 8), st.booleans(), st.floats(-1e5, 1e5)), min_size=1, max_size=4),
    outputs, seeds, fills, st.sampled_from([8, 16]),
)  # fmt: skip
def test_affine_is_exact_and_close_to_the_real_map(channels, limits, seed, fill, bits) -> None:
    ratio = torch.tensor([-r if negative else r for r, negative, _ in channels], dtype=torch.float64)
    offset = torch.tensor([o for _, _, o in channels], dtype=torch.float64)
    factor, shift = fp.choose_affine(ratio, offset)
    q = integers((2, len(channels), 3), bits, seed, fill)
    got = fp.affine(q, factor, shift, 1, *limits)
    values = reference.whole(q)
    for c in range(len(channels)):
        exact = [Fraction(factor[c].item()) * int(v) + Fraction(shift[c].item()) for v in values[:, c].flatten()]
        expected = [min(max((2 * e + 1).__floor__() // 2, limits[0]), limits[1]) for e in exact]
        assert got[:, c].flatten().tolist() == expected
        real = (values[:, c].astype(float) * ratio[c].item() + offset[c].item()).clip(*limits)
        assert np.abs(got[:, c].numpy() - real).max() <= 0.51


@pytest.mark.parametrize("gain", [0.0, 1e-30, -1e-12, 2.0**-31, 5e-324])
@pytest.mark.parametrize("offset", [0.0, 4.375, 50.25, -70.0, 3e4, 1e12, -1e300])
def test_affine_keeps_its_offset_where_the_gain_vanishes(gain: float, offset: float) -> None:
    """A batch normalisation can have a channel whose gain is 0: what is left is the offset."""
    factor, shift = fp.choose_affine(
        torch.tensor([gain], dtype=torch.float64), torch.tensor([offset], dtype=torch.float64)
    )
    got = fp.affine(ALL_INT8, factor, shift, -1, *INT16)
    assert got.unique().tolist() == [min(max(float(np.floor(offset + 0.5)), -32768.0), 32767.0)]


@pytest.mark.parametrize("exponent", [-50, -45, -40, -30, -20])
@pytest.mark.parametrize("offset", [1000.5, -0.5, 20000.5, 3.5 - 2.0**-40])
def test_affine_decides_ties_by_its_smallest_bit(exponent: int, offset: float) -> None:
    ratio = torch.tensor([-(2.0**exponent) * 1.2345], dtype=torch.float64)
    factor, shift = fp.choose_affine(ratio, torch.tensor([offset], dtype=torch.float64))
    got = fp.affine(ALL_INT8, factor, shift, -1, *INT16)
    m, b = Fraction(factor.item()), Fraction(shift.item())
    assert got.tolist() == [(m * q + b + Fraction(1, 2)).__floor__() for q in range(-128, 128)]


@pytest.mark.parametrize("limits", [INT8, INT16, (0, 127)])
@pytest.mark.parametrize("scale", [1 / 128, 0.0117, 1.0, 3.0e-5, 2.0**-60, 1e30])
def test_quantize_divides_rounds_half_to_even_and_saturates(scale: float, limits: tuple[int, int]) -> None:
    s = torch.tensor([scale], dtype=torch.float32)
    steps = torch.tensor([0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -128.5, 1e6, -1e6, 0.49999, 3.3])
    x = torch.cat([steps * s, torch.tensor([float("inf"), -float("inf"), 3e38, -3e38, 1e-45])])
    got = fp.quantize(x, s, -1, *limits)
    with np.errstate(over="ignore"):
        divided = (x.numpy() / s.numpy()).astype(np.float32)  # one float32 division, as the definition says
    np.testing.assert_array_equal(got.numpy(), np.clip(np.round(divided), *limits))


def test_quantize_and_dequantize_per_channel_follow_the_axis() -> None:
    x = torch.randn(2, 3, 4)
    scale = torch.tensor([0.1, 0.02, 0.5])
    q = fp.quantize(x, scale, 1, *INT8)
    for c in range(3):
        assert torch.equal(q[:, c], fp.quantize(x[:, c], scale[c : c + 1], -1, *INT8))
    assert torch.equal(fp.dequantize(q, scale, 1), q * scale.reshape(3, 1))


def test_a_tensor_without_axes_keeps_none() -> None:
    x, one = torch.tensor(0.7), torch.tensor([0.1])
    q = fp.quantize(x, one, -1, *INT8)
    assert q.shape == ()
    assert q.item() == 7
    assert fp.dequantize(q, one, -1).shape == ()
    assert fp.requantize(q, one.double(), -1, *INT8).shape == ()
    assert fp.affine(q, one.double(), one.double(), -1, *INT8).shape == ()


def test_along_shapes_values_for_their_axis() -> None:
    values = torch.arange(3.0)
    assert fp.along(values, 1, 4).shape == (1, 3, 1, 1)
    assert fp.along(values, -1, 4) is values
    assert fp.along(values[:1], 1, 4).shape == (1,)
