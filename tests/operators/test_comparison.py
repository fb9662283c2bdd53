"""What the table's cases cannot say of comparisons, booleans, choices and quotients."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.dtype import as_dtype, qbool
from horizon_plugin_pytorch.errors import QuantizationWarning, UnsupportedOperatorError
from horizon_plugin_pytorch.fixed_point.comparison import RELATIONS
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.operator_table import row_named
from horizon_plugin_pytorch.nn.qat import FloatFunctional as QATFunctional
from horizon_plugin_pytorch.nn.quantized import FloatFunctional, QFunctional
from horizon_plugin_pytorch.nn.quantized.functional_modules import FUNCTIONAL_METHODS
from horizon_plugin_pytorch.operators.support import TensorFact, Use
from horizon_plugin_pytorch.qtensor import QTensor, bool_qtensor, integer_qtensor, real_qtensor
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    QuantWrapper,
    calibrate,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.operators.cases.base import Body, bench, functional
from tests.routes import as_numbers, assert_one_arithmetic, mismatches, prepared, qconfig, run_onnx

ALL = torch.arange(-128.0, 128.0)
SCALES = st.floats(2.0**-13, 8.0, width=32)


@pytest.fixture(autouse=True)
def _on_bayes() -> None:
    set_march(March.BAYES)


def _integers(grid: Tensor, scale: float, dtype: str = "qint8") -> QTensor:
    return integer_qtensor(grid, torch.tensor([scale]), as_dtype(dtype))


@given(SCALES, st.floats(-1e3, 1e3) | st.integers(-130, 130), st.sampled_from(sorted(RELATIONS)))
def test_a_number_is_compared_as_with_the_real_values(scale: float, number: float, relation: str) -> None:
    x = _integers(ALL, scale)
    for value in (number, number * scale, float(torch.tensor(scale) * round(number))):  # anywhere, and on the grid
        wanted = getattr(operator, relation)(x.dequantize(), value)
        assert torch.equal(getattr(operator, relation)(x, value).int_repr(), wanted)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 0, True])
def test_numbers_beyond_every_grid(relation: str, number: float) -> None:
    compare = getattr(operator, relation)
    for x in (_integers(ALL, 0.1), real_qtensor(ALL * 0.1, torch.tensor([0.1]), as_dtype("qint8"))):
        assert torch.equal(compare(x, number).int_repr(), compare(x.dequantize(), number))


def test_every_number_is_put_between_its_neighbours_in_int16() -> None:
    grid, scale = torch.arange(-32768.0, 32768.0), torch.tensor(0.00123)
    values = grid * scale
    assert torch.equal(fp.on_grid_between(values, scale, -32768, 32767), grid)
    between = torch.nextafter(values, torch.tensor(float("inf")))
    assert torch.equal(fp.on_grid_between(between, scale, -32768, 32767), grid + 0.5)


@given(SCALES, SCALES, st.sampled_from(["qint8", "qint16"]))
def test_tensors_are_compared_as_their_real_values(scale_a: float, scale_b: float, dtype: str) -> None:
    size = as_dtype(dtype).max
    generator = torch.Generator().manual_seed(0)
    grids = [torch.randint(-size - 1, size + 1, (2000,), generator=generator).float() for _ in range(2)]
    a, b = _integers(grids[0], scale_a, dtype), _integers(grids[1], scale_b, dtype)
    real_a, real_b = (q.plain().double() * float(q.scale) for q in (a, b))
    # A multiplier of 16 (24) bits cannot tell values apart that differ by less than its own rounding.
    is_clear = (real_a - real_b).abs() > torch.maximum(real_a.abs(), real_b.abs()) * 2.0 ** (
        -16 if dtype == "qint8" else -24
    )
    for relation, compare in RELATIONS.items():
        found = compare(a, b).int_repr()
        assert torch.equal(found[is_clear], compare(real_a, real_b)[is_clear])
        mirrored = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(relation, relation)
        assert torch.equal(found, RELATIONS[mirrored](b, a).int_repr())


def test_values_of_one_scale_are_compared_exactly() -> None:
    for left in (
        _integers(ALL.reshape(-1, 1), 0.3),
        real_qtensor(ALL.reshape(-1, 1) * 0.3, torch.tensor([0.3]), as_dtype("qint8")),
    ):
        right = _integers(ALL, 0.3)
        for compare in RELATIONS.values():
            assert torch.equal(compare(left, right).int_repr(), compare(ALL.reshape(-1, 1), ALL))


def test_booleans_are_tensors_of_their_own_format() -> None:
    mask = _integers(ALL, 0.1) > 0
    assert mask.dtype == qbool and mask.int_repr().dtype == torch.bool
    assert torch.equal(mask.dequantize(), (ALL > 0).float())
    assert torch.equal(mask.float().dequantize(), mask.to(torch.float32).dequantize())
    assert mask.float().dtype == "qint8" and mask.float().range == (0, 64)
    assert torch.equal(mask.long(), (ALL > 0).long()) and mask.int().dtype == torch.int32
    assert int(mask.long().sum()) == 127
    assert mask.reshape(2, -1)[1, :3].dtype == qbool
    for copied in (copy.deepcopy(mask), QTensor(ALL > 0, 1.0, "qbool")):
        assert torch.equal(copied.int_repr(), mask.int_repr()) and copied.dtype == qbool
    assert bool(mask.any().int_repr()) and not bool(mask.all().int_repr())
    assert torch.equal((mask & (ALL < 5)).int_repr(), ((ALL < 5) & mask).int_repr())
    assert torch.equal((~mask ^ mask).int_repr(), torch.ones(256, dtype=torch.bool))
    assert torch.equal((mask | True).int_repr(), torch.ones(256, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"works on booleans, got qint8, .*Compare first"):
        _integers(ALL, 0.1) & mask
    with pytest.raises(NotImplementedError, match="cannot turn a qint8 QTensor into long"):
        _integers(ALL, 0.1).long()


def test_calibration_compares_real_values() -> None:
    x = real_qtensor(torch.tensor([0.1, 0.3]), torch.ones(1), as_dtype("qint8"), is_rounded=False)
    assert (x > 0.2).int_repr().tolist() == [False, True]
    assert (x == x).int_repr().tolist() == [True, True]


class Attention(nn.Module):
    """Scores, a mask, softmax."""

    def __init__(self, value: float, spelling: str) -> None:
        super().__init__()
        self.value, self.spelling = value, spelling
        self.softmax = nn.Softmax(-1)

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        if self.spelling == "where":
            return self.softmax(torch.where(mask == 0, self.value, scores))
        if self.spelling == "where-tensor":
            return self.softmax(torch.where(mask != 0, scores, torch.tensor(self.value)))
        return self.softmax(scores.masked_fill(mask == 0, self.value))


@pytest.mark.parametrize("spelling", ["masked_fill", "where", "where-tensor"])
@pytest.mark.parametrize("value", [-float("inf"), -1e9, -1e4])
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_masked_scores_count_for_nothing(value: float, spelling: str, dtype: str, tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 8, 8, generator=generator)
    scores[0, 0, 0] -= 6  # in a row of small scores too
    mask = torch.randint(0, 2, (2, 1, 1, 8), generator=generator)
    mask[..., 0] = 1
    model = bench(Attention(value, spelling), 1, 2)
    qat = prepared(model, (scores, mask), dtype)
    assert_one_arithmetic(qat, (scores, mask), tmp_path)
    wanted = model(scores, mask)[1]
    for state in FakeQuantState.VALIDATION, FakeQuantState.QAT:
        set_fake_quantize(qat, state)
        found = qat(scores, mask)[1]
        assert (found[(mask == 0).expand_as(found)] == 0).all()
        assert float((found - wanted).abs().max()) < (0.05 if dtype == "qint8" else 0.002)


def test_what_stands_for_infinity_is_at_the_end_of_the_range_in_training_too() -> None:
    qat = prepared(bench(Body(lambda x, m: x.masked_fill(m, -1e9)), 1, 2), (torch.randn(64), torch.arange(64) > 40))
    small, mask = torch.randn(64) / 10, torch.arange(64) < 9
    for state in FakeQuantState.VALIDATION, FakeQuantState.QAT:
        set_fake_quantize(qat, state)
        assert (qat(small, mask)[0].int_repr()[mask] == -128).all()


def test_masked_fill_of_a_tensor_alone_keeps_its_scale() -> None:
    x, mask = _integers(ALL, 0.25), torch.arange(256) % 2 == 0
    x.set_range(-128, 100)
    out = x.masked_fill(mask, 31.6)
    assert torch.equal(out.int_repr(), ALL.masked_fill(mask, 126).to(torch.int8)) and out.range == (-128, 126)
    trained = real_qtensor(ALL * 0.25, torch.tensor([0.25]), as_dtype("qint8")).masked_fill(bool_qtensor(mask), 31.6)
    assert torch.equal(trained.int_repr(), out.int_repr())
    with pytest.raises(NotImplementedError, match=r"nn\.Where\(\)\(mask, value, x\)"):
        x.masked_fill(mask, -1e9)


@pytest.mark.parametrize("body", [horizon_nn.Div(), functional(lambda f, x, y: f.div(x, y))()])
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_divisors_near_zero_give_large_finite_quotients(body: nn.Module, dtype: str, tmp_path: Any) -> None:
    x, y = torch.linspace(-1, 1, 101), torch.linspace(-2, 2, 101)
    y[50] = 0.0
    qat = prepared(bench(body, 2), (x, y), dtype)
    assert_one_arithmetic(qat, (x, y), tmp_path, [(3 * x, 0 * y), (x, -y)])
    for state in FakeQuantState.QAT, FakeQuantState.VALIDATION:
        set_fake_quantize(qat, state)
        leaves = [v.clone().requires_grad_() for v in (x, y)]
        out = qat(*leaves)[1]
        out.sum().backward()
        assert torch.isfinite(out).all() and all(torch.isfinite(v.grad).all() for v in leaves)  # type: ignore[union-attr, arg-type]
        assert torch.allclose(out[:45], (x / y)[:45], atol=0.2)


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("body", [horizon_nn.Div(), functional(lambda f, x, y: f.div(x, y))()])
def test_one_batch_calibrates_a_quotient(body: nn.Module, dtype: str) -> None:
    """The divisor has no scale when the first batch comes, and is not kept from zero by the one that it begins with."""
    set_march(March.NASH_M)
    x, y = torch.linspace(-1, 1, 101), torch.linspace(0.01, 0.2, 101)
    qat = prepare_qat_fx(bench(body, 2).eval(), {"": qconfig(dtype)})
    calibrate(qat, [(x, y)], progress=False)
    wanted = x / y
    assert (qat(x, y)[1] - wanted).norm() < (0.1 if dtype == "qint8" else 0.01) * wanted.norm()


@pytest.mark.in_turns("shape", "function", of=2)
@pytest.mark.parametrize("shape", [(0, 3), (1,), (1, 1, 1, 1), ()])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.maximum(x, y),
        lambda x, y: torch.where(x > y, x, -1e9),
        lambda x, y: x.masked_fill(y > 0, 2.0),
        lambda x, y: torch.stack([x, y]),
        lambda x, y: x / (y * y + 1),
        lambda x, y: torch.add(x, y, alpha=3) * (x == y),
    ],
)
def test_shapes_at_the_edge(function: Any, shape: tuple[int, ...], tmp_path: Any) -> None:
    calibration = torch.randn(2, 5), torch.randn(2, 5)
    inputs = torch.randn(shape), torch.randn(shape)
    for dtype in ("qint8", "qint16"):
        qat = prepared(bench(Body(function), 2), calibration, dtype)
        assert_one_arithmetic(qat, inputs, tmp_path)


@given(st.integers(1, 1 << 15), st.sampled_from(["qint8", "qint16"]), SCALES, SCALES)
def test_the_larger_of_two_is_the_larger_of_the_requantized(seed: int, dtype: str, first: float, second: float) -> None:
    d = as_dtype(dtype)
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(d.min, d.max + 1, (50,), generator=generator).float() for _ in range(2))
    factors = [
        fp.choose_factor(torch.tensor([r], dtype=torch.float64), d.min, d.max, d.max + 1) for r in (first, second)
    ]
    apart = [fp.requantize(q, f, -1, d.min, d.max) for q, f in zip((a, b), factors, strict=True)]
    assert torch.equal(fp.extremum(a, b, *factors, False, d.min, d.max), torch.maximum(*apart))
    assert torch.equal(fp.extremum(a, b, *factors, True, d.min, d.max), torch.minimum(*apart))


def test_blocks_give_what_the_whole_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-32768, 32768, (3, 100_000), generator=generator).float() for _ in range(2))
    half = torch.tensor([0.51], dtype=torch.float64)
    for call in (
        lambda x, y: fp.add(x, y, 0.3, 0.4, False, -32768, 32767),
        lambda x, y: fp.mul(x, y, half / 32768, -32768, 32767),
        lambda x, y: fp.div(x, y, 77.0, 128.0, -32768, 32767),
        lambda x, y: fp.extremum(x, y, half, half, False, -32768, 32767),
        lambda x, y: fp.compare(x, y, 1.0, 1.3, False, "le"),
        lambda x, y: fp.requantize(x, half, -1, -32768, 32767),
    ):
        parts = [call(x, y) for x, y in zip(a.split(33_333, 1), b.split(33_333, 1), strict=True)]
        assert torch.equal(call(a, b), torch.cat(parts, 1))
        assert torch.equal(call(a.T, b.T), torch.cat(parts, 1).T)


def test_the_three_forms_of_a_functional_have_the_same_methods() -> None:
    for cls in (FloatFunctional, QATFunctional, QFunctional):
        missing = [name for name in FUNCTIONAL_METHODS if not hasattr(cls, name)]
        assert not missing, (cls, missing)
    assert all(row_named(name) is not None for name in FUNCTIONAL_METHODS.values())


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x, y: f.add(x, y),
        lambda f, x, y: f.mul(x, y),
        lambda f, x, y: f.cat([x, y], dim=1),
        lambda f, x, y: f.add_scalar(x, 0.5),
        lambda f, x, y: f.mul_scalar(x, 0.5),
        lambda f, x, y: f.add_relu(x, y),
        lambda f, x, y: f.matmul(x, y),
    ],
)
def test_functionals_of_torch_are_known(call: Any, tmp_path: Any) -> None:
    theirs = pytest.importorskip("torch.ao.nn.quantized", reason="torch has dropped its FloatFunctional")
    body = functional(call)()
    body.op = theirs.FloatFunctional()
    inputs = torch.randn(3, 4, 4), torch.randn(3, 4, 4)
    qat = prepared(bench(body, 2), inputs)
    assert isinstance(qat.body.op, QATFunctional)
    assert_one_arithmetic(qat, inputs, tmp_path)


@pytest.mark.parametrize("opset", [13, 15, 18, 20])
def test_every_opset_has_the_operators(opset: int, tmp_path: Any) -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        mask = (x >= y) & ~(x == y.amax(1, keepdim=True)) | ((x != 0.5) ^ (y < 2)).all(1, keepdim=True)
        mask = torch.logical_or(mask, (x > y).any(dim=0))
        return torch.where(mask, torch.maximum(x, y), x / (y * y + 1)).masked_fill(x < -1, -1e9)

    inputs = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    quantized = convert_fx(prepared(bench(Body(body), 2), inputs, "qint16"))
    model = export_quantized_onnx(quantized, inputs, tmp_path / "model.onnx", opset_version=opset)
    for optimization in ("off", "on"):
        assert mismatches(as_numbers(quantized(*inputs)), run_onnx(model, inputs, optimization)) == 0


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (lambda x, y: torch.hstack([x, y]), "torch.cat"),
        (lambda x, y: torch.addcmul(x, y, y, value=0), "a number other than 0"),
        (lambda x, y: torch.lerp(x, y, 0), "its first operand"),
        (lambda x, y: x % 2, "DeQuantStub"),
        (lambda x, y: torch.div(x, y, rounding_mode="trunc"), "divide first"),
    ],
)
def test_what_has_no_form_says_what_to_write(function: Any, advice: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=advice):
        prepare_qat_fx(bench(Body(function), 2), {"": default_qat_8bit_fake_quant_qconfig})


def test_a_chip_without_the_operator_refuses_the_method() -> None:
    set_march(March.BERNOULLI2)
    with pytest.raises(UnsupportedOperatorError, match=r"FloatFunctional\.maximum.*bernoulli2.*bayes"):
        prepare_qat_fx(
            bench(functional(lambda f, x, y: f.maximum(x, y))(), 2), {"": default_qat_8bit_fake_quant_qconfig}
        )


@pytest.mark.parametrize(
    ("group", "shapes", "broken"),
    [
        ("bernoulli2", [(1, 8, 4, 4), (1, 8, 4, 4)], []),
        ("bernoulli2", [(1, 4096, 4, 4), (1, 4096, 4, 4)], ["C <= 2048"]),
        ("bernoulli2", [(1, 8, 4, 4)], ["two tensors, no constant"]),
        ("bayes", [(1, 8, 4, 4)], []),
        ("bayes", [(2, 8, 4, 4), (2, 8, 1, 1)], []),
        ("bayes", [(2, 8, 4, 4), (1, 8, 1, 1)], ["one operand broadcast, on other axes than N"]),
        ("bayes", [(2, 8, 1, 4), (2, 8, 4, 1)], ["one operand broadcast, on other axes than N"]),
    ],
)
def test_limits_of_sums(group: str, shapes: list[tuple[int, ...]], broken: list[str]) -> None:
    use = Use("add", "", tuple(TensorFact(shape, "qint8") for shape in shapes))
    for name in ("add", "sub", "mul"):
        row = row_named(name)
        assert row is not None
        assert [limit.text for limit in row.marches[group].limits if not limit.holds(use)] == broken


@pytest.mark.parametrize("choose", [lambda x: torch.where(x > 0, x, 2000.0), lambda x: x.masked_fill(x <= 0, 2000.0)])
def test_a_large_number_beside_large_values_is_itself(choose: Any) -> None:
    x = torch.linspace(-1500, 1500, 201)
    qat = prepared(QuantWrapper(Body(choose)), (x,))
    with torch.no_grad():
        exact, converted = qat(x), convert_fx(qat)(x)
        set_fake_quantize(qat, FakeQuantState.QAT)
        trained = qat(x)
    for out in (exact, converted, trained):
        assert (out - choose(x)).abs().max() < 16  # one step of the result


def test_a_number_far_beyond_the_values_is_infinity_and_said_to_be() -> None:
    x = torch.randn(2, 4, 6, 6)
    with pytest.warns(QuantizationWarning, match=r"Where.*: 2000 is 100 times or more beyond .* \(up to 1\)"):
        out = prepared(QuantWrapper(Body(lambda x: torch.where(x > 0, x, 2000.0))), (x.clamp(-1, 1),))(x)
    assert 16 < out.max() < 18  # the end of the range
