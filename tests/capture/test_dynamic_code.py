"""Code that runs otherwise than when the model was prepared follows, or an error names the line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ConversionError, QuantizationWarning, UnknownCallError
from horizon_plugin_pytorch.fx.jit_scheme import Tracer, dynamic_block
from horizon_plugin_pytorch.nn import operator_table
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub, convert
from horizon_plugin_pytorch.quantization.prepare import prepare
from horizon_plugin_pytorch.quantization.qconfig_template import default_calibration_qconfig_setter
from tests.routes import as_numbers, calibrate, mismatches, qconfig

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Stubbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(4, 4, 1)


def _calibrated(model: nn.Module, *inputs: Any) -> nn.Module:
    torch.manual_seed(0)
    return calibrate(prepare(model.eval(), inputs, qconfig_dict={"": qconfig()}, out_dir=None), inputs)


class Axes(Stubbed):
    """One line, several axes."""

    def forward(self, x: Tensor, dims: tuple = (1, 2)) -> Tensor:
        x = self.conv(self.quant(x))
        for dim in dims:
            x = F.softmax(x, dim)
        return self.dequant(x)


class Sizes(Stubbed):
    """Sizes that are read from tensors."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        small = F.avg_pool2d(x, 2)
        return self.dequant(F.interpolate(small, size=x.shape[2:]) + x)


class Windows(Stubbed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        return self.dequant(F.avg_pool2d(x, tuple(x.shape[2:])))


class Weights(Stubbed):
    """One line, several layers written as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        for weight in self.weights:
            x = F.conv2d(x, weight)
        return self.dequant(x)


def test_a_line_with_several_axes_has_a_module_for_each() -> None:
    qat = _calibrated(Axes(), X)
    assert [n for n, _ in qat.named_children() if "softmax" in n] == ["_generated_softmax_0", "_generated_softmax_1"]
    quantized = convert(qat)
    with torch.no_grad():
        for dims in ((1, 2), (2, 1), (2,), (1, 1)):
            assert mismatches(as_numbers(qat(X, dims)), as_numbers(quantized(X, dims))) == 0
        wanted = qat.conv(qat.quant(X)).dequantize().softmax(1).softmax(2)
        assert torch.allclose(qat(X), wanted, atol=0.01)


def test_an_axis_that_was_not_met_is_named() -> None:
    qat = _calibrated(Axes(), X)
    for model in (qat, convert(qat)):
        with pytest.raises(
            UnknownCallError, match=r"`softmax` .*\(test_dynamic_code.py:\d+\).*dim is 3 and was 1.*Prepare"
        ):
            model(X, (3,))


def test_a_size_is_followed_where_the_operator_takes_it_and_named_where_not() -> None:
    larger = torch.randn(1, 4, 12, 12)
    qat = _calibrated(Sizes(), X)
    with torch.no_grad():
        assert mismatches(as_numbers(qat(larger)), as_numbers(convert(qat)(larger))) == 0
    with pytest.raises(UnknownCallError, match=r"kernel_size is \(12, 12\) and was \(8, 8\)"):
        _calibrated(Windows(), X)(larger)


def test_a_line_with_several_weights_has_a_layer_for_each() -> None:
    model = Weights().eval()
    qat = _calibrated(model, X)
    quantized = convert(qat)
    with torch.no_grad():
        found = as_numbers(qat(X))
        assert mismatches(found, as_numbers(quantized(X))) == 0
        assert torch.allclose(found[0], model(X), atol=1)  # of about 20
    assert {"_generated_conv2d_0", "_generated_conv2d_1"} <= dict(qat.named_children()).keys()
    assert qat._generated_conv2d_1.weight is qat.weights[1]


def test_running_makes_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    qat = _calibrated(Axes(), X)
    monkeypatch.setattr(operator_table.Call, "make", lambda self: pytest.fail("made a module"))
    qat(X)


class Repeated(Stubbed):
    """A layer in a loop, and a ReLU after it."""

    def forward(self, x: Tensor, times: int = 1, is_active: bool = True) -> Tensor:
        x = self.quant(x)
        for _ in range(times):
            x = self.conv(x)
        return self.dequant(F.relu(x) if is_active else x)


class Marked(Stubbed):
    """The same, marked."""

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        x = self.quant(x)
        for _ in range(times):
            with Tracer.dynamic_block(self, "step"):
                x = self.conv(x) + x
        return self.dequant(F.relu(x))


class Inside(Stubbed):
    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = self.quant(x)
        for _ in range(times):
            with dynamic_block():
                x = F.relu(self.conv(x) + x)
        return self.dequant(x)


class Branches(Stubbed):
    """Modules that only some inputs reach."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.second, self.op = nn.Conv2d(4, 4, 1), QuantStub(), FloatFunctional()

    def forward(self, x: Tensor, kind: str = "") -> Tensor:
        y = self.second(x) if kind == "stub" else self.quant(x)
        if kind == "float":
            y = x
        if kind == "functional":
            y = self.op.add(y, y)
        return self.dequant(self.other(y) if kind == "module" else self.conv(y))


@pytest.mark.parametrize("arguments", [(2,), (1, False), (0,)])
def test_fused_modules_that_do_not_run_together_are_an_error(arguments: tuple) -> None:
    qat = _calibrated(Repeated(), X)
    assert type(qat.conv).__name__ == "ConvReLU2d"
    for model in (qat, convert(qat)):
        with pytest.raises(UnknownCallError, match=r"`conv`, `_generated_relu_0` \(test_dynamic_code.*dynamic_block"):
            model(X, *arguments)
        with torch.no_grad():
            assert torch.equal(model(X), qat(X))  # an error leaves nothing behind


@pytest.mark.parametrize(("cls", "fused"), [(Marked, "ConvAdd2d"), (Inside, "ConvAddReLU2d")])
def test_a_block_is_fused_with_itself_only_and_runs_any_number_of_times(cls: type[nn.Module], fused: str) -> None:
    torch.manual_seed(0)
    model = cls().eval()
    qat = _calibrated(model, X)
    assert fused in {type(m).__name__ for m in qat.modules()}
    quantized = convert(qat)
    with torch.no_grad():
        for times in (0, 1, 3):
            assert mismatches(as_numbers(qat(X, times)), as_numbers(quantized(X, times))) == 0
        assert torch.allclose(qat(X, 1), model(X, 1), atol=0.2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("module", r"`Conv2d` at `other` \(test_dynamic_code.py:\d+\) was not met"),
        ("stub", r"`QuantStub` at `second` \(test_dynamic_code.py:\d+\) did not run"),
        ("functional", r"`add` .*\(test_dynamic_code.py:\d+\) was not met"),
    ],
)
def test_modules_that_did_not_run_are_named(kind: str, message: str) -> None:
    qat = _calibrated(Branches(), X)
    for model in (qat, convert(qat)):
        with pytest.raises(UnknownCallError, match=message):
            model(X, kind)


def test_float_that_reaches_a_quantized_module_is_an_error() -> None:
    qat = _calibrated(Branches(), X)
    with pytest.raises(ConversionError, match=r"`conv` \(test_dynamic_code.py:\d+\).*float tensor.*QuantStub"):
        qat(X, "float")


def test_is_tracing_is_a_value_and_a_function() -> None:
    assert not Tracer.is_tracing and Tracer.is_tracing() is False


class Builtins(Stubbed):
    """Functions that builtins of Python call, whose instructions the interpreter specialises after a few runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        parts = dict((i, part * 2) for i, part in enumerate(x.chunk(2, 1)))  # noqa: C402
        x = torch.cat(list(map(lambda part: part * 0.5, parts.values())), 1)  # noqa: C417
        return self.dequant(sum([x, torch.sigmoid(x)]))


@pytest.mark.slow
def test_a_line_stays_the_same_line_when_the_interpreter_is_warm() -> None:
    qat = _calibrated(Builtins(), X)
    first = as_numbers(qat(X))
    for _ in range(20):
        assert not mismatches(first, as_numbers(qat(X)))


class AfterOutput(Stubbed):
    """Code that may follow a high-precision output, before the DeQuantStub and after it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.other, self.op = kind, nn.Conv2d(4, 4, 1), FloatFunctional()

    def forward(self, x: Tensor, has_more: bool = False) -> Tensor:
        x = self.quant(x)
        x = self.op.matmul(x, x) if self.kind == "functional" else self.conv(x)
        if has_more:
            x = self.more(x)
        x = self.dequant(x).flatten(2)
        return x.softmax(1) if has_more else x.exp()

    def more(self, x: Tensor) -> Tensor:
        match self.kind:
            case "mul" | "functional":
                return x * 2.0
            case "relu":
                return F.relu(x)
            case "cat":
                return torch.cat([x, x], 1)
            case "matmul":
                return x @ x
            case "no quantized form":
                return torch.erfinv(x)
            case "write":
                return x.add_(1.0)
            case "moved":
                return x.transpose(1, 2) + 1.0
            case _:
                return self.other(x)


@pytest.mark.parametrize(
    "kind", ["mul", "functional", "relu", "cat", "matmul", "no quantized form", "write", "moved", "module"]
)
def test_code_after_a_high_precision_output_that_was_not_met_is_an_error(kind: str) -> None:
    torch.manual_seed(0)
    setter = default_calibration_qconfig_setter
    model = calibrate(prepare(AfterOutput(kind).eval(), (X,), setter, out_dir=None), (X,))
    assert (model.op if kind == "functional" else model.conv).activation_post_process is None
    for same in (model, copy.deepcopy(model), convert(model)):
        out = same(X)
        assert type(out) is Tensor
        with pytest.raises(UnknownCallError, match=r"test_dynamic_code.py:\d+\) was not met .*Prepare with example"):
            same(X, True)


def test_a_module_that_is_kept_float_takes_a_high_precision_output() -> None:
    class Kept(Stubbed):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(self.quant(x))
            assert x.shape[1] == torch.ones_like(x).cumsum(1).max()  # numbers in its shape are no results
            return self.last(x)

    net = Kept().eval()
    net.last = nn.Conv2d(4, 4, 1)
    config = {"": qconfig(), "module_name": [("conv", qconfig()._replace(activation=None)), ("last", None)]}
    with pytest.warns(QuantizationWarning, match="`last`"):
        model = calibrate(prepare(net, (X,), qconfig_dict=config, out_dir=None), (X,))
    assert type(model(X)) is Tensor
    assert torch.equal(convert(model)(X), model(X))
