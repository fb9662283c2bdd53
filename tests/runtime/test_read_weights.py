"""Layers whose weight the forward reads for itself, in eager mode and in code that tracing does not enter."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import CalibrationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nn.quantized import FloatFunctional
from horizon_plugin_pytorch.nn.quantized.former_parameter import FormerParameter
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    calibrate,
    convert,
    convert_fx,
    get_default_qat_qconfig,
    get_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.quantization.qconfig_setter import QconfigSetter
from horizon_plugin_pytorch.utils.fx_helper import wrap

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Reader(nn.Module):
    """Adds what `read` makes of a layer's tensors, as queries of a decoder are the weight of an embedding."""

    def __init__(self, layer: nn.Module, read: Callable[[Any], Tensor], calls: bool = False) -> None:
        super().__init__()
        self.quant, self.quant_read, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.layer, self.read, self.calls, self.sum = layer, read, calls, FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        y = self.quant(x)
        y = self.layer(y) if self.calls else y
        return self.dequant(self.sum.add(y, self.quant_read(self.read(self.layer))))


class WrappedReader(Reader):
    """The same, in a method that tracing does not enter."""

    @wrap()
    def add(self, y: Tensor) -> Tensor:
        y = self.layer(y) if self.calls else y
        return self.sum.add(y, self.quant_read(self.read(self.layer)))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.add(self.quant(x)))


def _bias_and_row(layer: Any) -> Tensor:
    return layer.weight[0] + layer.bias.abs()


CASES = {
    "embedding": (lambda: nn.Embedding(5, 8), lambda layer: layer.weight, False),
    "linear": (lambda: nn.Linear(8, 5), lambda layer: layer.weight, False),
    "linear that is called": (lambda: nn.Linear(8, 8), _bias_and_row, True),
    "batch norm": (lambda: nn.BatchNorm1d(8), lambda layer: layer.weight + layer.running_var, False),
    "layer norm that is called": (lambda: nn.LayerNorm(8), lambda layer: layer.weight * 0.5 + layer.bias, True),
}


def _eager(model: Reader) -> nn.Module:
    model.qconfig = get_default_qat_qconfig()  # type: ignore[assignment]
    return prepare_qat(model)


@pytest.mark.parametrize("route", ["eager", "wrapped"])
@pytest.mark.parametrize("name", CASES)
def test_a_converted_model_reads_the_weight_that_validation_reads(name: str, route: str) -> None:
    set_march(March.NASH_E)
    torch.manual_seed(0)
    make, read, calls = CASES[name]
    model = (Reader if route == "eager" else WrappedReader)(make(), read, calls).eval()
    qat = _eager(model) if route == "eager" else prepare_qat_fx(model, {"": get_default_qat_qconfig()})
    calibrate(qat, [X], progress=False)
    with torch.no_grad():
        want = qat(X)
        quantized = convert(qat) if route == "eager" else convert_fx(qat)
        assert torch.equal(quantized(X), want)
        assert torch.equal(copy.deepcopy(quantized)(X), want)
        assert (want - model(X)).norm() < 0.05 * model(X).norm()


def test_weights_that_scripts_read_are_not_kept() -> None:
    set_march(March.NASH_E)
    qat = _eager(Reader(nn.Linear(8, 8), lambda _: torch.ones(8), calls=True).eval())
    calibrate(qat, [X], progress=False)
    assert qat.layer.weight.requires_grad  # an optimizer's loop over layers
    assert "float_weight" not in dict(convert(qat).layer.named_buffers())


def test_a_read_that_conversion_did_not_know_of_is_told_once() -> None:
    set_march(March.NASH_E)
    calibrated = _eager(Reader(nn.Embedding(5, 8), lambda layer: layer.weight).eval())
    calibrate(calibrated, [X], progress=False)
    fresh = _eager(Reader(nn.Embedding(5, 8), lambda layer: layer.weight).eval())
    fresh.load_state_dict(calibrated.state_dict())
    set_fake_quantize(fresh, FakeQuantState.VALIDATION)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = convert(fresh)  # it never ran
    with pytest.warns(CalibrationWarning, match=r"`layer`.*run the QAT model once"):
        quantized(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized(X)


BRANCHES: dict[str, Callable[[Any], bool]] = {
    "a weight": lambda net: net.conv.weight.requires_grad,
    "a bias": lambda net: net.conv.bias.requires_grad,
    "the weight of a norm": lambda net: net.norm.weight.requires_grad,
    "a weight that is frozen": lambda net: not net.frozen.weight.requires_grad,
    "all parameters": lambda net: any(p.requires_grad for p in net.parameters()),
    "a weight that is computed with": lambda net: bool((net.conv.weight * 0 + 1).sum() > 0) and net.conv.weight.is_leaf,
}


class Branching(nn.Module):
    """A forward that doubles its result if the answer is what it is in float."""

    def __init__(self, asked: str) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.frozen, self.norm = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)
        self.frozen.weight.requires_grad_(False)
        self.asked = asked

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.frozen(self.conv(self.quant(x))))
        if BRANCHES[self.asked](self):
            y = y * 2
        return self.dequant(y)


@pytest.mark.parametrize("asked", BRANCHES)
def test_a_branch_on_requires_grad_is_the_same_after_conversion(asked: str) -> None:
    set_march(March.BAYES)
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    qat = prepare(Branching(asked).eval(), (x,), qconfig_setter=QconfigSetter(get_qconfig(), []), out_dir=None)
    set_fake_quantize(qat.eval(), FakeQuantState.CALIBRATION)
    qat(x)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    wanted = qat(x).detach()
    for model in (convert_fx(qat), copy.deepcopy(convert_fx(qat)), pickle.loads(pickle.dumps(convert_fx(qat)))):
        given = model(x)
        assert torch.equal(given, wanted) and not given.requires_grad


def test_a_former_parameter_is_an_ordinary_tensor_but_for_that_answer() -> None:
    numbers = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    weight: Any = FormerParameter.of(numbers)
    assert weight.requires_grad and not (weight @ weight).requires_grad
    for result in (weight * 2, weight.t(), weight[0], torch.cat([weight, weight]), weight.detach(), weight.data):
        assert type(result) is Tensor and not result.requires_grad
    assert (weight * 2).numpy().shape == (3, 3) and torch.equal(weight.sum(0), numbers.sum(0))
    assert weight.data_ptr() == numbers.data_ptr()


class ReadsAfterCode(nn.Module):
    """A function with the tensors of a layer, on what wrapped code gave: it is not known to tracing what that is."""

    def __init__(self, layer: nn.Module, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.quant, self.dequant, self.layer, self.function = QuantStub(), DeQuantStub(), layer, function

    @wrap()
    def halved(self, y: Tensor) -> Tensor:
        return y * 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.halved(self.quant(x))
        return self.dequant(self.layer(y) + self.function(self.layer, y))


FUNCTIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "linear": (lambda: nn.Linear(8, 8), lambda layer, y: F.linear(y, layer.weight, layer.bias)),
    "frozen linear": (
        lambda: nn.Linear(8, 8).requires_grad_(False),
        lambda layer, y: F.linear(y, layer.weight, layer.bias),
    ),
    "conv1d": (lambda: nn.Conv1d(5, 5, 1), lambda layer, y: F.conv1d(y, layer.weight, layer.bias)),
    "layer norm": (lambda: nn.LayerNorm(8), lambda layer, y: F.layer_norm(y, (8,), layer.weight, layer.bias)),
    "frozen layer norm": (
        lambda: nn.LayerNorm(8).requires_grad_(False),
        lambda layer, y: F.layer_norm(y, (8,), layer.weight, layer.bias),
    ),
    "prelu": (lambda: nn.PReLU(5), lambda layer, y: F.prelu(y, layer.weight)),
    "bias alone": (lambda: nn.Linear(8, 8), lambda layer, y: y + layer.bias),
    "running variance": (lambda: nn.BatchNorm1d(5), lambda layer, y: y * layer.running_var.view(1, 5, 1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_on_results_of_wrapped_code_knows_the_tensors_of_a_converted_layer(name: str) -> None:
    set_march(March.NASH_M)
    torch.manual_seed(0)
    make, function = FUNCTIONS[name]
    qat = prepare_qat_fx(ReadsAfterCode(make(), function).eval(), {"": get_default_qat_qconfig()})
    calibrate(qat, [X], progress=False)
    with torch.no_grad():
        want, quantized = qat(X), convert_fx(qat)
        for model in (quantized, copy.deepcopy(quantized)):
            assert torch.equal(model(X), want)
