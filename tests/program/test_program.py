"""A converted model recorded as a program: it runs to the same numbers, prints, is saved, and shows each value."""

from __future__ import annotations

import collections
import dataclasses
import io
import operator
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.program import Program, record_program
from horizon_plugin_pytorch.program.note import note_of, operator_name, value_of
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    PrepareMethod,
    QuantStub,
    QuantWrapper,
    convert,
    convert_fx,
    prepare,
    prepare_qat,
)
from tests.models import ZOO, make
from tests.routes import as_numbers, calibrate, mismatches, prepared, qconfig


def converted(model: nn.Module, inputs: tuple, method: PrepareMethod = PrepareMethod.SYMBOLIC) -> nn.Module:
    set_march(March.NASH_E)
    qat = prepare(model.eval(), inputs, qconfig_dict={"": qconfig()}, method=method, out_dir=None)
    return convert(calibrate(qat, inputs))


def assert_equal(program: Program, model: nn.Module, *batches: tuple) -> None:
    for batch in batches:
        with torch.no_grad():
            wanted = model(*batch)
        found = program(*batch)
        assert mismatches([*map(plain, tensors_of(found))], [*map(plain, tensors_of(wanted))]) == 0
        for a, b in zip(tensors_of(found), tensors_of(wanted), strict=True):
            assert type(a) is type(b)
            if isinstance(a, QTensor):
                assert torch.equal(a.q_scale(), b.q_scale()) and a.dtype == b.dtype and a.range == b.range


def plain(x: Tensor) -> Tensor:
    return x.int_repr() if isinstance(x, QTensor) else x


def others(inputs: tuple) -> tuple:
    return tuple(torch.randn_like(x) for x in inputs)


@pytest.mark.in_turns("dtype", "name")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
@pytest.mark.parametrize("name", ZOO)
def test_the_program_of_a_model_gives_its_integers(name: str, dtype: str) -> None:
    model, inputs = make(name)
    quantized = convert_fx(prepared(model, inputs, dtype))
    program = record_program(quantized, inputs)
    assert_equal(program, quantized, inputs, others(inputs))
    again = pickle.loads(pickle.dumps(program))
    assert str(again) == str(program)
    assert_equal(again, quantized, others(inputs))
    module = program.graph_module(*inputs)
    wanted = tensors_of(program(*inputs))
    assert mismatches(module, [x.plain() if isinstance(x, QTensor) else x for x in wanted]) == 0


class Net(nn.Module):
    """A quantized part, and code on its result."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.quant, self.conv, self.dequant = QuantStub(), nn.Conv2d(3, 4, 1), DeQuantStub()
        self.after = Code(function)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.dequant(self.conv(self.quant(x))))


class Code(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.arange(4.0).reshape(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.function(x) if self.function.__code__.co_argcount == 1 else self.function(x, self.table)


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def slices(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :2] = y[:, 1:3] * 2
    y[..., 0] += 1
    return y


def view_first(x: Tensor) -> tuple:
    y = x * 1
    part = y[:, 1]
    flat = y.view(-1)
    part.mul_(3)
    flat[::2].add_(1)
    return part, y, flat.sum()


def canvas(x: Tensor) -> Tensor:
    out = torch.zeros(2, 4, 8, 8)
    out[:, :, 1:7, 1:7] = x
    return out


def constant_changes(x: Tensor) -> tuple:
    step = torch.ones(4, 1, 1)
    first = x * step
    step.mul_(3)
    return first, x * step


def constant_joins(x: Tensor) -> tuple:
    sums = torch.zeros(2)
    view = sums[1:]
    sums[0] = x.sum()
    return sums, view + 1


def constant_adds(x: Tensor) -> tuple:
    sums = torch.arange(8.0).reshape(2, 4)
    first, second = sums.chunk(2, 1)
    first.add_(x.sum())  # reads the constant and writes to it
    second.mul_(first)
    return first, second, sums


def transposed(x: Tensor) -> Tensor:
    y = (x + 1).permute(0, 2, 3, 1)
    y[:, 0] = 0
    y.transpose(1, 2)[0].neg_()
    return y.contiguous()


def channels_last(x: Tensor) -> Tensor:
    y = x.contiguous(memory_format=torch.channels_last)
    y[:, 1] = 5
    return y


def other_type(x: Tensor) -> Tensor:
    counts = torch.zeros(2, 4, 6, 6, dtype=torch.int32)
    counts.copy_(x * 10)
    counts += 1
    return counts.masked_fill_(counts < 0, 7)


def out_argument(x: Tensor) -> Tensor:
    y = torch.empty(2, 4, 6, 6)
    torch.add(x, 1, out=y)
    return y.squeeze_(0)


WRITES = {f.__name__: f for f in (
    slices, view_first, canvas, constant_changes, constant_joins, constant_adds, transposed, channels_last, other_type,
    out_argument,
)}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_writes_in_place_are_values_of_the_program(name: str) -> None:
    model = converted(Net(WRITES[name]), (X,), PrepareMethod.JIT)
    program = record_program(model, X)
    assert not [node for node in program.operators if node.target._schema.is_mutable]
    assert_equal(program, model, (X,), (X * 2,), (X,))  # and again: no run changes the program


FLOAT = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "buffer": lambda x, table: (x + table, table),
    "several": lambda x: (x.split(2, 1), {"max": x.max(1), "none": None, "count": 3}),
    "input is output": lambda x: [x, x.detach(), x[:]],
    "shapes": lambda x: torch.zeros_like(x) + x.new_full((1,), 2.0),
    "uniform": lambda x: x + torch.linspace(0, 1, 6),
    "unused": lambda x: (x + 1, torch.special.i0(x))[0],
}


@pytest.mark.parametrize("method", [PrepareMethod.SYMBOLIC, PrepareMethod.JIT], ids=lambda m: m.name)
@pytest.mark.parametrize("name", FLOAT)
def test_float_code_runs_to_the_same_bits(name: str, method: PrepareMethod) -> None:
    model = converted(Net(FLOAT[name]), (X,), method)
    program = record_program(model, X)
    assert_equal(program, model, (X,), (X * 2,))
    assert "aten::special_i0" not in map(operator_name, program.operators)


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_in_float_run_to_the_same_numbers(cls: Any) -> None:
    """To the last bit but one: torch's steps work on slices, for which some processors have other float kernels."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.conv, self.dequant, self.cell = QuantStub(), nn.Conv2d(3, 4, 1), DeQuantStub(), cls(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(self.dequant(self.conv(self.quant(x))).flatten(0, 1))[0]

    model = converted(Recurrent(), (X,))
    program = record_program(model, X)
    for batch in (X, X * 2):
        with torch.no_grad():
            torch.testing.assert_close(program(batch), model(batch), rtol=0, atol=2.0**-22)


def test_eager_models_are_recorded() -> None:
    set_march(March.BAYES)
    model = QuantWrapper(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid())).eval()
    model.qconfig = qconfig()
    quantized = convert(calibrate(prepare_qat(model), (X,)))
    program = record_program(quantized, X)
    assert_equal(program, quantized, (X,))
    assert [note_of(node).path for node in program.operators] == ["quant", "module.0", "module.1", "dequant"]


# -- structures ---------------------------------------------------------------


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    image: Tensor
    rest: dict[str, Any]


class Answer(collections.OrderedDict):
    """A dictionary of a class of its own, as libraries give."""


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 4, 1)

    def forward(self, batch: Batch, scale: float = 1.0) -> Any:
        y = self.dequant(self.conv(self.quant(batch.image)))
        pair = Pair(y * scale, [y + batch.rest["shift"][0], None])
        return Answer(first=Batch(y, {"pair": pair, "name": "x"}), second=(self.conv(self.quant(batch.image)),))


def test_structures_go_in_and_come_out() -> None:
    batch = Batch(X, {"shift": [torch.ones(1)]})
    model = converted(Nested(), (batch, 2.0), PrepareMethod.JIT)
    program = record_program(model, (batch, 2.0))
    found = program(batch, 2.0)
    assert isinstance(found, Answer) and isinstance(found["first"].rest["pair"], Pair)
    assert found["first"].rest["name"] == "x" and found["first"].rest["pair"].right[1] is None
    assert isinstance(found["second"][0], QTensor)
    assert_equal(program, model, (batch, 2.0))
    assert program.input_paths == ((0, "image"), (0, "rest", "shift", 0))
    paths = [
        ("first", "image"),
        ("first", "rest", "pair", "left"),
        ("first", "rest", "pair", "right", 0),
        ("second", 0),
    ]
    assert program.output_paths == paths


SCRIPT = """
import sys, torch
from horizon_plugin_pytorch.program import Program
program = Program.load(sys.argv[1])
assert not any(name.startswith("tests") for name in sys.modules)
out = program({"image": torch.load(sys.argv[2]), "rest": [torch.ones(1)]}, 2.0)
torch.save([out["first"].image, out["first"].rest["pair"][0], out["second"][0].int_repr()], sys.argv[3])
"""


@pytest.mark.processes
def test_a_saved_program_runs_in_another_process_without_the_users_classes(tmp_path: Path) -> None:
    batch = Batch(X, {"shift": [torch.ones(1)]})
    model = converted(Nested(), (batch, 2.0), PrepareMethod.JIT)
    record_program(model, (batch, 2.0)).save(tmp_path / "program.pt")
    torch.save(X, tmp_path / "x.pt")
    arguments = [str(tmp_path / name) for name in ("program.pt", "x.pt", "out.pt")]
    subprocess.run([sys.executable, "-c", SCRIPT, *arguments], check=True)
    wanted = model(batch, 2.0)
    found = torch.load(tmp_path / "out.pt")
    assert torch.equal(found[0], wanted["first"].image) and torch.equal(found[1], wanted["first"].rest["pair"].left)
    assert torch.equal(found[2], wanted["second"][0].int_repr())


@pytest.mark.parametrize("content", [b"", b"no program", pickle.dumps({"a": 1})])
def test_a_file_of_another_kind_is_refused(content: bytes) -> None:
    with pytest.raises(ExportError, match="no program"):
        Program.load(io.BytesIO(content))
    file = io.BytesIO()
    torch.save({"a": 1}, file)
    file.seek(0)
    with pytest.raises(ExportError, match="no program"):
        Program.load(file)


def test_what_needs_a_class_to_be_read_is_not_saved() -> None:
    program = record_program(converted(Net(lambda x: x + 1), (X,)), X)
    program.outputs = {"x": program.outputs, "kind": object()}
    with pytest.raises(ExportError, match="`object`"):
        program.save(io.BytesIO())


def test_a_quantized_tensor_may_be_an_input() -> None:
    model = converted(Net(lambda x: x), (X,))
    image = model.quant(X)
    program = pickle.loads(pickle.dumps(record_program(model.conv, (image,))))
    assert_equal(program, model.conv, (image,), (model.quant(X * 2),))
    other = QTensor(image.int_repr(), image.q_scale() * 2, "qint8")
    for wrong in (X, other):
        with pytest.raises(ExportError, match=r"input 0 .* expected qint8\[2, 3, 6, 6\]"):
            program(wrong)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", ["jit", "export"])
def test_tools_of_torch_take_the_graph_as_a_module(tool: str) -> None:
    program = record_program(converted(Nested(), (Batch(X, {"shift": [X[0, 0, 0, :1]]}), 2.0), PrepareMethod.JIT),
                             (Batch(X, {"shift": [X[0, 0, 0, :1]]}), 2.0))  # fmt: skip
    inputs = (X, X[0, 0, 0, :1])
    wanted, file = program.graph_module(*inputs), io.BytesIO()
    if tool == "jit":
        torch.jit.save(torch.jit.trace(program.graph_module, inputs), file)
        found: Any = torch.jit.load(io.BytesIO(file.getvalue()))
        names = {node.kind() for node in found.graph.nodes()}
    else:
        torch.export.save(torch.export.export(program.graph_module, inputs), file)
        loaded = torch.export.load(io.BytesIO(file.getvalue()))
        found, names = loaded.module(), {operator_name(node) for node in loaded.graph.nodes}
    assert {"horizon::quantize", "horizon::conv", "horizon::dequantize"} <= names
    assert mismatches(found(*inputs), wanted) == 0


# -- notes ---------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return (self.relu(self.conv(x)) * 2).flatten(1)  # the line of the flatten


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.inner = QuantStub(), DeQuantStub(), nn.ModuleList([Inner()])

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner[0](self.quant(x))
        return self.dequant(y), y


LINE = Inner.forward.__code__.co_firstlineno + 1


@pytest.mark.parametrize("method", [PrepareMethod.SYMBOLIC, PrepareMethod.JIT], ids=lambda m: m.name)
def test_each_node_knows_its_module_line_shape_scale_and_format(method: PrepareMethod) -> None:
    model = converted(Outer(), (X,), method)
    program = record_program(model, X)
    nodes = {operator_name(node): node for node in program.operators}
    conv, flat = nodes["horizon::conv"], nodes["aten::view"]
    assert note_of(conv).path.startswith("inner.0.") and note_of(conv).line == f"{Path(__file__).name}:{LINE}"
    assert note_of(flat).line == f"{Path(__file__).name}:{LINE}"
    _, integers = model(X)
    known = value_of(flat)
    assert known.shape == (2, 144) and known.quantization is not None
    assert known.quantization.dtype == "qint8" and torch.equal(known.quantization.scale, integers.q_scale())
    assert value_of(nodes["horizon::dequantize"]).quantization is None
    assert program.classes[""] and program.classes["inner.0"] and program.classes["quant"] == "Quantize"


class Attending(nn.Module):
    """Attention, which divides its queries by a number: their integers stay, and their scale changes."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("method", [PrepareMethod.SYMBOLIC, PrepareMethod.JIT], ids=lambda m: m.name)
def test_integers_with_another_scale_know_their_module_and_line(method: PrepareMethod) -> None:
    data = torch.randn(2, 3, 8)
    program = record_program(converted(Attending(), (data,), method), data)
    scaled = [note_of(node) for node in program.operators if operator_name(node) == "aten::alias"]
    line = Attending.forward.__code__.co_firstlineno + 2
    assert [note.path for note in scaled] == ["attention.attention.scale"]
    assert {note.line for note in scaled} == {f"{Path(__file__).name}:{line}"}
    assert all(note_of(node).line for node in program.operators)


def test_one_tensor_of_integers_with_two_scales() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()

        def forward(self, x: Tensor) -> tuple:
            x = self.quant(x)
            y = x * 2
            return x, y, self.dequant(y)

    model = converted(Twice(), (X,))
    program = record_program(model, X)
    assert_equal(program, model, (X,))
    first, second, _ = program(X)
    assert float(second.q_scale()) == 2 * float(first.q_scale())
    assert torch.equal(first.int_repr(), second.int_repr())
    scales = [float(value_of(node).quantization.scale) for node in program.graph.output_node().args[0][:2]]
    assert scales == [float(first.q_scale()), float(second.q_scale())]


def test_running_node_by_node_shows_every_value() -> None:
    model = converted(Outer(), (X,))
    program = record_program(model, X)
    seen = list(program.run(X))
    assert [node.name for node, _ in seen] == [n.name for n in program.graph.nodes if n.op != "get_attr"]
    for node, value in seen:
        if node.op != "output" and isinstance(value, Tensor):
            assert tuple(value.shape) == value_of(node).shape and value.dtype == value_of(node).dtype
            wrapped = value_of(node).wrap(value)
            assert isinstance(wrapped, QTensor) == (value_of(node).quantization is not None)
    assert mismatches(as_numbers(seen[-1][1][:1]), as_numbers(model(X)[:1])) == 0


def test_values_are_let_go_of_after_their_last_use() -> None:
    import weakref

    program = record_program(converted(Outer(), (X,)), X)
    alive: list[Any] = []
    most = 0
    for node, value in program.run(X):
        if node.op == "call_function":
            alive.append(weakref.ref(value))
        del value
        most = max(most, sum(ref() is not None for ref in alive))
    assert most <= 3 < len(alive)


def test_the_text_of_a_program() -> None:
    text = str(record_program(converted(Outer(), (X,)), X))
    first, image, quantize, *_, last = text.split("\n")
    assert first.startswith("Outer: ") and " operators, " in first and " bytes" in first
    assert image == "  input_0: float32[2, 3, 6, 6]"
    assert quantize.startswith("  quant_quantize: qint8[2, 3, 6, 6] * ")
    assert f"# quant ({Path(__file__).name}:" in quantize
    assert "weights=[inner_0_conv_weights]" in text or "weights=[inner_0_relu_weights]" in text
    assert last.startswith("  return dequant_dequantize, ")


def test_equal_constants_are_one() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.a, self.b = (
                QuantStub(),
                DeQuantStub(),
                nn.Conv2d(3, 4, 1),
                nn.Conv2d(3, 4, 1),
            )
            self.b.load_state_dict(self.a.state_dict())

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            return self.dequant(self.a(x)), self.dequant(self.b(x))

    program = record_program(converted(Same(), (X,)), X)
    weights = [name for name in program.constants if name.endswith("weights")]
    assert weights == ["a_weights"]
    read = [node for node in program.graph.nodes if node.op == "get_attr"]
    assert len(read) == len(program.constants)
    zeros = converted(Net(lambda x: (x + torch.zeros(1), x + -torch.zeros(1))), (X,), PrepareMethod.JIT)
    assert sum(not x.any() for x in record_program(zeros, X).constants.values()) == 2  # -0.0 is another number


# -- what cannot be recorded, or run ---------------------------------------------------------------


READERS = {
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * x.flatten().tolist()[0],
    "numpy": lambda x: x * float(x.detach().numpy().max()),
    "branch": lambda x: x if x.sum() > 1e9 else x + 1,
    "tensor of tensors": lambda x: x * torch.tensor([x.max(), x.min()]).sum(),
    "new tensor of tensors": lambda x: x * x.new_tensor([[x.max()], [x.min()]]).sum(),
    "array of tensors": lambda x: x * torch.asarray((x.max(),)),
    "class of tensors": lambda x: x * torch.Tensor([x.max(), 1.0]).sum(),
    "class of integers": lambda x: x * torch.LongTensor([x.argmax()]),
    "dlpack": lambda x: x * torch.from_dlpack(x.max()),
}


@pytest.mark.parametrize("name", READERS)
def test_a_model_that_reads_numbers_is_refused_with_its_line(name: str) -> None:
    function = READERS[name]
    model = converted(Net(function), (X,), PrepareMethod.JIT)
    line = f"{Path(__file__).name}:{function.__code__.co_firstlineno}"
    with pytest.raises(ExportError, match="reads a number out of a computed tensor") as error:
        record_program(model, X)
    assert f"at `after` ({line})" in str(error.value)


def test_a_model_that_keeps_a_tensor_is_refused() -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = QuantWrapper(nn.Conv2d(3, 4, 1)), torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.inner(x) + self.last.mean()
            return self.last

    set_march(March.BAYES)
    model = Memory().eval()
    model.inner.qconfig = qconfig()
    quantized = convert(calibrate(prepare_qat(model), (X,)))
    with pytest.raises(ExportError, match="Make the state an input"):
        record_program(quantized, X)


def test_a_prepared_model_has_no_integer_program() -> None:
    set_march(March.BAYES)
    with pytest.raises(ExportError, match="Call `convert_fx`"):
        record_program(prepared(QuantWrapper(nn.Conv2d(3, 4, 1)).eval(), (X,)), X)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((X, X), "takes 1 tensors, got 2"),
        ((X[:1],), r"float32\[1, 3, 6, 6\]: expected float32\[2"),
        ((X.double(),), "float64"),
    ],
)
def test_inputs_that_the_program_was_not_recorded_with_are_refused(args: tuple, words: str) -> None:
    program = record_program(converted(Net(lambda x: x), (X,)), X)
    with pytest.raises(ExportError, match=words):
        program(*args)


@pytest.mark.parametrize("method", [PrepareMethod.SYMBOLIC, PrepareMethod.JIT], ids=lambda m: m.name)
def test_a_model_that_keeps_nothing_runs_once_and_its_tensors_are_let_go_of(method: PrepareMethod) -> None:
    import gc

    model = converted(Outer(), (X,), method)
    runs = []
    model.quant.register_forward_hook(lambda *call: runs.append(1))
    gc.disable()
    try:
        record_program(model, X)
    finally:
        gc.enable()
    assert len(runs) == 1


def test_recording_leaves_the_model_alone() -> None:
    model = converted(Net(lambda x: x), (X,))
    model.train()
    model.conv.eval()
    state, given = {k: v.clone() for k, v in model.state_dict().items()}, X.clone()
    program = record_program(model, X)
    assert model.training and not model.conv.training and torch.equal(X, given)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert operator.getitem not in [node.target for node in program.operators]
