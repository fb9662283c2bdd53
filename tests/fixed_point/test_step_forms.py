"""Operators in the forms of short steps give what the operators give, and what Python integers give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.fixed_point import step_forms
from horizon_plugin_pytorch.fixed_point.step_forms import in_float64, move_form, step_form
from tests.fixed_point import reference
from tests.fixed_point.test_elementwise import PAIRS, sum_reference

INT8, INT16 = (-128, 127), (-32768, 32767)
ENDS = torch.tensor([-32768.0, -32767, -16385, -256, -3, -1, 0, 1, 2, 127, 181, 16384, 32766, 32767])
ALL = torch.arange(-32768.0, 32768.0)


def run(overload, *args) -> Tensor:
    form = step_form(overload, args)
    assert form is not None
    taken = [x.double().numpy() for x in args[: form.operands]]
    before = [x.copy() for x in taken]
    if form.prepared is not None:
        taken[1] = form.prepared(taken[1])
    out = form.function(*taken)
    assert all(map(np.array_equal, taken, before if form.prepared is None else [before[0], taken[1]]))  # as they were
    return torch.from_numpy(out)


@pytest.mark.parametrize("limits", [INT8, INT16, (0, 127)])
@pytest.mark.parametrize("ratio", [2.0**-30, 2.0**-15, 1.7e-5, 0.0039, 0.5, 3.1])
def test_products(ratio: float, limits: tuple[int, int]) -> None:
    a, b = ENDS.reshape(-1, 1).expand(-1, len(ENDS)), ENDS.expand(len(ENDS), -1)
    factor = fp.choose_factor(torch.tensor([ratio]), *limits, bound=2**30)
    expected = reference.requantize(reference.whole(a) * reference.whole(b), float(factor), *limits)
    reference.equal(run(torch.ops.horizon.mul.default, a, b, factor, *limits), expected)


def test_a_factor_that_float64_cannot_hold_the_product_of_has_no_form() -> None:
    factor = torch.tensor([1 / 3], dtype=torch.float64)
    assert step_form(torch.ops.horizon.mul.default, (ENDS, ENDS, factor, *INT16)) is None


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize(("ratio_a", "ratio_b"), PAIRS)
def test_sums(ratio_a: float, ratio_b: float, is_narrow: bool) -> None:
    ends = ENDS.clamp(*INT8) if is_narrow else ENDS
    a, b = ends.reshape(-1, 1).expand(-1, len(ends)), ends.expand(len(ends), -1)
    factors = fp.choose_sum_factors(ratio_a, ratio_b, is_narrow)
    got = run(torch.ops.horizon.add.default, a, b, *factors, is_narrow, *INT16)
    reference.equal(got, sum_reference(a, b, *factors, *INT16))


@pytest.mark.parametrize("limits", [INT8, INT16])
@pytest.mark.parametrize("ratio", [2.0**-9, 0.0047, 0.5, 1.0, 2.5])
def test_other_scales(ratio: float, limits: tuple[int, int]) -> None:
    factor = fp.choose_factor(torch.tensor([ratio]), *limits, bound=2**15)
    expected = reference.requantize(reference.whole(ALL), float(factor), *limits)
    reference.equal(run(torch.ops.horizon.requantize.default, ALL, factor, -1, *limits), expected)


@pytest.mark.parametrize("offset", [-32768, -128, 0])
def test_tables(offset: int) -> None:
    q = torch.arange(offset, offset + (256 if offset == -128 else 65536)).float()
    table = q.flip(0).roll(5)
    assert torch.equal(run(torch.ops.horizon.lookup.default, q, table, offset).float(), fp.lookup(q, table, offset))


@pytest.mark.parametrize("residual_bits", [0, 8, 16])
@pytest.mark.parametrize("limits", [INT8, INT16])
@pytest.mark.parametrize("input_bits", [8, 16])
def test_layers(limits: tuple[int, int], residual_bits: int, input_bits: int, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(residual_bits)
    size, most = 24, 1 << (input_bits - 1)
    weight = torch.randint(-127, 128, (17, size), generator=generator).float()
    weight[0], weight[1] = 127, -128
    bias = torch.randn(17, generator=generator, dtype=torch.float64) * 20
    plan = fp.plan_accumulator(
        weight, bias, torch.rand(17, generator=generator, dtype=torch.float64) * 1e-3 + 1e-6, torch.tensor([0.5]),
        output_axis=0, groups=1, input_range=(-most, most - 1), weight_bits=8, low=limits[0], high=limits[1],
        residual_scale=torch.tensor([0.01]) if residual_bits else None, residual_bits=residual_bits or 8,
    )  # fmt: skip
    x = torch.randint(-most, most, (50, size), generator=generator).float()
    x[0], x[1] = -most, most - 1
    residual = None
    if residual_bits:
        ends = 1 << (residual_bits - 1)
        residual = torch.randint(-ends, ends, (50, 17), generator=generator).float()
        residual[2], residual[3] = -ends, ends - 1
    args = (x, residual, *fp.flatten(plan))
    for most_multiplied in (1 << 18, 0):  # by numpy, and by torch
        monkeypatch.setattr(step_forms, "_SMALL_PRODUCT", most_multiplied)
        assert torch.equal(run(torch.ops.horizon.linear.default, *args).float(), fp.linear(*args))


def test_an_operator_without_a_form_runs_as_it_is() -> None:
    factor, offset = fp.choose_affine(torch.tensor([0.25]), torch.tensor([3.0]), INT8, *INT8)
    q = torch.arange(-128.0, 128.0)
    args = (factor, offset, -1, *INT8)
    assert factor.dtype == torch.float32 and step_form(torch.ops.horizon.affine.default, (q, *args)) is None
    got = in_float64(torch.ops.horizon.affine.default)(q.double().numpy(), *args)
    assert got.dtype == np.float64 and torch.equal(torch.from_numpy(got).float(), fp.affine(q, *args))


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        (torch.ops.aten.slice.Tensor, (-1, 1, 5)),
        (torch.ops.aten.slice.Tensor, (1, 2, 9223372036854775807)),
        (torch.ops.aten.slice.Tensor, (1, -3, -1)),
        (torch.ops.aten.slice.Tensor, (1, 0, 6, 2)),
        (torch.ops.aten.slice.Tensor, ()),
        (torch.ops.aten.split.Tensor, (2, -1)),
        (torch.ops.aten.split.Tensor, (4, 1)),
        (torch.ops.aten.split.Tensor, (1,)),
        (torch.ops.aten.narrow.default, (-1, 2, 3)),
        (torch.ops.aten.chunk.default, (4, -1)),
        (torch.ops.aten.chunk.default, (2, 1)),
        (torch.ops.aten.select.int, (1, -1)),
        (torch.ops.aten.unsqueeze.default, (0,)),
        (torch.ops.aten.expand.default, ([5, 2, 6],)),
    ],
)
def test_moves(overload, args) -> None:
    x = torch.arange(12.0, dtype=torch.float64).view(2, 6)
    got, wanted = move_form(overload)(x.numpy(), *args), overload(x, *args)
    pairs = zip(got, wanted, strict=True) if isinstance(wanted, (tuple, list)) else [(got, wanted)]
    assert all(np.array_equal(a, b.numpy()) for a, b in pairs)
