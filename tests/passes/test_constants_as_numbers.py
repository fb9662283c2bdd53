"""Tensors of one number: buffers and other constants are read where an operator takes a number; parameters train."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import (
    CheckpointError,
    OperatorInputError,
    QuantizationWarning,
    UnknownCallError,
    UnsupportedOperatorError,
)
from horizon_plugin_pytorch.fx.fx_helper import wrap
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, FakeQuantState, QuantStub, prepare, set_fake_quantize
from tests.routes import assert_one_arithmetic, calibrate, qconfig

TWO = torch.tensor(2.0)


class Net(nn.Module):
    """QuantStub, a function of the model, DeQuantStub; and constants of every kind."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.quant, self.dequant, self.function, self.ff = QuantStub(), DeQuantStub(), function, FloatFunctional()
        for name, value in {
            "two": 2.0, "three": 3.0, "limit": 0.5, "zero": 0.0, "count": 2, "flag": True, "only": [2.0],
            "size": [4, 4], "index": [0, 2],
        }.items():  # fmt: skip
            self.register_buffer(name, torch.tensor(value))
        self.plain, self.listed = torch.tensor(2.0), [torch.tensor(2.0), torch.tensor(0.5)]
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.trained = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.function(self, self.quant(x)))


class Wrapped(Net):
    """The function is code that tracing does not enter."""

    @wrap()
    def inner(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.inner(self.quant(x)))


def product(m: Any, x: Tensor) -> Tensor:
    for factor in m.listed:
        x = x * factor
    return x


NUMBERS: dict[str, Callable[..., Any]] = {
    "power": lambda m, x: torch.pow(x, m.two),
    "power-method": lambda m, x: x.pow(m.two),
    "power-operator": lambda m, x: x**m.count,
    "power-keyword": lambda m, x: torch.pow(input=x, exponent=m.two),
    "power-of-one-element": lambda m, x: x**m.only,
    "power-of-global": lambda m, x: x**TWO,
    "power-of-attribute": lambda m, x: x**m.plain,
    "power-of-local": lambda m, x: x ** torch.tensor(2.0),
    "power-of-computed": lambda m, x: x.abs() ** torch.sqrt(m.two * 2),
    "power-of-frozen": lambda m, x: x**m.frozen,
    "power-base": lambda m, x: m.two**x,
    "quotient": lambda m, x: x / m.three,
    "quotient-of-root": lambda m, x: x / torch.sqrt(m.three),
    "quotient-of-math": lambda m, x: x / math.sqrt(m.three),
    "divisor": lambda m, x: m.three / (x.exp() + 1),
    "product": lambda m, x: m.three * x,
    "product-of-item": lambda m, x: x * m.three.item(),
    "product-of-list": product,
    "product-of-flag": lambda m, x: x * m.flag,
    "sum": lambda m, x: x + m.three,
    "difference": lambda m, x: m.three - x,
    "comparison": lambda m, x: (x > m.limit).float() * x,
    "where": lambda m, x: torch.where(x > m.limit, x, m.limit),
    "masked-fill": lambda m, x: x.masked_fill(x > m.limit, m.limit),
    "masked-fill-of-zero": lambda m, x: x.masked_fill(torch.arange(8) > 3, m.zero),
    "maximum": lambda m, x: torch.maximum(x, m.limit),
    "clamp": lambda m, x: torch.clamp(x, -m.limit, m.limit),
    "functional": lambda m, x: m.ff.mul(x, m.three),
    "functional-scalar": lambda m, x: m.ff.mul_scalar(x, m.three),
    "interpolate": lambda m, x: F.interpolate(x, size=(m.size[0], m.size[1])),
    "view": lambda m, x: x.view(m.count, -1),
    "index": lambda m, x: x[:, m.index][:, :, m.count],
    "slice": lambda m, x: x[:, : m.count],
    "repeat": lambda m, x: x.repeat(1, m.count, 1, 1),
    "pad": lambda m, x: F.pad(x, (m.count, m.count)),
    "trained": lambda m, x: x * m.trained,
    "frozen": lambda m, x: x * m.frozen,
}


def _x() -> Tensor:
    set_march(March.NASH_M)
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def _prepared(net: nn.Module, x: Tensor, method: str) -> nn.Module:
    return prepare(net.eval(), (x,), qconfig_dict={"": qconfig("qint16")}, method=method, out_dir=None)


@pytest.mark.in_turns("method", "name")
@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_constant_is_the_number_that_it_is(name: str, method: str, tmp_path: Any) -> None:
    x, net = _x(), Net(NUMBERS[name])
    converted = assert_one_arithmetic(calibrate(_prepared(net, x, method), (x,)), (x,), tmp_path)
    with torch.no_grad():
        wanted, found = net(x), converted(x)
    assert found.shape == wanted.shape and (found - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("name", ["power", "quotient", "product", "where"])
def test_code_that_tracing_does_not_enter_reads_constants_too(name: str) -> None:
    x, net = _x(), Wrapped(NUMBERS[name]).eval()
    net.qconfig = qconfig("qint16")
    model = calibrate(_prepared(net, x, "symbolic"), (x,))
    with torch.no_grad():
        assert (model(x) - net(x)).norm() < 0.01 * net(x).norm()


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("name", ["product", "quotient", "power"])
def test_no_stub_is_made_for_a_number(name: str, method: str) -> None:
    x = _x()
    model = _prepared(Net(NUMBERS[name]), x, method)
    assert not [path for path, _ in model.named_modules() if "_generated_quant" in path]


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_parameter_goes_on_training(method: str) -> None:
    x = _x()
    model = calibrate(_prepared(Net(NUMBERS["trained"]), x, method), (x,))
    set_fake_quantize(model.train(), FakeQuantState.QAT)
    model(x).square().sum().backward()
    assert model.trained.grad is not None and model.trained.grad.abs() > 0


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_trained_exponent_is_refused(method: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"pow.*test_constants_as_numbers.py:\d+.*exponent"):
        _prepared(Net(lambda m, x: x**m.trained), _x(), method)


@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
def test_a_trained_factor_of_mul_scalar_is_refused(method: str) -> None:
    x = _x()
    with pytest.raises(OperatorInputError, match=r"`mul_scalar` at `ff`.*Call `mul`"):
        calibrate(_prepared(Net(lambda m, x: m.ff.mul_scalar(x, m.trained)), x, method), (x,))


def test_a_model_that_runs_its_forward_follows_a_buffer() -> None:
    x, net = _x(), Net(NUMBERS["product"])
    model = calibrate(_prepared(net, x, "jit-strip"), (x,))
    with torch.no_grad():
        model.three.fill_(1.5)
        assert (model(x) - 1.5 * x).abs().max() < 0.01
    power = calibrate(_prepared(Net(NUMBERS["power"]), x, "jit-strip"), (x,))
    power.two.fill_(3.0)
    with pytest.raises(UnknownCallError, match="exponent is 3.0 and was 2.0"):
        power(x)


def test_a_traced_model_refuses_another_number_of_a_checkpoint() -> None:
    x, net = _x(), Net(NUMBERS["product"])
    model = calibrate(_prepared(net, x, "symbolic"), (x,))
    state = model.state_dict()
    model.load_state_dict(state)
    with pytest.raises(CheckpointError, match="`three` is 1.5 in the checkpoint and was 3 when"):
        model.load_state_dict({**state, "three": torch.tensor(1.5)})


def halved(m: Any, x: Tensor) -> Tensor:
    m.three.mul_(0.5)
    return x * m.three


def test_a_buffer_that_the_forward_writes_is_read_in_each_run() -> None:
    x = _x()
    model = calibrate(_prepared(Net(halved), x, "jit-strip"), (x,))
    with torch.no_grad():
        model.three.fill_(2.0)
        assert (model(x) - x).abs().max() < 0.05


@pytest.mark.parametrize("is_buffer", [True, False])
def test_tracing_tells_of_a_tensor_that_the_forward_writes(is_buffer: bool) -> None:
    net = Net(halved)
    if not is_buffer:
        del net.three
        net.three = torch.tensor(3.0)
    with pytest.warns(QuantizationWarning, match="`Net`: its forward writes to `three`.*JIT_STRIP"):
        _prepared(net, _x(), "symbolic")
