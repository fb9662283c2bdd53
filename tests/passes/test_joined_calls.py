"""A module that is called several times in one forward has one range for all its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.fx.jit_scheme import Tracer
from horizon_plugin_pytorch.program import record_program
from horizon_plugin_pytorch.program.note import operator_name
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    calibrate,
    convert,
    get_default_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import as_numbers, mismatches, run_onnx


class Levels(nn.Module):
    """One line and one layer for levels whose values grow."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.quant(x)
        results = []
        for factor in (1.0, 4.0, 16.0):
            x = x * factor
            results.append(self.conv(x) + x)
        return [self.dequant(r) for r in results]


class Block(Levels):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.quant(x)
        results = []
        for factor in (1.0, 4.0, 16.0):
            with Tracer.dynamic_block(self, "level"):
                y = x * factor
                results.append(y + x)
        return [self.dequant(r) for r in results]


def prepared(method: str, observer: str = "min_max", constant: float = 0.01, model: type = Levels) -> nn.Module:
    torch.manual_seed(0)
    qconfig = get_default_qconfig(
        activation_observer=observer, activation_qkwargs={"averaging_constant": constant, "dtype": "qint16"}
    )
    return prepare(model(), (torch.randn(1, 2, 4, 4),), qconfig_dict={"": qconfig}, method=method, out_dir=None)


X = torch.linspace(-1, 1, 64).reshape(2, 2, 4, 4)


@pytest.mark.in_turns("method", "observer", "constant", of=2)
@pytest.mark.parametrize("method", ["jit-strip", "symbolic"])
@pytest.mark.parametrize("observer", ["min_max", "percentile", "mse", "kl", "histogram"])
@pytest.mark.parametrize("constant", [0.0, 0.01, 1.0])
def test_the_range_covers_every_call(method, observer, constant) -> None:
    model = prepared(method, observer, constant)
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        expected = model(X)
        model(X)  # the next forward is another batch
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        found = model(X)
    if observer == "kl":  # clips on purpose
        return
    for a, b in zip(expected, found, strict=True):
        assert (a - b).norm() < 0.01 * a.norm()


def test_the_range_is_an_average_over_forwards_not_over_calls() -> None:
    model = prepared("jit-strip", constant=0.5)
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        model(X)
        model(X * 3)
    observer = model._generated_mul_0.activation_post_process.activation_post_process
    assert float(observer.max_val) == pytest.approx((64 + 3 * 64) / 2, rel=1e-5)


def test_calibrate_counts_forwards() -> None:
    model = prepared("jit-strip")
    calibrate(model, [X, X * 2, X * 3])
    observer = model._generated_mul_0.activation_post_process.activation_post_process
    assert float(observer.max_val) == pytest.approx(64 * 2, rel=1e-5)


def test_dynamic_blocks_are_joined_too() -> None:
    model = prepared("jit-strip", constant=0.0, model=Block)
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        expected = model(X)
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        for a, b in zip(expected, model(X), strict=True):
            assert (a - b).norm() < 0.01 * a.norm()


class Queries(nn.Module):
    """Attention among learned queries: it depends on no input, and is computed in float."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.queries = nn.Parameter(torch.randn(1, 2, 6, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = nn.functional.scaled_dot_product_attention(self.queries, self.queries * 1.7, self.queries)
        return self.dequant(self.head(self.quant(x) + q))


def test_constants_are_exported_as_the_model_computes_them(tmp_path) -> None:
    torch.manual_seed(0)
    x = (torch.randn(1, 2, 6, 16),)
    qconfig = get_default_qconfig(activation_qkwargs={"dtype": "qint16"})
    model = prepare(Queries(), x, qconfig_dict={"": qconfig}, out_dir=None)
    calibrate(model, [x])
    quantized = convert(model)
    program = record_program(quantized, x)  # the attention of constants is one, not in simpler operators
    assert not any("softmax" in operator_name(node) for node in program.operators)
    graph = export_quantized_onnx(quantized, x, tmp_path / "model.onnx")
    assert mismatches(as_numbers(quantized(*x)), run_onnx(graph, x)) == 0


class _Loop(nn.Module):
    """A cell in a loop over time, from zeros or from a state that the model gets."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.quant, self.state, self.cell, self.dequant = QuantStub(), QuantStub(), cell, DeQuantStub()
        self.is_given = False

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        x, given = self.quant(x), self.state(start)
        state = (given, given) if isinstance(self.cell, nn.LSTMCell) else given
        state = state if self.is_given else None
        for time in range(8):
            state = self.cell(x[:, time], state)
        return self.dequant(state[0] if isinstance(state, tuple) else state)


@pytest.mark.slow
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("prepare", [prepare_qat_fx, prepare_qat])
def test_the_calls_of_a_cell_in_one_forward_are_one_batch(is_given: bool, prepare: Any) -> None:
    torch.manual_seed(1)
    cell = nn.RNNCell(4, 5, nonlinearity="relu")  # its state grows from call to call
    with torch.no_grad():
        cell.weight_hh.copy_(1.2 * torch.eye(5))
        cell.bias_ih.fill_(1.0)
    model = _Loop(cell).eval()
    model.is_given = is_given
    batches = [(torch.randn(4, 8, 4), torch.rand(4, 5)) for _ in range(20)]
    model.qconfig = get_default_qconfig()
    qat = prepare(model).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        largest = []
        for batch in batches:
            qat(*batch)
            largest.append(model(*batch).abs().max())
        set_fake_quantize(qat, FakeQuantState.VALIDATION)
        out, expected = qat(*batches[0]), model(*batches[0])
    average = largest[0]
    for value in largest[1:]:  # of whole batches, not of calls, and not the largest of all
        average = average + 0.01 * (value - average)
    scale = qat.get_submodule("cell.step.activation").activation_post_process.scale  # type: ignore[union-attr]
    assert scale.item() == pytest.approx(average.item() / 127.5, rel=0.01)
    assert (out - expected).abs().max() < 0.1 * expected.abs().max()


class Decoder(nn.Module):
    """A layer that each step calls, on values that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.step = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        for _ in range(4):
            x = self.step(x)
        return self.dequant(x)


def _decoder(averaging_constant: float = 0.01) -> Any:
    model = Decoder()
    with torch.no_grad():
        model.step.weight.copy_(torch.eye(4) * 1.5)
        model.step.bias.fill_(0.1)
    qconfig = get_default_qconfig(activation_qkwargs={"averaging_constant": averaging_constant})
    return model, prepare_qat_fx(model, {"": qconfig}).eval()


def test_the_steps_of_a_decoder_are_one_batch_in_a_calibration_loop_of_ones_own() -> None:
    model, qat = _decoder()
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        ends = [model(x).abs().max() for x in batches]
        for x in batches:
            qat(x)
    mean = ends[0]
    for end in ends[1:]:  # the moving average, over forwards
        mean = mean + 0.01 * (end - mean)
    assert torch.allclose(qat.step.activation_post_process.scale * 127.5, mean, rtol=0.03)
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    assert (qat(batches[0]) - model(batches[0])).abs().max() < 0.03 * ends[0]


def test_the_steps_of_a_decoder_are_batches_of_their_own_while_training() -> None:
    _, qat = _decoder()
    set_fake_quantize(qat.train(), FakeQuantState.QAT)
    x = torch.ones(2, 4)
    first = float((x * 1.5 + 0.1).max())
    qat(x)
    assert float(qat.step.activation_post_process.scale) * 127.5 < 1.2 * first
    set_fake_quantize(qat.eval(), FakeQuantState.CALIBRATION)
    qat(x)
    assert float(qat.step.activation_post_process.scale) * 127.5 < 1.3 * first  # one batch of the average, not all
