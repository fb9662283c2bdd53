"""Sums, average pooling and resampling against Python integers, and their weights against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from horizon_plugin_pytorch import fixed_point as fp
from tests.fixed_point import reference
from tests.strategies import fills, integers, ratios, seeds

INT8, INT16 = (-128, 127), (-32768, 32767)
outputs = st.sampled_from([INT8, INT16, (0, 127)])


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.data(),
    ratios(-12, 1),
    outputs,
    seeds,
    fills,
    st.sampled_from([8, 16]),
    st.booleans(),
)
def test_sum_is_exact(shape, data, ratio, limits, seed, fill, bits, keepdim) -> None:
    dims = data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    q = integers(shape, bits, seed, fill)
    bound = float(np.prod([shape[d] for d in dims])) * 2.0 ** (bits - 1)
    factor = fp.choose_factor(torch.tensor([ratio]), *limits, bound)
    if not keepdim and len(dims) == len(shape):
        factor = factor.reshape(())  # a sum over all axes has none
    got = fp.sum(q, dims, keepdim, factor, fp.is_beyond_float32(bound), *limits)
    total = np.array(reference.whole(q).sum(axis=tuple(dims), keepdims=keepdim), dtype=object)
    reference.equal(got, np.array(reference.requantize(total, factor.item(), *limits), dtype=object))


@pytest.mark.parametrize("value", [-32768.0, 32767.0, -1.0])
def test_a_long_int16_sum_is_exact_in_float64(value: float) -> None:
    count = 60000  # 2**31 is just not reached, 2**24 by far
    q = torch.full((1, count), value)
    factor = fp.choose_factor(torch.tensor([1 / count]), *INT16, count * 32768.0)
    assert fp.is_beyond_float32(count * 32768.0)
    assert fp.sum(q, [1], False, factor, True, *INT16).item() == reference.half_up(int(value) * count, factor.item())


def test_float32_is_left_exactly_at_2_to_24() -> None:
    assert not fp.is_beyond_float32(2.0**24 - 1)
    assert fp.is_beyond_float32(2.0**24)


def windows(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> list[range]:
    """The input positions of each output position, as torch documents them."""
    count = (size + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1
    starts = [i * stride - padding for i in range(count)]
    return [range(max(s, 0), min(s + kernel, size)) for s in starts]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(3, 9), st.integers(3, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.booleans(),
    ratios(-6, 1),
    outputs,
    seeds,
    fills,
    st.sampled_from([8, 16]),
)
def test_avg_pool_sums_windows_exactly(
    size, kernel, stride, padding, ceil_mode, ratio, limits, seed, fill, bits
) -> None:
    assume(all(p <= k // 2 and k <= s for p, k, s in zip(padding, kernel, size, strict=True)))
    q = integers((2, 2, *size), bits, seed, fill)
    bound = kernel[0] * kernel[1] * 2.0 ** (bits - 1)
    factor = fp.choose_factor(torch.tensor([ratio]), *limits, bound)
    got = fp.avg_pool2d(q, kernel, stride, padding, ceil_mode, factor, fp.is_beyond_float32(bound), *limits)
    rows, columns = (windows(*args, ceil_mode) for args in zip(size, kernel, stride, padding, strict=True))
    values = reference.whole(q)
    sums = [[values[:, :, r.start : r.stop, c.start : c.stop].sum(axis=(2, 3)) for c in columns] for r in rows]
    total = np.stack([np.stack(row, -1) for row in sums], -2)
    reference.equal(got, reference.requantize(total, factor.item(), *limits))


def test_avg_pool_takes_one_factor_for_each_position() -> None:
    q = integers((1, 2, 4, 4), 8, 3)
    counts = torch.tensor([[4.0, 6.0], [9.0, 5.0]])
    factor = fp.choose_factor((1 / counts).reshape(-1), *INT8, 4 * 128.0).reshape(2, 2)
    got = fp.avg_pool2d(q, [2, 2], [2, 2], [0, 0], False, factor, False, *INT8)
    for i in range(2):
        for j in range(2):
            total = reference.whole(q[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]).sum(axis=(2, 3))
            reference.equal(got[:, :, i, j], reference.requantize(total, factor[i, j].item(), *INT8))


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.booleans(),
    seeds,
    fills,
    st.sampled_from([8, 16]),
)
def test_bilinear_resampling_is_exact_and_close_to_torch(source, target, align_corners, seed, fill, bits) -> None:
    q = integers((1, 2, *source), bits, seed, fill)
    limits, weight_bits = (INT8 if bits == 8 else INT16), fp.weight_bits(bits)
    y, x = (fp.bilinear_positions(s, t, None, align_corners, weight_bits) for s, t in zip(source, target, strict=True))
    rows, columns = (fp.bilinear_matrix(s, p, weight_bits) for s, p in zip(source, (y, x), strict=True))
    assert torch.equal(rows.sum(1), torch.full((target[0],), 2.0**weight_bits, dtype=torch.float64))
    got = fp.resize2d(q, x, y, weight_bits)
    total = reference.whole(rows) @ reference.whole(q) @ reference.whole(columns).T
    reference.equal(got, reference.requantize(total, 4.0**-weight_bits, *limits))
    real = F.interpolate(q.double(), target, mode="bilinear", align_corners=align_corners)
    tolerance = 0.5 + 2.0 ** (bits - weight_bits)  # one rounding, and two weights each half a unit away
    assert float((got - real).abs().max()) <= tolerance


@pytest.mark.parametrize("scale_factor", [0.4, 0.7, 1.3, 2.0, 2.3])
@pytest.mark.parametrize("size", [3, 7, 10])
def test_bilinear_weights_follow_the_given_step(scale_factor: float, size: int) -> None:
    """Without recompute_scale_factor torch steps by 1 / scale_factor, not by the ratio of sizes."""
    target = int(size * scale_factor)
    matrix = fp.bilinear_matrix(size, fp.bilinear_positions(size, target, 1 / scale_factor, False, 16), 16) / 2.0**16
    x = torch.eye(size, dtype=torch.float64).reshape(size, 1, size, 1)
    expected = F.interpolate(x, scale_factor=(scale_factor, 1.0), mode="bilinear", align_corners=False)[:, 0, :, 0].T
    torch.testing.assert_close(matrix, expected, atol=2.0**-16, rtol=0)


@pytest.mark.parametrize("source", range(1, 12))
@pytest.mark.parametrize("target", range(1, 9))
def test_adaptive_windows_are_those_of_torch(source: int, target: int) -> None:
    matrix = fp.adaptive_matrix(source, target)
    x = torch.randn(1, 1, source, dtype=torch.float64)
    mean = (matrix @ x[0, 0]) / matrix.sum(1)
    torch.testing.assert_close(mean, F.adaptive_avg_pool1d(x, target)[0, 0])
