"""Models that write to parts of tensors, or in place, and modules that are called on constants too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import QuantizationWarning, UnsupportedOperatorError
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert, prepare, prepare_qat_fx
from tests.routes import assert_one_arithmetic, calibrate, qconfig


class _Model(nn.Module):
    """A layer, and what `function` does with its result."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.quant, self.dequant, self.fc, self.norm = QuantStub(), DeQuantStub(), nn.Linear(8, 8), nn.LayerNorm(8)
        self.query, self.embed = nn.Parameter(torch.linspace(-1, 1, 32).view(4, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.function(self, self.fc(self.quant(x))))


class _Wrapped(_Model):
    """The same in code that tracing does not enter."""

    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.inner(self.fc(self.quant(x))))


def _slice_of_constant(m: Any, x: Tensor) -> Tensor:
    x[..., :2] += m.query[:, :2]
    return x


def _interleaved(m: Any, x: Tensor) -> Tensor:
    out = x.new_zeros(2, 4, 16)
    out[..., 0::2], out[..., 1::2] = x.sin(), x.cos()
    return out


def _into_zeros(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(2, 4, 8)
    out[:, 2] = x[:, 1]
    return out


def _numbers(m: Any, x: Tensor) -> Tensor:
    x[:, 0] = 0.25
    x[x < 0] = 0.0
    return x


def _booleans(m: Any, x: Tensor) -> Tensor:
    mask = x > 0
    mask[:, 0], mask[..., -1] = True, False
    return x.masked_fill(mask, 0.5)


def _broadcast(m: Any, x: Tensor) -> Tensor:
    x[:, [0, 2]] = x[:, 1:2] * 0.5
    return x


def _named_twice(m: Any, x: Tensor) -> Tensor:
    before = x
    x += 1
    return before * 0.5


def _fused(m: Any, x: Tensor) -> Tensor:
    y = m.embed(x)
    y += x
    return y * x  # the input of the fused layer is still what it was


def _shared_with_constant(m: Any, x: Tensor) -> Tensor:
    return m.norm(x) + m.norm(m.query)  # one scale: the first has the larger range


def _float_layer_of_constant(m: Any, x: Tensor) -> Tensor:
    return x * m.embed(m.query).sigmoid()


_WRITES = [_slice_of_constant, _interleaved, _into_zeros, _numbers, _booleans, _broadcast, _named_twice, _fused,
           _shared_with_constant, _float_layer_of_constant]  # fmt: skip


@pytest.mark.parametrize("function", _WRITES, ids=lambda f: f.__name__)
def test_a_model_that_writes_has_one_arithmetic(function: Any, tmp_path: Any) -> None:
    model, x = _Model(function).eval(), torch.randn(2, 4, 8)
    expected = model(x)
    qat = calibrate(prepare(model, (x,), qconfig_dict={"": qconfig("qint16")}, out_dir=None), (x,))
    quantized = assert_one_arithmetic(qat, (x,), tmp_path)
    assert (quantized(x) - expected).abs().max() < 0.03


@pytest.mark.parametrize("function", [_slice_of_constant, _numbers, _broadcast], ids=lambda f: f.__name__)
def test_symbolic_trace_sees_the_writes(function: Any) -> None:
    model, x = _Model(function).eval(), torch.randn(2, 4, 8)
    expected = model(x)
    qat = calibrate(prepare_qat_fx(model, {"": qconfig("qint16")}), (x,))
    assert any("_generated_assign" in path for path, _ in qat.named_modules())
    assert (qat(x) - expected).abs().max() < 0.03


def _view(m: Any, x: Tensor) -> Tensor:
    part = x[:, 0]
    part += 1
    return x


def _into(make: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def function(m: Any, x: Tensor) -> Tensor:
        out = make(x)
        out[..., :8], out[..., 8:] = x, m.embed(x)
        return out

    return function


_GARBAGE = {
    "new_empty": lambda x: x.new_empty(2, 4, 16),
    "empty_like": lambda x: torch.empty_like(torch.cat([x, x], -1)),
    "empty of sizes": lambda x: torch.empty(x.shape[0], 4, 16),
    "empty of a type": lambda x: torch.empty((x.shape[0], 4, 16), dtype=x.dtype, device=x.device),
    "zeros of a type": lambda x: torch.zeros(x.shape[0], 4, 16, dtype=x.dtype),
}


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("name", _GARBAGE)
def test_what_was_in_memory_is_in_no_range(name: str, is_traced: bool, is_wrapped: bool) -> None:
    model, x = (_Wrapped if is_wrapped else _Model)(_into(_GARBAGE[name])).eval(), torch.randn(2, 4, 8)
    torch.use_deterministic_algorithms(True)  # memory that was not written is NaN then
    try:
        if is_traced:
            prepared = prepare_qat_fx(model, {"": qconfig("qint16")})
        else:
            prepared = prepare(model, (x,), qconfig_dict={"": qconfig("qint16")}, out_dir=None)
        calibrate(prepared, (x,))
        with torch.no_grad():
            want, got, converted = model(x), prepared(x), convert(prepared)(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(got, converted)
    assert float((got - want).norm() / want.norm()) < 0.05


_TYPES = {
    "arange": lambda m, x: x + torch.arange(8, dtype=x.dtype, device=x.device),
    "full": lambda m, x: torch.cat([x, torch.full((x.size(0), 4, 2), 0.5, dtype=x.dtype)], -1),
    "tensor": lambda m, x: x * torch.tensor([0.5] * 8, dtype=x.dtype),
    "as_tensor": lambda m, x: x + torch.as_tensor([0.5] * 8, dtype=x.dtype),
    "parameter": lambda m, x: x + m.query.to(x.dtype),
    "mask": lambda m, x: x.masked_fill(torch.ones(8, dtype=(x > 0).dtype), 0.5),
}


@pytest.mark.parametrize("name", _TYPES)
def test_the_type_of_a_quantized_tensor_makes_others_in_a_traced_graph(name: str) -> None:
    model, x = _Model(_TYPES[name]).eval(), torch.randn(2, 4, 8)
    prepared = prepare_qat_fx(model, {"": qconfig()})
    calibrate(prepared, (x,))
    with torch.no_grad():
        want, got, converted = model(x), prepared(x), convert(prepared)(x)
    assert torch.equal(got, converted)
    assert float((got - want).norm() / want.norm()) < 0.05


def test_a_write_through_a_view_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"`dequant` .*test_writing.py:\d+.*through another tensor"):
        prepare(_Model(_view).eval(), (torch.randn(2, 4, 8),), qconfig_dict={"": qconfig()}, out_dir=None)


def _buffer(m: Any, x: Tensor) -> Tensor:
    m.query[0] = x[0, 0]
    return x + m.query


def test_a_write_to_a_parameter_is_refused() -> None:
    with torch.no_grad(), pytest.raises(UnsupportedOperatorError, match="tensor of the model; write to a `clone"):
        prepare(_Model(_buffer).eval(), (torch.randn(2, 4, 8),), qconfig_dict={"": qconfig()}, out_dir=None)


_NUMBERS: dict[str, Callable[..., Tensor]] = {
    "integers": lambda m, x: (x * torch.arange(8) + torch.arange(4).unsqueeze(1)) / torch.tensor([1, 2, 4, 8] * 2),
    "positions before": lambda m, x: torch.arange(8) - x,
    "mask": lambda m, x: x * (torch.arange(8) > 3),
    "chosen": lambda m, x: torch.where(torch.arange(8) > 3, x, torch.arange(8)),
    "joined": lambda m, x: torch.cat([x, torch.ones(2, 4, 1, dtype=torch.long)], -1),
    "product of masks": lambda m, x: x.masked_fill((x > 0) * (torch.arange(8) > 3), 0.0),
    "count of a mask": lambda m, x: x.masked_fill((x > 0).sum(-1, keepdim=True) == 3, 0.0),
    "divided by a count": lambda m, x: x / ((x > -9).sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("name", _NUMBERS)
def test_integers_and_masks_beside_count_as_numbers(name: str, tmp_path: Any) -> None:
    model, x = _Model(_NUMBERS[name]).eval(), torch.randn(2, 4, 8)
    expected = model(x)
    qat = calibrate(prepare(model, (x,), qconfig_dict={"": qconfig("qint16")}, out_dir=None), (x,))
    quantized = assert_one_arithmetic(qat, (x,), tmp_path)
    assert (quantized(x) - expected).norm() < 0.01 * expected.norm()


def _inverse_sigmoid(m: Any, x: Tensor) -> Tensor:
    x = x.sigmoid()
    return torch.log(x.clamp(min=1e-5) / (1 - x).clamp(min=1e-5))


def test_the_logarithm_of_a_quotient_is_told() -> None:
    with pytest.warns(QuantizationWarning, match=r"logarithm of a quotient \(.*test_writing.py:\d+\).*torch.logit"):
        prepare(_Model(_inverse_sigmoid).eval(), (torch.randn(2, 4, 8),), qconfig_dict={"": qconfig()}, out_dir=None)


class _Keeps(nn.Module):
    """Writes a quantized tensor into its input."""

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key, self.quant, self.dequant, self.fc = key, QuantStub(), DeQuantStub(), nn.Linear(8, 8)

    def forward(self, data: Any) -> Tensor:
        data[self.key] = self.fc(self.quant(data[self.key]))
        return self.dequant(data[self.key])


@pytest.mark.parametrize(("key", "make"), [("x", lambda x: {"x": x}), (0, lambda x: [x])], ids=["dict", "list"])
def test_a_quantized_tensor_written_into_an_input_runs_by_running_and_is_refused_by_tracing(key, make) -> None:
    x = torch.randn(2, 8)
    by_running = prepare(_Keeps(key).eval(), (make(x),), qconfig_dict={"": qconfig()}, out_dir=None)
    assert by_running(make(x)).shape == x.shape
    traced = prepare_qat_fx(_Keeps(key).eval(), {"": qconfig()})
    with pytest.raises(NotImplementedError, match=r"written into an input.*test_writing\.py:\d+.*JIT_STRIP"):
        traced(make(x))
