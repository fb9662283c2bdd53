"""What cases cannot say of reductions, selection and shapes: ties, exactness, edge inputs, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import horizon_plugin_pytorch as horizon
from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.analysis.limits import find_limits
from horizon_plugin_pytorch.errors import OperatorInputError, TraceError, UnsupportedOperatorError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    QuantWrapper,
    convert_fx,
    default_qat_8bit_fake_quant_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.operators.cases import bench
from tests.operators.cases.base import Body
from tests.routes import as_numbers, assert_one_arithmetic, mismatches, prepared, run_onnx

SIZES = st.integers(1, 6)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.booleans(), st.data())
def test_of_equal_values_topk_takes_the_lowest_position(values: list[int], largest: bool, data: Any) -> None:
    k = data.draw(st.integers(0, len(values)))
    q = torch.tensor(values, dtype=torch.float32)
    found, positions = fp.topk(q, k, 0, largest)
    wanted = sorted(range(len(values)), key=lambda i: (-values[i] if largest else values[i], i))[:k]
    assert positions.tolist() == wanted
    assert found.tolist() == [values[i] for i in wanted]


@pytest.mark.parametrize("size", [511, 513, 70_000])
def test_topk_tells_neighbours_apart_in_long_axes_of_the_widest_values(size: int) -> None:
    q = torch.full((size,), 32767.0)
    q[-2:] = torch.tensor([32766.0, -32768.0])
    assert fp.topk(q, 3, 0, True)[1].tolist() == [0, 1, 2]
    assert fp.topk(q, 3, 0, False)[1].tolist() == [size - 1, size - 2, 0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.max(1), lambda x: x.min(1), lambda x: x.sort(1), lambda x: x.sort(1, True), lambda x: x.topk(3, 1),
        lambda x: x.topk(3, 1, largest=False), lambda x: x.kthvalue(3, 1), lambda x: x.median(1),
        lambda x: torch.argsort(x, 1), lambda x: x.argmax(), lambda x: x.argmin(1), lambda x: x.flatten().topk(9),
    ],
)  # fmt: skip
def test_ties_are_the_same_everywhere(function: Callable, tmp_path: Path) -> None:
    x = torch.randint(-1, 2, (3, 8, 5)).float()
    model = bench(Body(function), picks=())
    qat = prepared(model, (x,))
    assert_one_arithmetic(qat, (x,), tmp_path, [(-x,), (x * 0,)])
    set_fake_quantize(qat, FakeQuantState.QAT)
    with torch.no_grad():
        trained = as_numbers(qat(x))
        set_fake_quantize(qat, FakeQuantState.VALIDATION)
        assert mismatches(trained, as_numbers(qat(x))) == 0


def _reference(values: list[int], kind: str) -> Fraction:
    if kind == "variance":
        return Fraction(len(values) * sum(v * v for v in values) - sum(values) ** 2)
    sums: dict[str, Callable[[list[int]], int]] = {
        "squares": lambda v: sum(x * x for x in v), "magnitudes": lambda v: sum(map(abs, v)),
        "largest": lambda v: max(map(abs, v)), "smallest": lambda v: min(map(abs, v)),
    }  # fmt: skip
    return Fraction(sums[kind](values))


@given(
    st.lists(st.integers(-32768, 32767), min_size=1, max_size=30),
    st.sampled_from(["squares", "variance", "magnitudes", "largest", "smallest"]),
    st.floats(1e-9, 10.0),
)
def test_a_measure_is_the_exact_sum_times_the_factor(values: list[int], kind: str, factor: float) -> None:
    q = torch.tensor(values, dtype=torch.float32)
    is_double = fp.is_wide(kind, len(values), 32768)
    found = int(fp.norm(q, [0], False, kind, False, factor, is_double, -32768, 32767))
    wanted = math.floor(float(_reference(values, kind)) * factor + 0.5)
    assert found == max(-32768, min(32767, wanted))


@given(st.lists(st.integers(-32768, 32767), min_size=1, max_size=30))
def test_a_root_is_the_nearest_integer(values: list[int]) -> None:
    q = torch.tensor(values, dtype=torch.float32)
    found = int(fp.norm(q, [0], False, "squares", True, 1.0, True, -(2**31), 2**31))
    exact = sum(v * v for v in values)
    assert found == (math.isqrt(4 * exact) + 1) // 2


def _model(function: Callable) -> nn.Module:
    return bench(Body(function), picks=())


def _prepare(function: Callable, march: March = March.BAYES) -> nn.Module:
    set_march(march)
    return prepare_qat_fx(_model(function), {"": default_qat_8bit_fake_quant_qconfig})


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda x: torch.masked_select(x, torch.tensor(True)), "torch.where"),
        (lambda x: x.scatter(1, torch.zeros(1, 1, 1, 1, dtype=torch.long), 1.0), "torch.cat"),
        (lambda x: torch.prod(x, 1), "Multiply the slices"),
        (lambda x: torch.norm(x, 3, 1), "1, 2, inf and -inf"),
        (lambda x: torch.linalg.norm(x, 2), "vector_norm"),
        (lambda x: torch.linalg.norm(x, 2, (1, 2)), "vector_norm"),
        (lambda x: x.sum(1, dtype=torch.float64), "leave dtype out"),
        (lambda x: x.cumsum(1, dtype=torch.float64), "leave dtype out"),
    ],
)
def test_what_has_no_form_says_what_to_write_instead(function: Callable, remedy: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=remedy):
        _prepare(function)


def _loop(x: Any) -> Any:
    return torch.cat([row for row in x], 0)  # noqa: C416 - what is tested


def test_code_without_a_graph_says_what_to_write_instead() -> None:
    with pytest.raises(TraceError, match=r"test_selection.py:\d+.*unbind"):
        _prepare(_loop)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.topk(2, 1), lambda x: torch.gather(x, 1, torch.zeros(2, 1, 4, 4, dtype=torch.long)),
        lambda x: x.transpose(1, 2), lambda x: x.expand(2, 3, 4, 4), lambda x: x.repeat(1, 2, 1, 1),
        lambda x: F.pad(x, (1, 1)), lambda x: x.min(1), lambda x: torch.argsort(x, 1),
    ],
)  # fmt: skip
def test_bernoulli2_does_not_have_it(function: Callable) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"on bernoulli2: it is supported on bayes"):
        _prepare(function, March.BERNOULLI2)
    assert _prepare(function, March.BAYES) is not None


def test_bernoulli2_has_pad_modules_and_argmax() -> None:
    assert _prepare(lambda x: x.argmax(1), March.BERNOULLI2) is not None
    set_march(March.BERNOULLI2)
    assert prepare_qat_fx(bench(nn.ZeroPad2d(1)), {"": default_qat_8bit_fake_quant_qconfig}) is not None


@pytest.mark.parametrize(
    ("function", "limit"),
    [
        (lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), "mode is not reflect"),
        (lambda x: x.permute(1, 0, 2, 3), "the batch axis stays first"),
        (lambda x: x.transpose(0, 1), "the batch axis stays first"),
        (lambda x: x.sum(0), "over C, H and W only"),
        (lambda x: x.mean(), "over C, H and W only"),
    ],
)
def test_check_model_names_the_limit(function: Callable, limit: str) -> None:
    x = torch.randn(2, 3, 4, 4)
    quantized = convert_fx(prepared(_model(function), (x,)))
    assert limit in [f.limit for f in find_limits(quantized, (x,), March.BAYES)]


@pytest.mark.parametrize(
    "function",
    [lambda x: x.permute(0, 2, 3, 1), lambda x: x.transpose(-1, 1), lambda x: F.pad(x, (1, 1)), lambda x: x.sum(1)],
)
def test_check_model_lets_pass_what_fits(function: Callable) -> None:
    x = torch.randn(2, 3, 4, 4)
    assert not find_limits(convert_fx(prepared(_model(function), (x,))), (x,), March.BAYES)


def test_two_scales_are_not_compared_as_if_they_were_one() -> None:
    a, b = (QTensor(torch.arange(4.0), torch.tensor([scale]), "qint8") for scale in (1.0, 0.5))
    with pytest.raises(NotImplementedError, match="two QTensors"):
        torch.max(a, b)
    assert a.expand_as(b).scale == 1


def test_a_quantized_mask_is_refused_with_a_remedy() -> None:
    values = QTensor(torch.arange(4.0), torch.tensor([1.0]), "qint8")
    mask = QTensor(torch.ones(4), torch.tensor([1.0]), "qint8")
    with pytest.raises(NotImplementedError, match="torch.where"):
        values[mask]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.norm(dim=1), lambda x: x.var(1), lambda x: F.normalize(x), lambda x: x.cumsum(1),
        lambda x: x.topk(2, 1), lambda x: x.sort(1), lambda x: x.max(1), lambda x: x.unfold(2, 2, 1),
        lambda x: x[:, [0, 2]], lambda x: torch.diagonal(x, 0, 2, 3), lambda x: x.tril(),
    ],
)  # fmt: skip
def test_an_empty_batch_has_empty_results(function: Callable) -> None:
    x = torch.randn(2, 3, 4, 4)
    qat = prepared(_model(function), (x,))
    quantized = convert_fx(qat)
    with torch.no_grad():
        wanted = function(x[:0])
        for model in (qat, quantized):
            found = model(x[:0])[0]
            shapes = [tuple(t.shape) for t in (found if isinstance(found, tuple) else (found,))]
            assert shapes == [tuple(t.shape) for t in (wanted if isinstance(wanted, tuple) else (wanted,))]


@pytest.mark.parametrize(
    "function",
    [lambda x: x.topk(9, 1), lambda x: x.var(1, correction=3), lambda x: x.norm(dim=5), lambda x: x.sum(4)],
)
def test_impossible_axes_and_counts_are_errors(function: Callable) -> None:
    x = torch.randn(2, 3, 4, 4)
    with pytest.raises((OperatorInputError, RuntimeError, IndexError)):
        prepared(_model(function), (x,))(x)


@pytest.mark.parametrize("opset", range(13, 21))
def test_every_opset(opset: int, tmp_path: Path) -> None:
    def function(x: Tensor) -> Any:
        values, positions = x.topk(3, 1)
        largest = x.max(1, keepdim=True)
        rows = F.unfold(x, 2, 1, 1).norm(dim=1, keepdim=True)
        return (
            x.gather(1, positions), values.cumsum(1), largest.indices, x.std(1), F.normalize(x).tril(), rows,
            x[:, [0, 2], [1, 1]], x.amin((2, 3)), F.pad(x, (1, 1, 0, 2), "replicate"), torch.rot90(x, 1, (2, 3)),
        )  # fmt: skip

    x = torch.randn(2, 4, 4, 4)
    quantized = convert_fx(prepared(_model(function), (x,)))
    model = export_quantized_onnx(quantized, (x,), tmp_path / "model.onnx", opset_version=opset)
    with torch.no_grad():
        wanted = as_numbers(quantized(x))
    for optimization in ("off", "on"):
        assert mismatches(wanted, run_onnx(model, [x], optimization)) == 0


class Positions(nn.Module):
    """A segmentation head: its output is positions, without DeQuantStub."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(), nn.Conv2d(3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return horizon.functional.argmax(self.conv(self.quant(x)), dim=1, keepdim=True)


def test_positions_leave_a_model_without_a_stub(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 6, 6)
    quantized = assert_one_arithmetic(prepared(Positions(), (x,)), (x,), tmp_path)
    assert quantized(x).dtype == torch.int64


class Decode(nn.Module):
    """Positions are taken apart, and choose from another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), horizon.quantization.DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        q = self.quant(x)
        scores, positions = q.flatten(2).max(1)[0].topk(4, dim=1)
        row, column = positions // 6, positions % 6
        chosen = q.flatten(2).gather(2, positions.unsqueeze(1).expand(-1, 3, -1))
        return self.dequant(scores), row, column, self.dequant(chosen)


def test_positions_can_be_computed_with(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 6, 6)
    assert_one_arithmetic(prepared(Decode(), (x,)), (x,), tmp_path, [(x.flip(0),)])


def test_a_normalized_zero_group_has_a_small_gradient() -> None:
    x = torch.randn(2, 4, 3)
    x[0] = 1e-5  # rounds to zero
    qat = prepared(bench(Body(lambda x: F.normalize(x, dim=1))), (x,))
    for state in (FakeQuantState.QAT, FakeQuantState.VALIDATION):
        set_fake_quantize(qat, state)
        leaf = x.clone().requires_grad_()
        qat(leaf)[1].sum().backward()
        assert leaf.grad is not None and float(leaf.grad.abs().max()) < 1e3


def test_a_constant_group_has_no_deviation_and_a_finite_gradient() -> None:
    x = torch.full((2, 4, 3), 0.7)
    x[1] = torch.randn(4, 3)
    qat = prepared(bench(Body(lambda x: x.std(1))), (x,))
    leaf = x.clone().requires_grad_()
    out = qat(leaf)[1]
    out.sum().backward()
    assert not bool(out[0].any())
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all())


class DropPath(nn.Module):
    """Stochastic depth as it is usually written."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.9)
        return x.div(0.9) * mask


def test_stochastic_depth_is_prepared_in_eval_mode() -> None:
    x = torch.randn(2, 3, 4)
    assert prepared(bench(DropPath()).eval(), (x,))(x)[1].shape == x.shape
    with pytest.raises(UnsupportedOperatorError, match="eval mode"):
        prepare_qat_fx(bench(DropPath()).train(), {"": default_qat_8bit_fake_quant_qconfig})


@pytest.mark.parametrize("function", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout2d])
def test_dropout_acts_while_training_as_torch_does_by_default(function: Callable) -> None:
    x = torch.rand(2, 8, 6, 6) + 1
    qat = prepare_qat_fx(_model(function), {"": default_qat_8bit_fake_quant_qconfig}).train()
    torch.manual_seed(3)
    found = qat(x)[0].dequantize()
    torch.manual_seed(3)
    wanted = function(qat.quant_0(x).dequantize())
    assert torch.equal(found, wanted)


X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(9))


def test_dequantizing_several_tensors_at_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()

        def forward(self, x: Tensor) -> Any:
            return self.dequant(self.quant(x).chunk(2, 1))

    qat = prepared(Two(), (X,))
    for stage in (qat, convert_fx(qat)):
        assert [type(t) for t in stage(X)] == [Tensor, Tensor]


@pytest.mark.parametrize(
    "take",
    [
        lambda x, i: x[i % 2],
        lambda x, i: x[:, i],
        lambda x, i: x[..., i],
        lambda x, i: x[:, None, i, 1:],
        lambda x, i: x[..., i, None, :],
        lambda x, i: x[:, i, i],
    ],
)
def test_a_computed_position_without_axes_selects_on_every_route(take: Any, tmp_path: Any) -> None:
    model = QuantWrapper(Body(lambda x: take(x, x.flatten().argmax() % 4))).eval()
    others = [(torch.randn(X.shape, generator=torch.Generator().manual_seed(seed)),) for seed in range(5)]
    assert_one_arithmetic(prepared(model, (X,)), (X,), tmp_path, others)


@pytest.mark.parametrize("padding", [(-1, 2), (2, -1), (-2, -1), (1, 2)])
def test_circular_padding_crops_where_it_is_negative(padding: tuple[int, int]) -> None:
    quantized = convert_fx(prepared(QuantWrapper(Body(lambda x: F.pad(x, padding, "circular"))), (X[0],)))
    assert (quantized(X[0]) - F.pad(X[0], padding, "circular")).abs().max() < 0.03


@pytest.mark.parametrize("move", [lambda m, i: m.gather(-1, i), lambda m, i: m[..., i[0, 0, 0]]])
def test_booleans_moved_by_computed_positions_stay_booleans(move: Any) -> None:
    model = QuantWrapper(Body(lambda x: move(x > 0, x.argsort(-1)).float()))
    out = convert_fx(prepared(model, (X,)))(X)
    assert type(out) is Tensor and set(out.unique().tolist()) == {0.0, 1.0}
