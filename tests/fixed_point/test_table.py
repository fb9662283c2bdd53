"""Tables: 8-bit ones exact, 16-bit ones accurate, and their segments a full account of their values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fixed_point.table import INTERVALS, MOST_SEGMENTS
from tests.fixed_point import reference
from tests.strategies import ratios


def scalar(function: Callable[[float], float]) -> Callable[[float], float]:
    """A plain-Python form: what is undefined is 0, a pole is infinity."""

    def value(x: float) -> float:
        try:
            return function(x)
        except ValueError:
            return 0.0
        except ZeroDivisionError:
            return math.inf if math.copysign(1, x) > 0 else -math.inf

    return value


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float]]] = {
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))),
    "tanh": (torch.tanh, math.tanh),
    "silu": (
        torch.nn.functional.silu,
        lambda x: x / (1 + math.exp(-x)) if x >= 0 else x * math.exp(x) / (1 + math.exp(x)),
    ),
    "gelu": (torch.nn.functional.gelu, lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2))),
    "exp": (torch.exp, math.exp),
    "reciprocal": (torch.reciprocal, lambda x: 1 / x),
    "sqrt": (torch.sqrt, math.sqrt),
}
SCALES = [(0.05, 1 / 128), (0.0078125, 0.00731), (0.031, 0.11), (0.2, 0.0123)]


@pytest.mark.parametrize("out_dtype", [qint8, qint16])
@pytest.mark.parametrize(("in_scale", "out_scale"), SCALES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_256_entries_are_rounded_to_nearest(
    name: str, in_scale: float, out_scale: float, out_dtype: QuantDType
) -> None:
    function, plain = FUNCTIONS[name]
    s, o = torch.tensor([in_scale]), torch.tensor([out_scale]) * (1 if out_dtype == qint8 else 2.0**-8)
    table = fp.build_table(function, s, qint8, o, out_dtype)
    assert table.values.shape == (256,)
    assert table.values.dtype == torch.float32
    assert table.worst_error <= 0.5
    for q, found in zip(range(-128, 128), table.values.tolist(), strict=True):
        exact = scalar(plain)(q * s.item()) / o.item()
        exact = min(max(exact, out_dtype.min), out_dtype.max)
        assert out_dtype.min <= found <= out_dtype.max
        assert found == round(found)
        assert abs(found - exact) <= 0.5 + 1e-9, (q, found, exact)


def evaluate(table: fp.SegmentTable, low: int, high: int) -> np.ndarray:
    """The table as a deployment would compute it: find the segment, the interval in it, interpolate on integers."""
    values = np.empty(1 << 16, dtype=np.int64)
    for start, width, entries in zip(table.starts.tolist(), table.widths.tolist(), table.entries.tolist(), strict=True):
        interval = width // INTERVALS
        for offset in range(width):
            i, within = divmod(offset, interval)
            left, right = entries[i], entries[i + 1]
            step = ((right - left) * within + interval // 2) // interval if interval > 1 else 0
            values[start + offset] = min(max(left + step, low), high)
    return values


def targets_of(name: str, in_scale: float, out_scale: float, out_dtype: QuantDType) -> Tensor:
    x = torch.arange(-32768, 32768, dtype=torch.float64) * in_scale
    exact = FUNCTIONS[name][0](x) / out_scale
    return torch.nan_to_num(exact, nan=0.0).clamp(out_dtype.min, out_dtype.max)


SMOOTH = [("sigmoid", 8 / 32768, 1 / 32768), ("tanh", 4 / 32768, 1 / 32768), ("silu", 6 / 32768, 6 / 32768),
          ("gelu", 6 / 32768, 6 / 32768), ("exp", 8 / 32768, math.exp(8) / 32768), ("sigmoid", 64 / 32768, 1 / 32768),
          ("silu", 200 / 32768, 200 / 32768), ("tanh", 0.1 / 32768, 0.1 / 32768)]  # fmt: skip


@pytest.mark.parametrize("out_dtype", [qint16, qint8])
@pytest.mark.parametrize(("name", "in_scale", "out_scale"), SMOOTH)
def test_smooth_int16_tables_are_within_two_steps_everywhere(
    name: str, in_scale: float, out_scale: float, out_dtype: QuantDType
) -> None:
    if out_dtype == qint8:
        out_scale *= 256
    targets = targets_of(name, in_scale, out_scale, out_dtype)
    table = fp.build_segments(targets, out_dtype)
    worst = float((table.values.double() - targets).abs().max())
    assert worst == table.worst_error
    assert worst <= 2.0
    s, o = (torch.tensor([v], dtype=torch.float64) for v in (in_scale, out_scale))
    again = fp.build_table(FUNCTIONS[name][0], s, qint16, o, out_dtype, fp.Division())
    assert torch.equal(again.values, table.values) and again.worst_error == worst


HARD = [("reciprocal", 1 / 32768, 1 / 327.68), ("sqrt", 1 / 32768, 1 / 32768), ("exp", 30 / 32768, 1 / 32768)]


@pytest.mark.parametrize(("name", "in_scale", "out_scale"), SMOOTH[:4] + HARD)
def test_segments_tile_the_domain_and_give_exactly_the_values(name: str, in_scale: float, out_scale: float) -> None:
    targets = targets_of(name, in_scale, out_scale, qint16)
    table = fp.build_segments(targets, qint16)
    starts, widths = table.starts.tolist(), table.widths.tolist()
    assert 1 <= len(starts) <= MOST_SEGMENTS
    assert starts == [sum(widths[:i]) for i in range(len(widths))]
    assert sum(widths) == 1 << 16
    for start, width in zip(starts, widths, strict=True):
        assert width >= INTERVALS
        assert width & (width - 1) == 0
        assert start % width == 0
    assert table.entries.shape == (len(starts), INTERVALS + 1)
    assert qint16.min <= int(table.entries.min())
    assert int(table.entries.max()) <= qint16.max
    np.testing.assert_array_equal(table.values.numpy(), evaluate(table, qint16.min, qint16.max))
    assert float((table.values.double() - targets).abs().max()) == table.worst_error


def test_evenly_divided_tables_have_equal_segments_and_say_their_error() -> None:
    targets = targets_of("tanh", 64 / 32768, 1 / 32768, qint16)
    even = fp.build_segments(targets, qint16, fp.Division("evenly", 16))
    assert even.widths.tolist() == [4096] * 16
    np.testing.assert_array_equal(even.values.numpy(), evaluate(even, qint16.min, qint16.max))
    assert float((even.values.double() - targets).abs().max()) == even.worst_error
    bent = fp.build_segments(targets, qint16, fp.Division("curvature", 16))
    assert len(bent.widths) == 16
    assert bent.worst_error < even.worst_error / 3  # segments are where the function bends
    assert max(bent.widths.tolist()) > 4 * min(bent.widths.tolist())


@pytest.mark.parametrize("wrong", [dict(auto_divide_strategy="best"), dict(max_segments=0), dict(max_segments=65),
                                   dict(auto_divide_strategy="evenly", max_segments=48)])  # fmt: skip
def test_a_division_that_makes_no_sense_is_refused(wrong: dict) -> None:
    with pytest.raises(QuantizationConfigError, match="auto_divide_strategy|max_segments"):
        fp.Division(**wrong)


def test_the_last_interval_follows_a_steep_function_to_the_end() -> None:
    targets = torch.linspace(-30000, 30000, 1 << 16, dtype=torch.float64)
    table = fp.build_segments(targets, qint16)
    assert len(table.starts) == 1 and table.worst_error < 1


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(list(FUNCTIONS)), ratios(-16, -6), ratios(-16, -4))
def test_any_int16_table_reports_its_worst_error(name: str, in_scale: float, out_scale: float) -> None:
    targets = targets_of(name, in_scale, out_scale, qint16)
    table = fp.build_segments(targets, qint16)
    assert torch.isfinite(table.values).all()
    assert float((table.values.double() - targets).abs().max()) == table.worst_error


@pytest.mark.parametrize("bits", [8, 16])
def test_lookup_reads_the_entry_of_every_input(bits: int) -> None:
    low = -(1 << (bits - 1))
    table = torch.randperm(1 << bits).float()
    q = torch.arange(low, -low).float()
    assert torch.equal(fp.lookup(q, table, low), table)
    shaped = q[torch.randint(0, 1 << bits, (2, 3, 1))]
    reference.equal(fp.lookup(shaped, table, low), reference.whole(table)[(shaped.long() - low).numpy()])


BYTE_SHAPES = [(0,), (1,), (255,), (256,), (8193,), (8192,), (3, 5, 1024), (2, 8, 32, 16), (1, 3, 64, 65)]


@pytest.mark.parametrize("shape", BYTE_SHAPES, ids=str)
def test_bytes_get_the_entries_of_the_table(shape: tuple[int, ...]) -> None:
    table = fp.Table(torch.arange(256.0).roll(71) - 128, 0.0)
    every = torch.arange(-128, 128).to(torch.int8)  # -128 and 127 next to each other too
    x = every.repeat(math.prod(shape) // 256 + 1)[: math.prod(shape)].reshape(shape)
    forms = {"plain": x, "moved": torch.cat([every[:1], x.flatten()])[1:].reshape(shape)}
    if len(shape) == 4:
        forms["channels last"] = x.contiguous(memory_format=torch.channels_last)
    for name, form in forms.items():
        found = fp.lookup_bytes(form, table)
        assert found.dtype == torch.int8 and found.stride() == form.stride(), name
        assert torch.equal(found.float(), fp.lookup(x.float(), table.values, -128)), name


def test_bytes_that_are_not_dense_are_looked_up_too() -> None:
    table = fp.Table(torch.arange(256.0).roll(71) - 128, 0.0)
    x = torch.arange(-128, 128).to(torch.int8).repeat(100).reshape(200, 128)
    for form in (x[:, ::2], x[1:].t(), x[:1].expand(100, 128)):
        found = fp.lookup_bytes(form, table)
        assert found.dtype == torch.int8 and torch.equal(found.float(), fp.lookup(form.float(), table.values, -128))
