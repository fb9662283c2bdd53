"""What a graph viewer shows of a file: the user's modules, lines and names; and constants that are stored once."""

from __future__ import annotations

import ast
import json
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.export.names import port_names
from horizon_plugin_pytorch.export.onnx_graph import pack_steps
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import DeQuantStub, PrepareMethod, QuantStub, convert, prepare
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.routes import OPTIMIZATION, calibrate, mismatches, qconfig, run_onnx

METHODS = [PrepareMethod.SYMBOLIC, PrepareMethod.JIT_STRIP]
X = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def exported(model: nn.Module, inputs: Any, dtype: str = "qint8", **options: Any) -> tuple[onnx.ModelProto, nn.Module]:
    set_march(March.NASH_E)
    method = options.pop("method", PrepareMethod.JIT_STRIP)
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    qat = prepare(model.eval(), given, qconfig_dict={"": qconfig(dtype)}, method=method, out_dir=None)
    quantized = convert(calibrate(qat, given))
    return export_quantized_onnx(quantized, options.pop("args", given), options.pop("f"), **options), quantized


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 3, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x)) * x  # the line of the product


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.dequant(self.layers(self.quant(x))))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_nodes_and_values_carry_module_paths_and_lines(method: PrepareMethod, tmp_path: Path) -> None:
    file, _ = exported(Net(), X, method=method, f=tmp_path / "m.onnx")
    nodes = {node.name: node for node in file.graph.node}
    for name in (
        "layers/0/conv/QLinearConv",
        "layers/1/conv/QLinearConv",
        "quant/QuantizeLinear",
        "layers/0/act/Gather",
    ):
        assert list(nodes[name].output) == [name]
    scopes = ast.literal_eval(nodes["layers/1/conv/QLinearConv"].metadata_props[0].value)
    assert nodes["layers/1/conv/QLinearConv"].metadata_props[0].key == "pkg.torch.onnx.name_scopes"
    assert scopes == ["", "layers", "layers.1", "layers.1.conv", "layers_1_conv_conv"]
    product = next(node for node in file.graph.node if node.name.startswith("layers/0/_generated_mul"))
    line = Block.forward.__code__.co_firstlineno + 1
    assert product.doc_string == f"{Path(__file__).name}:{line}"
    weights = [t.name for t in file.graph.initializer if len(t.dims) == 4]
    assert weights == ["layers/0/conv/weight", "layers/1/conv/weight"]
    classes = json.loads({entry.key: entry.value for entry in file.metadata_props}["horizon_plugin_pytorch.modules"])
    assert classes["layers"] == "Sequential" and classes["layers.0.conv"] == "Conv2d"
    names = [name for node in file.graph.node for name in node.output] + [t.name for t in file.graph.initializer]
    assert len(names) == len(set(names))


class Ports(nn.Module):
    """Takes and gives what it is told to."""

    def __init__(self, pick: Any, give: Any) -> None:
        super().__init__()
        self.quant, self.dequant, self.conv, self.pick, self.give = (
            QuantStub(),
            DeQuantStub(),
            nn.Conv2d(3, 2, 1),
            pick,
            give,
        )

    def forward(self, *args: Any) -> Any:
        total = sum(self.pick(*args))
        return self.give(self.dequant(self.conv(self.quant(total))))


Pair = namedtuple("Pair", "left right")
PORTS: dict[str, tuple[Any, Any, Any, list[str], list[str]]] = {
    "dictionaries": (
        ({"left": X, "right": X + 1},),
        lambda d: [d["left"], d["right"]],
        lambda y: {"boxes": y, "scores": y + 1},
        ["left", "right"],
        ["boxes", "scores"],
    ),
    "nested": (
        ({"camera": {"left": X, "right": [X, X]}},),
        lambda d: [d["camera"]["left"], *d["camera"]["right"]],
        lambda y: {"heads": [{"boxes": y}, {"boxes": y + 1}]},
        ["camera_left", "camera_right_0", "camera_right_1"],
        ["heads_0_boxes", "heads_1_boxes"],
    ),
    "the same keys twice": (
        ({"x": X}, {"x": X}),
        lambda a, b: [a["x"], b["x"]],
        lambda y: [{"x": y}, {"y": y + 1}, y + 2],
        ["input_0_x", "input_1_x"],
        ["x", "y", "output_2"],
    ),
    "an output called as an input": (
        ({"x": X},), lambda d: [d["x"]], lambda y: {"x": y, "output_x": y + 1}, ["x"], ["output_x", "output_output_x"],
    ),
    "named tuples": (
        (Pair(X, X), X), lambda p, x: [*p, x], lambda y: Pair(y, (y + 1, y + 2)), ["left", "right", "input_2"],
        ["output_left", "right_0", "right_1"],
    ),
    "keys that are no strings": (
        ({0: X, (1, 2): X},), lambda d: d.values(), lambda y: {8: y, 16: [y + 1], "": y + 2}, ["0", "(1, 2)"],
        ["8", "16_0", "output_"],
    ),
    "one tensor": ((X,), lambda x: [x], lambda y: [y], ["input"], ["output"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PORTS)
def test_inputs_and_outputs_are_named_by_keys_and_fields(name: str, tmp_path: Path) -> None:
    inputs, pick, give, wanted_inputs, wanted_outputs = PORTS[name]
    file, quantized = exported(Ports(pick, give), inputs, f=tmp_path / "m.onnx")
    assert [i.name for i in file.graph.input] == wanted_inputs
    assert [o.name for o in file.graph.output] == wanted_outputs
    assert quantized(*inputs) is not None


def test_arguments_that_are_given_by_name_are_called_so(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.conv = QuantStub(), DeQuantStub(), nn.Conv2d(3, 2, 1)

        def forward(self, image: Tensor, shift: Tensor) -> Tensor:
            return self.dequant(self.conv(self.quant(image + shift)))

    file, _ = exported(Two(), (X, X), args={"shift": X, "image": X}, f=tmp_path / "m.onnx")
    assert [i.name for i in file.graph.input] == ["image", "shift"]


def test_names_are_different_whatever_the_keys() -> None:
    paths = [("a", "b"), ("a_b",), ("output_a_b",), (0,), ("output_3",)]
    names = port_names(paths, "output", None, ["a_b"])
    assert len(set(names) | {"a_b"}) == len(paths) + 1


# -- constants ---------------------------------------------------------------------------------------------------------


class Twins(nn.Module):
    """Two modules with the same weights, scales and tables."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.a, self.b = (nn.Sequential(nn.Conv2d(3, 3, 3), nn.GELU()) for _ in range(2))
        self.b.load_state_dict(self.a.state_dict())

    def forward(self, x: Tensor) -> tuple:
        x = self.quant(x)
        return self.dequant(self.a(x)), self.dequant(self.b(x))


@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_constants_of_equal_content_are_stored_once(dtype: str, tmp_path: Path) -> None:
    file, quantized = exported(Twins(), X, dtype, f=tmp_path / "m.onnx")
    contents = Counter((t.data_type, tuple(t.dims), t.raw_data) for t in file.graph.initializer)
    assert max(contents.values()) == 1
    assert sum("/table" in t.name for t in file.graph.initializer) == 1
    read = Counter(name for node in file.graph.node if node.op_type == "Cast" for name in node.input)
    assert max(read[t.name] for t in file.graph.initializer) == 1  # nor are they made float32 twice
    with torch.no_grad():
        wanted = list(quantized(X))
    for optimization in OPTIMIZATION:
        assert mismatches(run_onnx(file, (X,), optimization), wanted) == 0


def test_a_table_of_16_bits_takes_a_quarter_of_its_size(tmp_path: Path) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.softmax = QuantStub(), DeQuantStub(), nn.Softmax(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.softmax(F.gelu(torch.sigmoid(self.quant(x)))))

    file, _ = exported(Tables(), X, "qint16", f=tmp_path / "m.onnx")
    tables = [len(t.raw_data) for t in file.graph.initializer if "/table" in t.name]
    assert len(tables) == 3 and max(tables) <= 2 * 65536 // 4


def _unpacked(packing: tuple[Tensor, int, int, int]) -> Tensor:
    data, bits, low, start = packing
    steps = data.long() // torch.tensor([1 << shift for shift in range(0, 8, bits)]) % (1 << bits)
    return (steps.flatten() + low).cumsum(0) + start


INDEX = torch.arange(65536)
TABLES = {
    "rising": (INDEX // 3, 1),
    "falling": (-(INDEX // 2), 1),
    "constant": (INDEX * 0 + 7, 1),
    "steep": (INDEX - 32768, 1),
    "two bits": ((INDEX.double() / 9000).sin().mul(9000).round().long(), 2),
    "jump": (INDEX // 5 + 9 * (INDEX > 99), 4),
    "a byte": (INDEX * 37 % 101 + 1000, 8),
    "wild": (INDEX * 7919 % 65536 - 32768, None),
    "a byte that saves nothing": (INDEX * 37 % 101, None),
    "short": (INDEX[:256] // 3, None),
    "odd": (INDEX[:9001], None),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_packed_without_loss(name: str) -> None:
    table, bits = TABLES[name]
    packing = pack_steps(table.float())
    assert (None if packing is None else packing[1]) == bits
    if packing is not None:
        assert packing[0].numel() == 65536 * packing[1] // 8 and torch.equal(_unpacked(packing), table)
