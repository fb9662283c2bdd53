"""What the profiler found, on the nodes of exported files."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from torch import nn

from horizon_plugin_pytorch.analysis.profile.document import Document, ModelCall, Operator
from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.export.node_data import FileNode, operators_of, write_node_data
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx, export_to_onnx
from horizon_plugin_pytorch.utils.quant_profiler import model_profiler
from tests.watch.models import data, stages

BAD, BETWEEN, GOOD = "#d73027", "#fee08b", "#1a9850"
NOT_IN_FILES = {"quant", "drop", "dequant", "dequant(1)"}  # a float file has no stubs, no file has dropout


def results(path: Path) -> dict[str, float]:
    """Values by node, of the graph that the file of node data is for."""
    (found,) = json.loads(path.read_text()).values()
    return {name: entry["value"] for name, entry in found["results"].items()}


def values_of(path: Path) -> dict[str, np.ndarray]:
    """What each node of a file gives, in ONNX Runtime."""
    model = onnx.load(path)
    given = {output.name for output in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in given)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return dict(zip(names, session.run(names, {session.get_inputs()[0].name: data().numpy()}), strict=True))


@pytest.fixture(scope="module", params=["jit-strip", "eager"])
def models(request: pytest.FixtureRequest) -> dict[str, nn.Module]:
    set_march(March.NASH_E)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: model.eval() for name, model in stages(request.param)}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("stage", ["float", "validation", "converted"])
def test_keys_are_the_nodes_of_the_file(models: dict[str, nn.Module], stage: str, tmp_path: Path) -> None:
    """Each key is one node, all nodes but the outputs' names have data, and the last node of an operator gives what the
    operator gave: the numbers are at the right ones, also where a module is called several times."""
    pair = ("float", "validation") if stage == "float" else ("validation", "converted")
    found = model_profiler(models[pair[0]], models[pair[1]], data(), "FvsQ" if stage == "float" else "QvsQ", tmp_path)
    file = tmp_path / f"{stage}.onnx"
    (export_quantized_onnx if stage == "converted" else export_to_onnx)(models[stage], data(), str(file))
    written = write_node_data(tmp_path, file)
    nodes = {node.name: node for node in onnx.load(file).graph.node}
    operators = {name for name, node in nodes.items() if node.op_type != "Identity"}
    assert (written.known, written.nodes) == (len(operators), len(nodes)) and len(nodes) - len(operators) == 2
    values = {f.rpartition("_")[2]: results(Path(f)) for f in written.files}
    assert set(values) == {"similarity.json", "sqnr.json", "error.json"}
    assert set(values["similarity.json"]) == operators
    assert {o.name for o in found.operators} - _placed(found, file, stage) <= NOT_IN_FILES


def _placed(found: Document, file: Path, stage: str) -> set[str]:
    """The operators whose last node in the file gives their numbers."""
    nodes = onnx.load(file).graph.node
    scopes = [next((list(eval(p.value)) for p in node.metadata_props), ["", ""]) for node in nodes]
    calls = found.first_calls if stage == "float" else found.second_calls
    owners = operators_of(
        [FileNode(n.name, s[-2], n.doc_string, s[-1]) for n, s in zip(nodes, scopes, strict=True)], calls
    )
    values, placed = values_of(file), set()
    for operator in found.operators:
        at = [index for index, owner in enumerate(owners) if owner == operator.index]
        expected = operator.first if stage == "float" else operator.second
        if not at or expected is None:
            continue
        got = values[nodes[at[-1]].output[0]].astype(np.float64)
        steps = (operator.scale or 1.0) if stage == "converted" and not operator.name.startswith("dequant") else 1.0
        got -= 128 if nodes[at[-1]].op_type == "Where" else 0  # bytes of the stub
        ends = np.array([got.min(), got.max(), got.mean()]) * steps
        wanted = [expected.low, expected.high, expected.mean]
        if operator.name != "[split]":  # its two results are two nodes
            rounding = 1.01 * (operator.scale or 0.0) if stage == "validation" else 0.0  # a QAT file rounds as training
            np.testing.assert_allclose(ends, wanted, rtol=1e-4, atol=1e-5 + rounding, err_msg=operator.name)
        placed.add(operator.name)
    return placed


def owners(nodes: Sequence[tuple[str, str, str]], calls: Sequence[ModelCall]) -> list[int | None]:
    """Of nodes given by path, line and label."""
    return operators_of([FileNode(str(at), *node) for at, node in enumerate(nodes)], calls)


def test_calls_that_cannot_be_told_apart_have_no_data() -> None:
    """Rather none than those of another call."""
    twice = [ModelCall("act", operator=0), ModelCall("act", operator=1)]
    one, two, three = (("act", "", f"act_{letter}") for letter in "abc")
    assert owners([one, two], twice) == [0, 1]
    assert owners([one, two, three], twice) == [None] * 3
    assert owners([one, two, ("", "", ""), three], twice) == [0, 0, None, 1]
    here = "net.py:3"
    line = [ModelCall("", "add", here, 0), ModelCall("", "mul", here, 1), ModelCall("", "exp", "net.py:4", 2)]
    names = [("", here, "mul"), ("", here, "cast"), ("", here, "add_1"), ("", "net.py:4", "x")]
    assert owners(names, line) == [1, None, 0, 2]
    assert owners([("other", "", "other_a"), ("", "net.py:9", "add")], line) == [None, None]


def file_of(folder: Path, count: int) -> Path:
    """A file of as many nodes, each of a module of its own."""
    nodes = []
    for at in range(count):
        node = onnx.helper.make_node("Relu", ["x"], [f"op{at}/Relu"], name=f"op{at}/Relu")
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', 'op{at}', 'op{at}_relu']")
        nodes.append(node)
    path = folder / "net.onnx"
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "Net", [], [])), path)
    return path


def of(folder: Path, measure: str, numbers: list[float | None], **about: object) -> dict:
    operators = tuple(Operator(at, f"op{at}", "", "", **{measure: x}) for at, x in enumerate(numbers))  # type: ignore[arg-type]
    calls = tuple(ModelCall(f"op{at}", operator=at) for at in range(len(numbers)))
    document = Document("net", "FvsQ", "float", "qat", operators=operators, second_calls=calls, **about)  # type: ignore[arg-type]
    written = write_node_data(document, file_of(folder, len(numbers)))
    return json.loads(next(Path(f) for f in written.files if f.endswith(f"_{measure}.json")).read_text())["Net"]


@pytest.mark.parametrize(
    ("task", "numbers"),
    [("", [13.9, 14.0, 20.1]), ("super-resolution", [53.9, 54.0, 60.1])],
)
def test_errors_are_coloured_by_the_limit_of_the_task(tmp_path: Path, task: str, numbers: list[float]) -> None:
    """Infinities are text, as JSON has none, and have a colour."""
    found = of(tmp_path, "sqnr", [*numbers, math.inf, -math.inf, None], task=task)
    assert [node["bgColor"] for node in found["results"].values()] == [BAD, BETWEEN, GOOD, GOOD, BAD]
    assert [node["value"] for node in found["results"].values()] == [*numbers, "inf", "-inf"]
    assert [limit["bgColor"] for limit in found["thresholds"]] == [BAD, BETWEEN, GOOD]
    assert found["thresholds"][-1]["value"] == numbers[-1] and "gradient" not in found


@pytest.mark.parametrize(("function", "colours"), [("Cosine", [BAD, GOOD]), ("MSE", [GOOD, BAD])])
def test_similarity_is_coloured_by_its_threshold(tmp_path: Path, function: str, colours: list[str]) -> None:
    found = of(tmp_path, "similarity", [0.9, 0.999], similarity_function=function, threshold=0.99)
    assert [node["bgColor"] for node in found["results"].values()] == colours
    assert [limit["value"] for limit in found["thresholds"]] == [0.99, 0.999]


def test_what_has_no_limit_is_coloured_from_the_best_to_the_worst(tmp_path: Path) -> None:
    assert [item["stop"] for item in of(tmp_path, "error", [1.0, 7.0])["gradient"]] == [0, 0.5, 1]
    assert "thresholds" not in of(tmp_path, "similarity", [1.0], similarity_function="mine")


def test_refusals(tmp_path: Path) -> None:
    document = Document("net", "FvsQ", "float", "qat")
    with pytest.raises(ExportError, match=r"no node of net\.onnx belongs to an operator of the report"):
        write_node_data(document, file_of(tmp_path, 1))
    with pytest.raises(ExportError, match="cannot be read as an ONNX file"):
        write_node_data(document, tmp_path / "none.onnx")
    with pytest.raises(ExportError, match="cannot be read as a report"):
        write_node_data(tmp_path, file_of(tmp_path, 1))
