"""Tables with proofs: every declared function, over all inputs of its table."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from horizon_plugin_pytorch import nn as horizon_nn
from horizon_plugin_pytorch.analysis.limits import find_limits
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import (
    ConversionError,
    OperatorInputError,
    QuantizationConfigError,
    TableWarning,
    UnsupportedOperatorError,
)
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.qat.segment_lut import DECLARATIONS, Function, SegmentLUT
from horizon_plugin_pytorch.operators import finite
from horizon_plugin_pytorch.qtensor import QTensor, integer_qtensor
from horizon_plugin_pytorch.quantization import (
    QuantWrapper,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    prepare_qat_fx,
)
from tests.operators.cases.base import Body, bench
from tests.routes import calibrate, prepared, qconfig
from tests.strategies import ratios

ARGUMENTS: dict[str, tuple] = {"pow": (3,), "threshold": (0.5, 0.25), "segment_lut": (torch.sinc,)}
SMOOTH = [f for f in DECLARATIONS if f.name not in ("square",)]


def functions(declared: Function) -> list[Any]:
    """What a declaration puts into tables, for each of its module classes."""
    if not declared.modules:
        return [declared.function]
    return [declared.tabulated(cls(*ARGUMENTS.get(declared.name, ()))) for cls in declared.modules]


def table_of(declared: Function, function: Any, in_scale: float, in_dtype: Any, out_dtype: Any) -> tuple[Any, Tensor]:
    """A table whose output scale is what an observer gives, and the unrounded function in output steps."""
    x = torch.arange(in_dtype.min, in_dtype.max + 1, dtype=torch.float64) * torch.tensor(in_scale).double()
    y = function(x)
    scale = max(float(y.abs().max()), 1e-3) / (out_dtype.max + 0.5)
    scale = max(scale, 1.0) if declared.is_whole else scale
    lut = SegmentLUT(function, declared.name, qconfig(str(out_dtype)), declared.is_whole)
    lut.activation_post_process.set_qparams(scale)
    quantized = SegmentLUT.quantized_class.from_qat(lut)
    table = quantized.table(torch.tensor([in_scale]), in_dtype)
    return table, (y / quantized.scale.double()).clamp(out_dtype.min, out_dtype.max)


@pytest.mark.parametrize("reach", [0.9, 4.0, 40.0])
@pytest.mark.parametrize("declared", SMOOTH, ids=lambda f: f.name)
def test_every_int8_table_is_rounded_to_nearest(declared: Function, reach: float) -> None:
    for function in functions(declared):
        for out_dtype in (qint8, qint16):
            table, exact = table_of(declared, function, reach / 127.5, qint8, out_dtype)
            assert table.values.shape == (256,)
            assert torch.equal(table.values, table.values.round())
            assert torch.isfinite(exact).all()
            assert float((table.values.double() - exact).abs().max()) <= 0.5
            assert table.worst_error <= 0.5


@pytest.mark.parametrize("reach", [0.9, 4.0, 20.0])
@pytest.mark.parametrize("declared", SMOOTH, ids=lambda f: f.name)
def test_every_int16_table_is_within_two_steps_and_says_how_far(declared: Function, reach: float) -> None:
    for function in functions(declared):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TableWarning)
            table, exact = table_of(declared, function, reach / 32767.5, qint16, qint16)
        assert float((table.values.double() - exact).abs().max()) == table.worst_error
        if (declared.name, reach) != ("tan", 20.0):  # twelve poles are too many for 64 segments: a warning says so
            assert table.worst_error <= 2.0


@pytest.mark.parametrize("declared", SMOOTH, ids=lambda f: f.name)
def test_values_and_gradients_are_finite_on_every_grid(declared: Function) -> None:
    for function in functions(declared):
        for scale in (1 / 128, 0.03, 0.5):
            x = (torch.arange(-128, 128).float() * scale).requires_grad_()
            y = function(x)
            assert torch.isfinite(y).all()
            if y.requires_grad:
                y.sum().backward()
                assert torch.isfinite(x.grad).all()  # type: ignore[arg-type]


def test_ends_of_domains() -> None:
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    for function, wanted in (
        (finite.acos, [math.pi, math.pi, math.pi / 2, 0, 0]),
        (finite.asin, [-math.pi / 2, -math.pi / 2, 0, math.pi / 2, math.pi / 2]),
        (finite.acosh, [0, 0, 0, 0, math.acosh(2)]),
        (finite.atanh, [-6, -6, 0, 6, 6]),
        (finite.sqrt, [0, 0, 0, 1, math.sqrt(2)]),
        (finite.rsqrt, [100, 100, 100, 1, math.sqrt(0.5)]),
        (finite.log, [-10, -10, -10, 0, math.log(2)]),
        (finite.log1p, [-10, -10, 0, math.log(2), math.log(3)]),
        (finite.reciprocal, [-0.5, -1, 100, 1, 0.5]),
        (lambda v: finite.pow(v, 0.5), [0, 0, 0, 1, math.sqrt(2)]),
        (lambda v: finite.pow(v, -1), [-0.5, -1, 100, 1, 0.5]),
        (lambda v: finite.pow(v, -2), [0.25, 1, 100, 1, 0.25]),
        (lambda v: finite.pow(v, 0), [1, 1, 1, 1, 1]),
    ):
        torch.testing.assert_close(function(x), torch.tensor(wanted, dtype=torch.float32))


def converted(body: nn.Module, x: Tensor, dtype: str = "qint16") -> nn.Module:
    set_march(March.BAYES)
    return convert_fx(prepared(bench(body), (x,), dtype))


def test_the_error_of_a_table_is_shown_and_survives_a_copy() -> None:
    quantized = converted(nn.Sigmoid(), torch.linspace(-6, 6, 99))
    error = quantized.body.table_error()
    assert 0.5 <= error <= 1.0
    assert f"table_error={error:.2f} steps" in repr(quantized)
    assert copy.deepcopy(quantized).body.table_error() == error
    assert quantized.body.table_error(torch.tensor([0.05]), qint8) <= 0.5


def test_a_table_that_was_never_planned_says_so() -> None:
    lut = SegmentLUT.quantized_class.from_qat(SegmentLUT(torch.sin, "sin", qconfig()))
    assert "table_error" not in repr(lut)
    with pytest.raises(ConversionError, match="run it first"):
        lut.table_error()


def test_a_table_further_than_two_steps_warns_at_conversion_with_place_and_remedy() -> None:
    set_march(March.BAYES)
    qat = calibrate(
        prepare_qat_fx(QuantWrapper(horizon_nn.Sin()), {"": qconfig("qint16")}), [torch.linspace(-300, 300, 99)]
    )
    with pytest.warns(TableWarning) as caught:
        quantized = convert_fx(qat)
    text = str(caught[0].message)
    for word in ("`sin`", "at `module`", "output steps", "Narrow the range", "qint8"):
        assert word in text
    assert quantized.module.table_error() > 2


@pytest.mark.parametrize("cls", [horizon_nn.Sin, horizon_nn.Rsqrt, horizon_nn.HardLog, horizon_nn.SegmentLUT])
def test_users_set_the_parameters_of_tables(cls: Any) -> None:
    given = (torch.sin,) if cls is horizon_nn.SegmentLUT else ()
    x = torch.linspace(0.2, 6, 99)
    best = converted(cls(*given), x).body.table_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)
        worse = converted(cls(*given, auto_divide_strategy="evenly", max_segments=2), x).body.table_error()
        act = cls(*given)
        act.table_kwargs = {"auto_divide_strategy": "evenly", "max_segments": 2}
        assert converted(act, x).body.table_error() == worse > best
    with pytest.raises(QuantizationConfigError, match="auto_divide_strategy"):
        converted(cls(*given, auto_divide_strategy="nicely"), x)


def test_users_set_where_steep_functions_are_clipped() -> None:
    x = torch.tensor([0.001, 0.5, 2.0])
    assert float(converted(horizon_nn.Reciprocal(max_value=10), x)(x)[1].max()) == pytest.approx(10, abs=0.01)
    assert float(converted(horizon_nn.HardLog(min_value=-3), x)(x)[1].min()) == pytest.approx(-3, abs=0.01)
    assert float(converted(horizon_nn.Pow(-2, max_value=16), x)(x)[1].max()) == pytest.approx(16, abs=0.01)


COMPUTED = [f for f in DECLARATIONS if f.form is not None]


@settings(max_examples=8, deadline=None)
@given(ratios(-9, 3), ratios(-9, 3))
@pytest.mark.parametrize("declared", COMPUTED, ids=lambda f: f.name)
def test_what_is_computed_is_what_the_table_holds(declared: Function, in_scale: float, out_scale: float) -> None:
    module = declared.modules[0](2) if declared.name == "pow" else declared.modules[0]()
    for in_dtype, out_dtype, size in ((qint8, qint8, 1), (qint8, qint16, 256), (qint16, qint16, 256)):
        module.qconfig = qconfig(str(out_dtype))
        lut = SegmentLUT.from_float(module)
        lut.activation_post_process.set_qparams(out_scale / size)
        quantized = SegmentLUT.quantized_class.from_qat(lut)
        scale = torch.tensor([in_scale]) / (256 if in_dtype == qint16 else 1)
        table = quantized.table(scale, in_dtype)
        assert table.worst_error <= 0.5 or in_dtype == qint16
        q = torch.arange(in_dtype.min, in_dtype.max + 1).float()
        for part in (slice(None), slice(None, None, 37), slice(3, 8), slice(130, 131)):  # whole vectors, strides, tails
            out = quantized(integer_qtensor(q[part], scale, in_dtype)).plain()
            assert torch.equal(out, table.values[part])
        zero = integer_qtensor(torch.tensor([-0.0]), scale, in_dtype)
        assert torch.equal(quantized(zero).plain(), table.values[-in_dtype.min].reshape(1))


def test_a_floor_of_large_numbers_breaks_a_limit_of_the_chip() -> None:
    for largest, broken in ((9e5, 0), (3e6, 1)):
        x = torch.linspace(-largest, largest, 64).reshape(1, 4, 4, 4)
        findings = find_limits(converted(horizon_nn.Floor(), x, "qint8"), (x,), March.BAYES)
        assert len(findings) == broken
        assert all("magnitude <= 1e6" in finding.limit for finding in findings)


def test_whole_numbers_have_a_scale_of_at_least_one() -> None:
    x = torch.tensor([-0.4, 0.3, 0.2])
    for dtype in ("qint8", "qint16"):
        out = converted(horizon_nn.Ceil(), x, dtype)(x)[0]
        assert float(out.scale) == 1.0 and out.int_repr().tolist() == [0, 1, 1]
    big = torch.linspace(-1e4, 1e4, 9)
    assert float(converted(horizon_nn.Floor(), big, "qint8")(big)[0].scale) == pytest.approx(1e4 / 127.5)


def test_the_lowest_integer_saturates() -> None:
    q = integer_qtensor(torch.tensor([-128.0, -127.0, 0.0, 127.0]), torch.tensor([0.5]), qint8)
    assert q.abs().int_repr().tolist() == [127, 127, 0, 127] and q.abs().range == (0, 127)
    assert (-q).int_repr().tolist() == [127, 127, 0, -127]
    assert q.clamp(min=1e9).int_repr().tolist() == [127] * 4
    assert q.clamp(-1.2, 1.3).int_repr().tolist() == [-2, -2, 0, 3] and q.clamp(-1.2, 1.3).range == (-2, 3)


def test_limits_may_be_trained() -> None:
    x = QTensor(torch.tensor([-1.0, 0.25, 1.0]), torch.tensor([0.25]), "qint8").requires_grad_()
    high = torch.tensor([0.6], requires_grad=True)
    out = x.clamp(max=high)
    assert out.int_repr().tolist() == [-4, 1, 2]
    out.dequantize().sum().backward()
    assert x.grad.tolist() == [1, 1, 0] and high.grad.tolist() == [1]  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(0, 4, 2, 2), (1,), (1, 4), ()])
@pytest.mark.parametrize(
    "body", [nn.SiLU(), nn.PReLU(), nn.Hardtanh(), horizon_nn.Floor(), nn.LeakyReLU()], ids=lambda b: type(b).__name__
)
def test_unusual_shapes(body: nn.Module, shape: tuple[int, ...]) -> None:
    quantized = converted(copy.deepcopy(body), torch.linspace(-2, 2, 64).reshape(4, 4, 2, 2), "qint8")
    x = torch.rand(shape)
    assert quantized(x)[1].shape == shape


def test_a_table_keeps_the_layout_of_its_input() -> None:
    quantized = converted(nn.SiLU(), torch.randn(2, 4, 5, 6))
    x = torch.randn(2, 4, 5, 6)
    plain, last = quantized(x)[0], quantized(x.to(memory_format=torch.channels_last))[0]
    assert torch.equal(plain.int_repr(), last.int_repr())
    assert last.plain().is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(quantized.body(plain.expand(3, 2, 4, 5, 6)).int_repr()[1], quantized.body(plain).int_repr())


def test_atan2_is_right_on_the_axes_and_at_the_origin() -> None:
    set_march(March.BAYES)
    y = torch.tensor([0.0, 0.0, 0.0, 1.0, -1.0, 1.0, -1.0])
    x = torch.tensor([0.0, 1.0, -1.0, 0.0, 0.0, -1.0, -1.0])
    for dtype in ("qint8", "qint16"):
        quantized = convert_fx(prepared(bench(horizon_nn.Atan2(), 2), (y, x), dtype))
        out = quantized(y, x)[0]
        steps = torch.atan2(y, x) / out.scale
        assert float((out.int_repr() - steps).abs().max()) <= 0.51


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x: x**x, ("pow", "torch.exp(exponent * torch.log(x))")),
        (lambda x: (-2) ** x, ("pow", "positive")),
        (lambda x: torch.nn.functional.prelu(x, x.mean((0, 2, 3))), ("prelu", "weight is computed", "parameter")),
        (lambda x: x % 2, ("mod", "remainder", "before the QuantStub")),
        (lambda x: x.fmod(2.0), ("fmod", "remainder", "after the DeQuantStub")),
        (lambda x: x // 2, ("floordiv", "torch.floor(x / y)")),
        (lambda x: torch.floor_divide(x, x), ("floor_divide", "torch.floor(x / y)")),
        (lambda x: torch.round(x, decimals=2), ("round", "arguments")),
    ],
)
def test_what_has_no_table_says_what_to_write(body: Any, words: tuple[str, ...]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return body(x)

    set_march(March.BAYES)
    with pytest.raises(UnsupportedOperatorError) as error:
        prepare_qat_fx(QuantWrapper(Model()), {"": qconfig()})
    for word in (*words, "test_tables.py"):
        assert word in str(error.value)


def test_an_odd_axis_has_no_halves() -> None:
    quantized = converted(nn.GLU(1), torch.randn(2, 4))
    with pytest.raises(OperatorInputError, match="even size"):
        quantized(torch.randn(2, 3))


@pytest.mark.parametrize("function", [torch.reciprocal, torch.sqrt, torch.rsqrt])
def test_gradients_are_finite_where_the_function_is_steep(function: Any) -> None:
    model = prepare_qat_fx(QuantWrapper(Body(function)), {"": default_qat_8bit_fake_quant_qconfig})
    x = torch.tensor([[0.0, 1e-4, 0.5, 1.0, 2.0]], requires_grad=True)
    out = model(x)
    out.sum().backward()
    assert out.isfinite().all() and x.grad is not None and x.grad.isfinite().all() and bool((x.grad != 0).any())


class _Gain:
    """A function that depends on a number which the user may change."""

    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain)


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_a_function_that_changes_is_followed_by_its_table(dtype: str) -> None:
    set_march(March.NASH_M)
    x = torch.linspace(-2, 2, 64)
    net = prepared(QuantWrapper(horizon_nn.SegmentLUT(_Gain())), (x,), dtype)
    with torch.no_grad():
        before = net(x).clone()
        twin = net.module.twin()
        assert net.module.twin() is twin
        net.module.function.gain = 0.3
        after = net(x)
        assert torch.equal(after, convert_fx(copy.deepcopy(net))(x)) and not torch.equal(after, before)
