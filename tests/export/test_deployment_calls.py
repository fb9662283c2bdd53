"""The calls of the guides around the compiler, without it: the integer graph, its picture, and its counts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import onnx
import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import ExportError, QuantizationWarning
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    compile_model,
    convert,
    convert_fx,
    export_hbir,
    hbdk4,
    perf_model,
    prepare,
    set_fake_quantize,
    visualize_model,
)
from tests.routes import calibrate, prepared, qconfig, run_onnx

X, Y = torch.randn(2, 1, 4, 8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_x, self.quant_y, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.conv, self.up, self.fc = nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(6, 2, 2, 2), nn.Linear(12, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        z = self.conv(self.quant_x(x) + self.quant_y(y))
        up = self.up(z)
        return {"a": self.dequant(self.fc(up)), "b": [self.dequant(torch.matmul(z, z))]}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def qat() -> nn.Module:
    set_march(March.NASH_E)
    torch.manual_seed(0)
    return prepared(Net().eval(), (X, Y))


@pytest.fixture(scope="module")
def quantized(qat: nn.Module) -> nn.Module:
    return convert_fx(qat)


class Tuples(nn.Module):
    """Traced modules give no dictionaries of lists."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(x, y)
        return out["a"], out["b"][0]


def test_export_gives_a_graph_of_flat_inputs_and_outputs(qat: nn.Module, quantized: nn.Module) -> None:
    graph = hbdk4.export(qat, (X, Y), "net", ["left", "right"], {"a": "first", "b": ["second"]}, input_descs=["l", "r"])
    function, wanted = graph.functions[0], quantized(X, Y)
    assert (function.name, function.inputs, function.outputs) == ("net", ["left", "right"], ["first", "second"])
    flat = hbdk4.get_hbir_input_flattener(graph)(X, Y)
    outputs = function(*flat)
    assert torch.equal(outputs[0], wanted["a"]) and torch.equal(function(flat)[1], wanted["b"][0])
    again = hbdk4.get_hbir_output_unflattener(graph)(outputs)
    assert again.keys() == wanted.keys() and torch.equal(again["b"][0], wanted["b"][0])
    file = io.BytesIO()
    graph.save(file)
    proto = onnx.load_model_from_string(file.getvalue())
    assert {"horizon_plugin_pytorch.input_descs": '["l", "r"]'}.items() <= {
        entry.key: entry.value for entry in proto.metadata_props
    }.items()
    assert all(torch.equal(a, b) for a, b in zip(run_onnx(proto, flat), outputs, strict=True))
    with pytest.raises(ExportError, match="takes 2 tensors"):
        graph.flatten(X)
    with pytest.raises(ExportError, match="gives 2 tensors"):
        graph.unflatten([X])


class Views(nn.Module):
    """Dictionaries and lists, in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, views: dict[str, Any], scale: float = 2.0) -> dict[str, Any]:
        a, b = self.first(self.left(views["left"])), self.second(self.right(views["others"][0]))
        return {"sum": [self.dequant(a + b) * scale, {"left": self.dequant(a)}], "count": len(views), "grid": b}


def test_nested_arguments_and_outputs_go_through_the_flat_graph() -> None:
    """In ONNX Runtime too; the order of a dictionary is not that of the inputs."""
    set_march(March.NASH_E)
    torch.manual_seed(0)
    x, y = torch.randn(2, 1, 3, 4, 4)
    views, turned = {"left": x, "others": [y]}, {"others": [y], "left": x}
    qat = prepare(Views().eval(), (views,), qconfig_dict={"": qconfig()}, out_dir=None)
    quantized = convert(calibrate(qat, (views,)))
    wanted = quantized(views)
    graph = hbdk4.export(quantized, {"views": views, "scale": 2.0})
    flatten, unflatten = hbdk4.get_hbir_input_flattener(graph), hbdk4.get_hbir_output_unflattener(graph)
    graph.save("views.onnx")
    for flat in (flatten(views), flatten(turned, 2.0), flatten(views=turned)):
        for outputs in (graph.functions[0](*flat), run_onnx(onnx.load("views.onnx"), flat)):
            found = unflatten(outputs)
            assert found.keys() == wanted.keys() and found["count"] == 2
            assert torch.equal(found["sum"][0], wanted["sum"][0])
            assert torch.equal(found["sum"][1]["left"], wanted["sum"][1]["left"])
            assert torch.equal(found["grid"], wanted["grid"].int_repr())
    program = graph.program
    assert torch.equal(program(turned)["sum"][0], wanted["sum"][0])
    for take in (flatten, program):
        with pytest.raises(ExportError, match=r"takes a tensor as `views.others.0`, and got one as `views.right.0`"):
            take({"left": x, "right": [y]})
        with pytest.raises(ExportError, match="takes 2 tensors, got 3"):
            take({"left": x, "others": [y, y]})
    with pytest.raises(ExportError, match="with the arguments `views`, got 0 by position and `image`"):
        flatten(image=x)


def test_export_wants_the_state_whose_integers_it_writes(qat: nn.Module) -> None:
    assert hbdk4.pre_export(qat, inplace=True) is qat and hbdk4.pre_export(qat) is not qat
    with pytest.raises(ExportError, match="float model"):
        hbdk4.pre_export(Net().eval())
    with pytest.raises(ExportError, match="not converted"):
        hbdk4.export(Net(), (X, Y))
    try:
        set_fake_quantize(qat, FakeQuantState.QAT)
        with pytest.raises(ExportError, match="VALIDATION"):
            hbdk4.export(qat, (X, Y))
        set_fake_quantize(qat, FakeQuantState.VALIDATION)
        with pytest.raises(ExportError, match="training mode"):
            hbdk4.export(qat.train(), (X, Y))
    finally:
        set_fake_quantize(qat.eval(), FakeQuantState.VALIDATION)
    with pytest.raises(TypeError, match="what `hbdk4.export` gives"):
        hbdk4.get_hbir_input_flattener(qat)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["model", "script"])
def test_export_hbir_writes_the_integers(quantized: nn.Module, kind: str) -> None:
    wanted = quantized(X, Y)
    module = quantized if kind == "model" else torch.jit.trace(Tuples(quantized), (X, Y))
    with pytest.warns(QuantizationWarning, match=r"ONNX file; call it \.onnx"):
        inputs, outputs = export_hbir(module, (X, Y), "net.hbir", March.NASH_E)
    assert inputs == ["input_0", "input_1"] and len(outputs) == 2
    found = run_onnx(onnx.load("net.hbir"), (X, Y))
    assert torch.equal(found[0], wanted["a"]) and torch.equal(found[1], wanted["b"][0])


def test_a_failed_export_leaves_nothing(quantized: nn.Module) -> None:
    class Float(Tuples):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.linalg.svdvals(super().forward(x, y)[0])

    with pytest.raises(ExportError, match="svd"):
        export_hbir(Float(quantized), (X, Y), "net.onnx")
    with pytest.raises(ExportError, match="not converted"):
        export_hbir(Net(), (X, Y), "net.onnx")
    assert not list(Path().iterdir())


def test_costs_are_counted(quantized: nn.Module, capsys: Any) -> None:
    found = perf_model(quantized, (X, Y), name="<net>", out_dir="out", layer_details=True)
    rows = {row[0]: row for row in found["layer details"]}
    assert rows["conv_conv"][3:] == [2 * 6 * 36 * 4 * 9, 6 * 4 * 9, 6 * 4 * 9, 256, 216]
    assert rows["up_conv"][3] == 2 * 6 * 36 * 2 * 4  # each number of the input meets a kernel
    assert rows["fc_linear"][3:6] == [2 * 2 * 12 * 5 * 12, 60, 60]
    (product,) = [row for name, row in rows.items() if row[1] == "horizon::matmul"]
    assert product[3] == 2 * 6 * 36 * 6 and product[6] == 216
    summary = found["summary"]
    assert summary["parameters"] == 6 * 4 * 9 + 6 * 2 * 4 + 60 and "not a latency" in summary["note"]
    assert not {"FPS", "latency"} & summary.keys() and "not a latency" in capsys.readouterr().out
    page = Path("out/<net>.html").read_text()
    assert "&lt;net&gt;" in page and "<net>" not in page and "http" not in page
    with pytest.warns(QuantizationWarning, match="opt changes nothing"):
        perf_model(quantized, (X, Y), opt="O2")


def test_costs_of_a_script_are_those_of_the_model(quantized: nn.Module) -> None:
    script = torch.jit.trace(Tuples(quantized), (X, Y))
    summaries = [perf_model(model, (X, Y))["summary"] for model in (quantized, script)]
    assert summaries[0]["BPU OPs"] == summaries[1]["BPU OPs"]
    assert summaries[0]["weight bytes"] == summaries[1]["weight bytes"]


def test_the_picture_shows_operators_formats_and_scales(quantized: nn.Module) -> None:
    path = visualize_model(quantized, (X, Y), save_path="graph", show=False)
    text = Path(path).read_text()
    root = ElementTree.fromstring(text)  # it is well formed
    boxes = [box for box in root if box.tag.endswith("}g")]
    assert path == "graph.svg" and len(boxes) >= 9 and "horizon::conv" in text
    scale = float(quantized.conv.scale)
    assert f"qint8[1, 6, 6, 6] * {scale:.6g}" in text and "test_deployment_calls.py" in text
    assert text.count("http") == 1  # the name of the format


def test_compile_says_what_to_hand_over(quantized: nn.Module) -> None:
    with pytest.raises(ExportError, match=r"hbdk.*model\.hbm.*export_hbir"):
        compile_model(quantized, (X, Y), "model.hbm", opt="O2")


def test_a_graph_prints_without_its_weights(qat: nn.Module) -> None:
    graph = hbdk4.export(qat, (X, Y), name="net", input_names=["x", "y"], output_names=["a", "b"])
    function = "IntegerFunction(name='net', inputs=['x', 'y'], outputs=['a', 'b'])"
    assert repr(graph.functions[0]) == function and function in repr(graph) and "tensor(" not in repr(graph)
