"""Recurrent networks of many steps: files that hold one step, and give the same integers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    PrepareMethod,
    QuantStub,
    convert,
    convert_fx,
    prepare,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx, export_to_onnx
from tests.routes import as_numbers, calibrate, mismatches, prepared, qconfig, run_onnx
from tests.sequences.comparison import LEVELS, THREADS

pytestmark = pytest.mark.slow
STEPS, SIZE, BATCH = 18, 6, 2


class Net(nn.Module):
    """A linear layer, what is tested, and a neighbour after it."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.quant, self.before, self.core, self.dequant = QuantStub(), nn.Linear(5, SIZE), core, DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        return [self.dequant(y) for y in self.core(self.before(self.quant(x)))]


class Layers(nn.Module):
    def __init__(self, rnn: nn.Module, width: int, gives_states: bool = False) -> None:
        super().__init__()
        self.rnn, self.norm, self.gives_states = rnn, nn.LayerNorm(width), gives_states

    def forward(self, x: Tensor) -> list[Tensor]:
        out, states = self.rnn(x)
        if not self.gives_states:
            return [self.norm(out)]
        states = states if isinstance(states, tuple) else (states,)
        return [torch.cat([self.norm(out), x], -1), *states]


class Cells(nn.Module):
    """Loops as users write them; `run` is one of the functions below."""

    def __init__(self, run: Callable, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head, self.run = cell(SIZE, SIZE), nn.Linear(SIZE, 3), run

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.run(self, x)


def _selected(net: Any, x: Tensor) -> list[Tensor]:
    h, c, outs = torch.zeros(BATCH, SIZE), torch.zeros(BATCH, SIZE), []
    for t in range(STEPS):
        h, c = net.cell(x[:, t], (h, c))
        outs.append(h)
    return [torch.stack(outs, 1), outs[4] + outs[9], h]


def _unbound(net: Any, x: Tensor) -> list[Tensor]:
    h, outs = None, []
    for part in x.unbind(1):
        h = net.cell(part, h)
        outs.append(h.unsqueeze(1))
    return [torch.cat(outs, 1)]


def _backwards(net: Any, x: Tensor) -> list[Tensor]:
    h, outs = x[:, 0] * 0.5, []
    for t in reversed(range(STEPS)):
        h = net.cell(x[:, t], h)
        outs.append(h)
    return [torch.stack(outs[::-1], 1), torch.stack(outs, 2)]


def _headed(net: Any, x: Tensor) -> list[Tensor]:
    h, outs = None, []
    for part in x.split(1, 1):
        h = net.cell(part.squeeze(1), h)
        outs.append(h)
    return [torch.stack([net.head(h) for h in outs], 1), torch.cat([h.argmax(-1) for h in outs])]


def _fed_back(net: Any, x: Tensor) -> list[Tensor]:
    h = x[:, 0]
    for _ in range(STEPS):
        h = net.cell(h, h)
    return [net.head(h)]


def _every_second(net: Any, x: Tensor) -> list[Tensor]:
    h, first = None, x[:, 0]
    for t in range(1, 2 * (STEPS - 1), 2):
        h = net.cell(x[:, t : t + 1].squeeze(1), first if h is None else h)
    return [h]


CORES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Layers(nn.LSTM(SIZE, 4, 2, bidirectional=True, batch_first=True), 8),
    "lstm with states": lambda: Layers(nn.LSTM(SIZE, 4, bidirectional=True, batch_first=True), 8, True),
    "gru": lambda: Layers(nn.GRU(SIZE, 4, 2, bidirectional=True, batch_first=True), 8),
    "gru with states": lambda: Layers(nn.GRU(SIZE, 4, batch_first=True), 4, True),
    "rnn": lambda: Layers(nn.RNN(SIZE, 4, 2, nonlinearity="relu", batch_first=True), 4, True),
    "one unit": lambda: Layers(nn.LSTM(SIZE, 1, batch_first=True), 1, True),
    "selected": lambda: Cells(_selected, nn.LSTMCell),
    "unbound": lambda: Cells(_unbound, nn.GRUCell),
    "backwards": lambda: Cells(_backwards, nn.RNNCell),
    "headed": lambda: Cells(_headed, nn.GRUCell),
    "fed back": lambda: Cells(_fed_back, nn.RNNCell),
    "every second": lambda: Cells(_every_second, nn.RNNCell),
}


def _net(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(len(name))
    steps = 2 * STEPS if name == "every second" else STEPS
    return Net(CORES[name]()).eval(), torch.randn(BATCH, steps, 5)


def _converted(model: nn.Module, x: Tensor, dtype: str = "qint8") -> nn.Module:
    """Cells are prepared by running, which takes any loop."""
    if not isinstance(model.core, Cells):
        return convert_fx(prepared(model, (x,), dtype))
    qat = prepare(model, (x,), qconfig_dict={"": qconfig(dtype)}, method=PrepareMethod.JIT, out_dir=None)
    return convert(calibrate(qat, (x,)))


def _loops(file: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in file.graph.node if node.op_type == "Scan"]


def _session(file: onnx.ModelProto, level: str, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = LEVELS[level], 3
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    return ort.InferenceSession(file.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "qint8") for name in CORES), ("lstm with states", "qint16"), ("gru", "qint16")]
)
def test_a_file_with_loops_gives_the_same_integers(name: str, dtype: str) -> None:
    model, x = _net(name)
    quantized = _converted(model, x, dtype)
    file = export_quantized_onnx(quantized, x, io.BytesIO())
    assert _loops(file) and len(file.graph.node) < 600
    onnx.checker.check_model(file, full_check=True)
    batches = [x, 3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        wanted = [as_numbers(quantized(batch)) for batch in batches]
    for level in LEVELS:
        for threads in THREADS:
            session = _session(file, level, threads)
            for batch, numbers in zip(batches, wanted, strict=True):
                found = [torch.from_numpy(np.asarray(y)) for y in session.run(None, {"input": batch.numpy()})]
                assert mismatches(found, numbers) == 0, (level, threads)


@pytest.mark.in_turns("cls", "axes")
@pytest.mark.parametrize("axes", [{0: "batch"}, {1: "time"}, {0: "batch", 1: "time"}], ids=str)
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_batches_and_lengths_of_any_size(cls: Any, axes: dict[int, str]) -> None:
    torch.manual_seed(0)
    model = Net(Layers(cls(SIZE, 4, bidirectional=True, batch_first=True), 8)).eval()
    x = torch.randn(1, STEPS, 5)
    quantized = _converted(model, x)
    file = export_quantized_onnx(quantized, x, io.BytesIO(), dynamic_axes={"input": axes})
    assert len(_loops(file)) == 2
    for batch, steps in ((1, STEPS), (3, 40), (5, 7)):
        data = torch.randn(batch if 0 in axes else 1, steps if 1 in axes else STEPS, 5)
        with torch.no_grad():
            wanted = as_numbers(quantized(data))
        for optimization in ("off", "on"):
            assert mismatches(run_onnx(file, [data], optimization), wanted) == 0


def test_an_open_length_needs_no_long_example() -> None:
    """Time is the first axis here, which is tried at small sizes before."""
    torch.manual_seed(0)
    model, x = Net(Layers(nn.GRU(SIZE, 4), 4)).eval(), torch.randn(6, 2, 5)
    quantized = _converted(model, x)
    file = export_quantized_onnx(quantized, x, io.BytesIO(), dynamic_axes={"input": {0: "time", 1: "batch"}})
    for shape in ((6, 2, 5), (31, 1, 5), (3, 4, 5)):
        data = torch.randn(shape)
        with torch.no_grad():
            wanted = as_numbers(quantized(data))
        assert mismatches(run_onnx(file, [data], "on"), wanted) == 0


class Stateful(nn.Module):
    """States come from outside and are given back."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.lstm = QuantStub(), DeQuantStub(), nn.LSTM(5, 4, 2)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        out, (h, c) = self.lstm(self.quant(x), (h, c))
        return self.dequant(out), self.dequant(h), self.dequant(c)


def test_states_that_are_given() -> None:
    inputs = (torch.randn(STEPS, 2, 5), torch.randn(2, 2, 4).tanh(), torch.randn(2, 2, 4))
    quantized = convert_fx(prepared(Stateful().eval(), inputs))
    file = export_quantized_onnx(quantized, inputs, io.BytesIO())
    assert len(_loops(file)) == 2
    data = tuple(0.7 * x.flip(0) for x in inputs)
    with torch.no_grad():
        wanted = as_numbers(quantized(*data))
    for optimization in ("off", "on"):
        assert mismatches(run_onnx(file, data, optimization), wanted) == 0


@pytest.mark.parametrize(("opset", "dtype"), [(11, "qint8"), (11, "qint16"), (17, "qint8"), (21, "qint16")])
def test_loops_at_every_opset_in_training_and_integers(opset: int, dtype: str) -> None:
    model, x = _net("lstm with states")
    qat = prepared(model, (x,), dtype)
    quantized = convert_fx(qat)
    file = export_quantized_onnx(quantized, x, io.BytesIO(), opset_version=opset)
    with torch.no_grad():
        assert _loops(file) and mismatches(run_onnx(file, [x], "on"), as_numbers(quantized(x))) == 0
    set_fake_quantize(qat, FakeQuantState.QAT)
    file = export_to_onnx(qat, x, io.BytesIO(), opset_version=opset)
    assert _loops(file) and len(file.graph.node) < 600
    with torch.no_grad():
        wanted = as_numbers(qat(x))
    for found, out in zip(run_onnx(file, [x], "on", int8_kernels=False), wanted, strict=True):
        assert (found - out).abs().max() <= out.abs().max() / 100


def test_the_file_of_many_steps_is_as_small_as_that_of_few() -> None:
    sizes = []
    for steps in (20, 60):
        torch.manual_seed(0)
        model = Net(Layers(nn.LSTM(SIZE, 4, 2, bidirectional=True, batch_first=True), 8)).eval()
        x = torch.randn(1, steps, 5)
        data = io.BytesIO()
        export_quantized_onnx(_converted(model, x), x, data)
        sizes.append(len(data.getvalue()))
    assert sizes[1] < 1.02 * sizes[0]
