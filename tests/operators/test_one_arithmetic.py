"""Each operator, in each form, in int8 and int16: one arithmetic, close to float, with the right gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import FakeQuantize, FakeQuantState, set_fake_quantize
from tests.operators.cases import CASES, Case, wrap
from tests.routes import assert_one_arithmetic, prepared

BY_NAME = {case.name: case for case in CASES}
FORMATS = ("qint8", "qint16")


def _inputs(case: Case, seed: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.rand(s, generator=generator) * (case.high - case.low) + case.low for s in case.shapes)


def _model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return wrap(case.make(), len(case.shapes)).eval()


def _on_grid(qat: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The inputs as the QuantStubs round them."""
    stubs = [qat.quant, qat.other][: len(inputs)] if len(inputs) > 1 else [qat.quant]
    return [stub(x).dequantize() for stub, x in zip(stubs, inputs, strict=True)]


def _with_room(qat: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    """Widen every observed range by 2 %: rounded inputs can push an inner value past what float data showed."""
    for path, module in qat.named_modules():
        if isinstance(module, FakeQuantize) and not path.endswith("weight_fake_quant"):
            module.activation_post_process.min_val.mul_(1.02)
            module.activation_post_process.max_val.mul_(1.02)
    set_fake_quantize(qat, FakeQuantState.QAT)
    with torch.no_grad():
        qat(*inputs)  # an averaging constant of 0 keeps the ranges, and the scales follow them
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return qat


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", BY_NAME)
def test_all_routes_give_the_same_integers(name: str, dtype: str, tmp_path: Any) -> None:
    case = BY_NAME[name]
    inputs = _inputs(case)
    qat = prepared(_model(case), inputs, dtype)
    beyond = tuple(3 * x for x in _inputs(case, seed=2))  # saturates
    out = qat(*inputs)[0]
    assert isinstance(out, QTensor) and out.dtype == dtype
    assert_one_arithmetic(qat, inputs, tmp_path, [beyond])


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", BY_NAME)
def test_integers_are_close_to_float_and_to_training(name: str, dtype: str) -> None:
    case = BY_NAME[name]
    inputs = _inputs(case)
    model = _model(case)
    qat = _with_room(prepared(model, inputs, dtype), inputs)
    with torch.no_grad():
        exact = qat(*inputs)[0]
        on_grid = _on_grid(qat, inputs)
        if case.has_weight:  # what is left is the error of the arithmetic, not of the rounded weights
            model.body.weight.copy_(qat.body.weight_fake_quant.round(qat.body.weight))
        wanted = model.body.double()(*[x.double() for x in on_grid])
        set_fake_quantize(qat, FakeQuantState.QAT)
        trained = qat(*inputs)[0]
    scale = float(exact.scale)
    reachable = wanted.clamp(exact.dtype.min * scale, exact.dtype.max * scale)
    from_float = float((exact.dequantize() - reachable).abs().max()) / scale
    from_training = int((trained.int_repr().int() - exact.int_repr().int()).abs().max())
    assert from_float <= (case.steps8 if dtype == "qint8" else case.steps16)
    assert torch.equal(trained.scale, exact.scale)
    assert from_training <= (case.train_steps if dtype == "qint8" else case.train_steps16)


@pytest.mark.parametrize("state", [FakeQuantState.QAT, FakeQuantState.VALIDATION], ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", BY_NAME)
def test_gradients_follow_float(name: str, dtype: str, state: FakeQuantState) -> None:
    case = BY_NAME[name]
    inputs = _inputs(case)
    model = _model(case)
    qat = _with_room(prepared(model, inputs, dtype), inputs)
    set_fake_quantize(qat, state)
    found = _gradients(qat, inputs)
    wanted = _gradients(model, inputs)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        assert torch.isfinite(gradient).all(), key
        if case.is_smooth and float(wanted[key].abs().max()) > 1e-6:
            cosine = float(torch.cosine_similarity(gradient.flatten().double(), wanted[key].flatten().double(), 0))
            size = float(gradient.norm() / wanted[key].norm())
            assert cosine > 0.98 and 0.9 < size < 1.1, key


def _gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = model(*[x * 1.0 for x in leaves])[1]  # an operator in place must not write to a leaf
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights).sum().backward()
    found = {f"input {i}": x.grad for i, x in enumerate(leaves)}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return {key: value for key, value in found.items() if value is not None}
