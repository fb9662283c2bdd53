"""Constants as operands of a FloatFunctional: integers of them on every route, or a refusal when data are seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ConversionError, UnknownCallError, UnsupportedOperatorError
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.nn.quantized.functional_modules import FUNCTIONAL_METHODS
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
    set_fake_quantize,
)
from tests.routes import as_numbers, assert_one_arithmetic, calibrate, prepared_on

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
Call = Callable[["Net", FloatFunctional, Tensor], Any]
CALLS: dict[str, Call] = {
    "add": lambda s, f, y: f.add(y, s.buffer),
    "add, first": lambda s, f, y: f.add(s.parameter, y),
    "add, times": lambda s, f, y: f.add(y, s.buffer, alpha=2),
    "sub": lambda s, f, y: f.sub(s.buffer, y),
    "mul": lambda s, f, y: f.mul(y, s.parameter),
    "mul, by keyword": lambda s, f, y: f.mul(x=y, y=s.parameter),
    "mul, computed": lambda s, f, y: f.mul(y, s.parameter.softmax(-1)),
    "mul, made here": lambda s, f, y: f.mul(y, torch.full((8,), 0.3)),
    "mul, number": lambda s, f, y: f.mul(y, s.number),
    "div": lambda s, f, y: f.div(y, s.parameter.abs() + 1.0),
    "maximum": lambda s, f, y: f.maximum(y, s.buffer),
    "minimum": lambda s, f, y: f.minimum(s.buffer, y),
    "add_relu": lambda s, f, y: f.add_relu(y, s.buffer),
    "cat": lambda s, f, y: f.cat([s.parameter, y, s.parameter[:1].expand(2, 4, 8)], dim=1),
    "stack": lambda s, f, y: f.stack((y, s.parameter), 1),
    "matmul": lambda s, f, y: f.matmul(y, s.square),
    "matmul, first": lambda s, f, y: f.matmul(s.parameter, y, y_trans=True),
}
NUMBERS: dict[str, Call] = {
    "add_scalar": lambda s, f, y: f.add_scalar(y, s.number),
    "mul_scalar": lambda s, f, y: f.mul_scalar(y, s.number),
    "sum": lambda s, f, y: f.sum(y, -1, keepdim=True),
    "mean": lambda s, f, y: f.mean(y, -1),
}


@pytest.fixture(autouse=True)
def _march() -> None:
    set_march(March.NASH_M)


class Net(nn.Module):
    """A layer, and calls of FloatFunctionals on its result, each with one of its own."""

    def __init__(self, calls: dict[str, Call], functionals: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.quant, self.dequant, self.fc, self.calls = (
            QuantStub(),
            DeQuantStub(),
            nn.Linear(8, 8),
            list(calls.values()),
        )
        self.functionals = nn.ModuleList(FloatFunctional() for _ in range(functionals or len(calls)))
        self.parameter, self.square = nn.Parameter(torch.randn(2, 4, 8)), nn.Parameter(torch.randn(8, 8))
        self.register_buffer("buffer", torch.randn(8))
        self.register_buffer("number", torch.tensor(1.5))

    def run(self, y: Tensor) -> tuple:
        return tuple(call(self, f, y) for call, f in zip(self.calls, self.functionals, strict=True))

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.run(self.fc(self.quant(x))))


class Wrapped(Net):
    """The same in code that tracing does not enter."""

    @wrap()
    def inner(self, y: Tensor) -> tuple:
        return self.run(y)

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.inner(self.fc(self.quant(x))))


def _prepared(net: nn.Module, method: str, dtype: str = "qint8") -> nn.Module:
    return prepared_on(method, net, (X,), dtype)


def test_every_method_is_tried() -> None:
    assert {name.split(",")[0] for name in (*CALLS, *NUMBERS)} == set(FUNCTIONAL_METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("method", ["wrapped", "traced", "JIT", "JIT_STRIP"])
def test_constants_have_one_arithmetic(method: str, dtype: str, tmp_path: Any) -> None:
    net = (Wrapped if method == "wrapped" else Net)({**CALLS, **NUMBERS}).eval()
    with torch.no_grad():
        want, qat = net(X), calibrate(_prepared(net, method, dtype), (X,))
    quantized = assert_one_arithmetic(qat, (X,), tmp_path, [(X.flip(0),)])
    with torch.no_grad():
        found = quantized(X)
    for name, a, b in zip((*CALLS, *NUMBERS), as_numbers(want), as_numbers(found), strict=True):
        assert float((a - b).abs().max()) < float(a.abs().max()) / (40 if dtype == "qint8" else 100), name


@pytest.mark.parametrize("call", CALLS)
def test_eager_mode_refuses_constants_as_soon_as_it_sees_data(call: str) -> None:
    qat = _prepared(Net({call: CALLS[call]}).eval(), "eager").eval()
    line = rf"at `functionals.0` \(test_functional_constants.py:{CALLS[call].__code__.co_firstlineno}\)"
    for state in (FakeQuantState.CALIBRATION, FakeQuantState.QAT):
        set_fake_quantize(qat, state)
        with pytest.raises(ConversionError, match=line + r" got a float tensor .* Put a QuantStub where this tensor"):
            qat(X)


@pytest.mark.parametrize("call", NUMBERS)
def test_eager_mode_takes_numbers(call: str, tmp_path: Any) -> None:
    assert_one_arithmetic(calibrate(_prepared(Net({call: NUMBERS[call]}).eval(), "eager"), (X,)), (X,), tmp_path)


def test_tracing_refuses_float_data_as_soon_as_it_sees_data() -> None:
    """Nobody knows, by tracing, that a float tensor of another part of the model is no quantized one."""
    qat = _prepared(Net({"": lambda s, f, y: f.mul(y, s.dequant(y).abs())}).eval(), "traced").eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with pytest.raises(ConversionError, match=r"at `functionals.0` \(test_functional_constants.py:\d+\) got a float"):
        qat(X)


def _loop(s: Net, f: Any, y: Tensor) -> Tensor:
    for other in s.functionals:
        y = other.add(y, s.buffer)
    return y


def _with_and_without(s: Net, f: Any, y: Tensor) -> Tensor:
    for other in (y, s.parameter):
        y = f.add(y, other)
    return y


def _places(s: Net, f: Any, y: Tensor) -> Tensor:
    for a, b in ((y, s.buffer), (s.buffer, y)):
        y = f.add(a, b)
    return y


@pytest.mark.parametrize("call", [_loop, _with_and_without, _places])
def test_a_line_of_wrapped_code_that_runs_again(call: Call, tmp_path: Any) -> None:
    net = Wrapped({"": call}).eval()
    assert_one_arithmetic(calibrate(_prepared(net, "wrapped", "qint16"), (X,)), (X,), tmp_path)


def test_scales_of_constants_in_wrapped_code_are_in_the_checkpoint() -> None:
    calls = {name: CALLS[name] for name in ("mul", "cat", "div")}
    qat = calibrate(_prepared(Wrapped(calls).eval(), "wrapped"), (X,))
    other = _prepared(Wrapped(calls).eval(), "wrapped")
    set_fake_quantize(other.eval(), FakeQuantState.VALIDATION)
    with pytest.raises(UnknownCallError, match=r"`functionals.0.mul` at `_leaf_inner` \(test_functional_constants"):
        other(X)
    other.load_state_dict(qat.state_dict())
    with torch.no_grad():
        want = as_numbers(qat(X))
        assert all(torch.equal(a, b) for a, b in zip(want, as_numbers(other(X)), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(want, as_numbers(convert_fx(other)(X)), strict=True))
    stubs = [path for path, m in qat.named_modules() if type(m).__name__ == "QuantStub" and "generated" in path]
    assert len(stubs) == 4 and all("_generated_quant_functionals_" in path for path in stubs)


class _Function(Net):
    @wrap()
    def inner(self, y: Tensor, other: Tensor) -> Tensor:
        return y * other.softmax(-1)

    def forward(self, x: Tensor) -> Any:
        other = self.parameter
        return self.dequant(self.inner(self.fc(self.quant(x)), other) + other)


@pytest.mark.slow
def test_a_function_of_wrapped_code_has_one_stub_for_a_constant(tmp_path: Any) -> None:
    qat = calibrate(_prepared(_Function({}).eval(), "wrapped"), (X,))
    stubs = [path for path, m in qat.named_modules() if type(m).__name__ == "QuantStub" and "generated" in path]
    assert sorted(re.sub(r"\d+", "N", path) for path in stubs) == [
        "_leaf_add._generated_quant_add_N",
        "_leaf_inner._generated_quant_mul_inner_N_N",
    ]
    assert all(qat.get_submodule(path).activation_post_process.has_statistics for path in stubs)
    assert_one_arithmetic(qat, (X,), tmp_path)


class _TwoLayers(Net):
    def __init__(self, is_first: bool) -> None:
        super().__init__({"": CALLS["add"]})
        self.other, self.is_first = nn.Linear(8, 8), is_first

    @wrap()
    def inner(self, y: Tensor) -> Tensor:
        if self.is_first:
            return self.functionals[0].add(self.other(self.parameter), self.other(y))
        return self.functionals[0].add(self.other(y), self.other(self.parameter))

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.inner(self.fc(self.quant(x))))


@pytest.mark.parametrize("is_first", [False, True])
def test_a_layer_of_wrapped_code_on_quantized_and_on_real_tensors(is_first: bool) -> None:
    qat = _prepared(_TwoLayers(is_first).eval(), "wrapped").eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    line = r"\(test_functional_constants.py:\d+\)"
    with pytest.raises(UnsupportedOperatorError, match=rf"`Linear` at `other` .*{line} and on real ones {line}.*Stub"):
        qat(X)
