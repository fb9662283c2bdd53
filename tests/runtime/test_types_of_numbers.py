"""What a forward asks about the type of its numbers is answered as in float, on every route and at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.errors import TraceError
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from tests.routes import calibrate, prepared_on, qconfig

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


def _matched(x: Any) -> bool:
    match x:
        case Tensor(dtype=torch.float32):
            return True
        case _:
            return False


QUESTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "equal": lambda m, x: x.dtype == torch.float32,
    "other": lambda m, x: x.dtype != torch.float32,
    "identity": lambda m, x: x.dtype is torch.float32,
    "one of several": lambda m, x: x.dtype in (torch.float16, torch.float32),
    "key": lambda m, x: {torch.float32: 1}.get(x.dtype, 2),
    "words": lambda m, x: f"{x.dtype} {x.dtype}",
    "by name": lambda m, x: getattr(x, "dtype", None),
    "pattern": lambda m, x: _matched(x),
    "of the type": lambda m, x: (x.dtype.is_floating_point, x.dtype.itemsize, x.dtype.to_real()),
    "limits": lambda m, x: (torch.finfo(x.dtype).bits, torch.finfo(x.dtype).eps),
    "promoted": lambda m, x: torch.promote_types(x.dtype, torch.float16),
    "is_floating_point": lambda m, x: (x.is_floating_point(), torch.is_floating_point(x)),
    "is_signed": lambda m, x: (x.is_signed(), torch.is_signed(x), x.is_complex()),
    "bytes": lambda m, x: (x.element_size(), x.itemsize),
    "as a weight": lambda m, x: (x.dtype == m.fc.weight.dtype, x.dtype == m.level.dtype, x.dtype == m.shift.dtype),
    "made": lambda m, x: torch.zeros(1, dtype=x.dtype).dtype,
    "made like it": lambda m, x: (x.new_zeros(3).dtype, torch.zeros_like(x).dtype),
    "made like it, of a type": lambda m, x: torch.zeros(2).to(x.dtype).dtype,
    "of results": lambda m, x: [y.dtype for y in (m.fc(x), m.relu(x), x[:, :2], x.mT, m.ff.add(x, x))],
    "of masks": lambda m, x: ((x > 0).dtype, (x > 0)[:, :1].dtype),
    "of parts": lambda m, x: [part.dtype for part in x.chunk(2, -1)],
    "of real numbers": lambda m, x: m.dequant(x).dtype,
}
ONLY_RUNNING: dict[str, Callable[[Any, Tensor], Any]] = {
    "together": lambda m, x: (torch.result_type(x, 1.0), torch.result_type(m.level, x), torch.result_type(x > 0, 1)),
    "its name": lambda m, x: x.type(),
    "all bytes": lambda m, x: x.nbytes,
    "of positions": lambda m, x: x.argmax(-1).dtype,
    "filled": lambda m, x: (torch.ones_like(x).dtype, x.new_tensor([1.0]).dtype),
}
ROUTES = ("traced", "JIT", "JIT_STRIP", "wrapped", "eager")
TOLD: list[Any] = []


class Asking(nn.Module):
    """Answers decide which way the forward goes."""

    def __init__(self, questions: dict[str, Callable[[Any, Tensor], Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant, self.fc, self.relu = QuantStub(), DeQuantStub(), nn.Linear(8, 8), nn.ReLU()
        self.ff, self.twice = FloatFunctional(), FloatFunctional()
        self.level, self.questions = nn.Parameter(torch.randn(8)), questions
        self.register_buffer("shift", torch.randn(8))

    def ask(self, x: Tensor) -> Tensor:
        TOLD.append({name: question(self, x) for name, question in self.questions.items()})
        return self.twice.mul_scalar(x, 2.0) if x.dtype == torch.float32 else x

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.ask(self.quant(x)))


class WrappedAsking(Asking):
    @wrap()
    def ask(self, x: Tensor) -> Tensor:
        return super().ask(x)


def _prepared(route: str, questions: dict[str, Any]) -> nn.Module:
    net = (WrappedAsking if route == "wrapped" else Asking)(questions).eval()
    return prepared_on(route, net, (X,))


@pytest.mark.parametrize("route", ROUTES)
def test_the_forward_is_told_what_it_was_told_in_float(route: str) -> None:
    set_march(March.NASH_M)
    questions = QUESTIONS if route == "traced" else QUESTIONS | ONLY_RUNNING
    TOLD.clear()
    float_out = Asking(questions)(X)
    (wanted,) = TOLD
    TOLD.clear()
    qat = calibrate(_prepared(route, questions), (X,))
    for state in (FakeQuantState.CALIBRATION, FakeQuantState.QAT, FakeQuantState.VALIDATION):
        set_fake_quantize(qat, state)
        assert torch.allclose(qat(X), float_out, atol=0.05), state
    assert torch.allclose((convert if route == "eager" else convert_fx)(qat)(X), float_out, atol=0.05)
    assert len(TOLD) >= (1 if route == "traced" else 5)
    for told in TOLD:
        assert told == wanted


def test_tools_are_told_the_format_in_eager_mode() -> None:
    set_march(March.NASH_M)
    seen: list[Any] = []
    qat = calibrate(_prepared("eager", {}), (X,))
    for model in (qat, convert(qat)):
        model.quant.register_forward_hook(lambda module, args, out: seen.append((out, out.dtype)))
        model(X)
        assert seen[-1][1] is qint8 and seen[-1][0].dtype is qint8


class AsksInput(nn.Module):
    """Nothing says what the input will be."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0 if x.dtype is torch.float32 else x
        return self.dequant(self.quant(x))


def test_a_type_that_tracing_does_not_know_is_not_compared() -> None:
    set_march(March.NASH_M)
    with pytest.raises(TraceError, match=r"test_types_of_numbers\.py:\d+.*`x\.dtype` is not known"):
        prepare_qat_fx(AsksInput(), {"": qconfig()})


class CastsToFloat(nn.Module):
    """Casts to the type that it has, as heads of detectors do before they decode."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.scale = QuantStub(), DeQuantStub(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.quant(x) * self.scale).float()
        return self.dequant(x.exp().float() * (x > 0).float())


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_cast_to_float_leaves_a_float_tensor_as_it_is(method: str) -> None:
    set_march(March.NASH_M)
    net = CastsToFloat().eval()
    qat = calibrate(prepare(net, (X,), qconfig_dict={"": qconfig()}, method=method, out_dir=None), (X,))
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    with torch.no_grad():
        found, wanted = qat(X), net(X)
        assert float((found - wanted).norm() / wanted.norm()) < 0.05
        assert torch.equal(convert_fx(qat)(X), found)
