"""The document for Model Explorer: a graph, and node data for it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from horizon_plugin_pytorch.analysis.profile.document import Document, Operator
from horizon_plugin_pytorch.analysis.profile.model_explorer import MEASURES, explorer_files

SCRIPT = "</script><script>alert(1)</script>"


def graph_of(document: Document) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Nodes by their ids, and node data by measure; the graph has the name that the node data go by."""
    files = {name: json.loads(text) for name, text in explorer_files(document).items()}
    collection = files.pop("model_explorer_graph.json")
    (graph,) = collection["graphs"]
    assert isinstance(collection["label"], str) and list(files) == [f"model_explorer_{m}.json" for m in MEASURES]
    assert all(list(data) == [graph["id"]] for data in files.values())
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"]) == len(document.operators)
    for node in nodes.values():
        assert all(edge["sourceNodeId"] in nodes for edge in node["incomingEdges"])
        assert all(isinstance(attr["value"], str) for attr in node["attrs"])
    return nodes, {m: files[f"model_explorer_{m}.json"][graph["id"]]["results"] for m in MEASURES}


def document_of(*operators: Operator, title: str = "net") -> Document:
    return Document(title, "FvsQ", "float", "qat", operators=operators)


def measured(index: int, name: str, path: str, kind: str, **known: Any) -> Operator:
    return Operator(index, name, path, kind, similarity=0.5, sqnr=20.0, error=float(index), **known)


def test_nodes_stand_in_their_modules() -> None:
    nodes, data = graph_of(
        document_of(
            measured(
                0, "stem", "stem", "Conv2d", line="net.py:3", shape=(1, 8), format="qint8", scale=0.5, reason="why"
            ),
            measured(1, "layer1.0.conv", "layer1.0.conv", "Conv2d", inputs=(0,), scale=0.5, scale_low=0.25),
            measured(2, "layer1.0[add]", "layer1.0", "add", inputs=(1, 0)),
            measured(3, "layer1.0.conv(1)", "layer1.0.conv", "Conv2d", inputs=(2,)),
        )
    )
    assert {node["id"]: (node["namespace"], node["label"]) for node in nodes.values()} == {
        "stem": ("", "stem: Conv2d"), "layer1.0.conv": ("layer1/0", "conv: Conv2d"),
        "layer1.0[add]": ("layer1/0", "[add]"), "layer1.0.conv(1)": ("layer1/0", "conv(1): Conv2d"),
    }  # fmt: skip
    assert [edge["sourceNodeId"] for edge in nodes["layer1.0[add]"]["incomingEdges"]] == ["layer1.0.conv", "stem"]
    assert [edge["targetNodeInputId"] for edge in nodes["layer1.0[add]"]["incomingEdges"]] == ["0", "1"]
    attributes = {attr["key"]: attr["value"] for attr in nodes["stem"]["attrs"]}
    assert attributes == {
        "module": "stem", "type": "Conv2d", "line": "net.py:3", "format": "qint8", "scale": "0.5", "shape": "1 x 8",
        "reason": "why",
    }  # fmt: skip
    assert {"key": "scale", "value": "0.25 to 0.5"} in nodes["layer1.0.conv"]["attrs"]
    assert nodes["stem"]["outputsMetadata"][0]["attrs"][0] == {"key": "shape", "value": "1 x 8"}
    assert all(set(results) == set(nodes) for results in data.values())


@pytest.mark.parametrize("title", ["", "results", SCRIPT])
def test_names_of_any_kind(title: str) -> None:
    """Each module is one step of a namespace, whatever its name has of what separates steps."""
    names = ["a/b;c\\", SCRIPT, "results", ""]
    operators = []
    for at, name in enumerate([*names, *names]):
        path = f"{name}.{name}" if name else ""
        operators.append(measured(at, path or "[mul]", path, "mul", inputs=(max(at - 1, 0), 99)))
    nodes, data = graph_of(document_of(*operators, title=title))
    assert all(set(results) == set(nodes) for results in data.values())
    assert list(nodes)[4] == "a/b;c\\.a/b;c\\#2"
    assert [node["namespace"] for node in nodes.values()][:4] == ["a|b,c|", SCRIPT.replace("/", "|"), "results", ""]
    assert nodes["[mul]#2"]["label"] == "[mul]#2"
    assert [edge["sourceNodeId"] for edge in nodes["[mul]#2"]["incomingEdges"]] == ["results.results#2"]
    assert nodes["a/b;c\\.a/b;c\\"]["incomingEdges"] == []  # neither of itself nor of what is not there


def test_numbers_that_are_not_known_have_no_data() -> None:
    known, unknown = Operator(0, "x", "x", "X", sqnr=math.inf), Operator(1, "y", "y", "Y", inputs=(0,), error=math.nan)
    nodes, data = graph_of(document_of(known, unknown))
    assert set(nodes) == {"x", "y"}
    assert (
        data["sqnr"] == {"x": {"value": "inf", "bgColor": "#1a9850"}} and not data["error"] and not data["similarity"]
    )
    assert graph_of(document_of()) == ({}, {measure: {} for measure in MEASURES})
