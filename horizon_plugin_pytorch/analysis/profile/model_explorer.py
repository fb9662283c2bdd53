"""A document for Google's Model Explorer: the graph that it opens, and node data that colour a graph."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from horizon_plugin_pytorch.analysis.profile.document import Document, Operator
from horizon_plugin_pytorch.analysis.profile.layout import boxes_around
from horizon_plugin_pytorch.analysis.profile.tasks import ERROR_BAD, task_of
from horizon_plugin_pytorch.statistics.metrics import METRICS

_BAD, _BETWEEN, _GOOD = "#d73027", "#fee08b", "#1a9850"
_GRADIENTS = {  # from the smallest number to the largest
    "similarity": (_BAD, _BETWEEN, _GOOD), "sqnr": (_BAD, _BETWEEN, _GOOD), "error": (_GOOD, _BETWEEN, _BAD),
}  # fmt: skip
MEASURES = tuple(_GRADIENTS)
# Model Explorer splits namespaces at `/` (unless `\` is before it) and forgets what is before `;`.
_SAFE = str.maketrans({"/": "|", "\\": "|", ";": ","})


def explorer_files(document: Document) -> dict[str, str]:
    """The texts of all files for Model Explorer, by name: the graph, and node data with the ids of its nodes.

    >>> net = Document("net", "FvsQ", "float", "qat", operators=(Operator(0, "conv", "conv", "Conv2d", sqnr=31.5),))
    >>> files = explorer_files(net)
    >>> list(files)[:2]
    ['model_explorer_graph.json', 'model_explorer_similarity.json']
    >>> json.loads(files["model_explorer_sqnr.json"])["net"]["results"]
    {'conv': {'value': 31.5, 'bgColor': '#1a9850'}}
    """
    operators = {key: operator.index for key, operator in zip(document.keys, document.operators, strict=True)}
    graph = json.dumps(_collection(document, operators), ensure_ascii=False, allow_nan=False)
    data = {f"model_explorer_{m}.json": node_data(document, m, _graph_name(document), operators) for m in MEASURES}
    return {"model_explorer_graph.json": graph, **data}


def node_data(document: Document, measure: str, graph: str, operators: Mapping[str, int]) -> str:
    """Numbers of operators as node data: colours on the nodes of a graph.

    Colours are those of the page's verdict where there is a limit: the threshold of similarity, or the error that the
    task allows; otherwise they run from the best operator to the worst. Operators for which the measure is not known
    are left out.

    Args:
        measure: one of `MEASURES`.
        graph: the name of the graph that the nodes are in.
        operators: by the name of the node, the index of the operator that it is, or is a part of.
    """
    numbers = {operator.index: getattr(operator, measure) for operator in document.operators}
    known = {node: numbers[index] for node, index in operators.items() if numbers.get(index) is not None}
    results = _coloured(known, _limits(document, measure), _GRADIENTS[measure])
    return json.dumps({graph: results}, ensure_ascii=False, allow_nan=False)


def _coloured(
    known: dict[str, float], limits: list[tuple[float, str]] | None, gradient: tuple[str, ...]
) -> dict[str, Any]:
    finite = [x for x in known.values() if math.isfinite(x)]
    if limits is None:
        steps = [{"stop": at / (len(gradient) - 1), "bgColor": colour} for at, colour in enumerate(gradient)]
        return {"results": {key: {"value": x} for key, x in known.items() if math.isfinite(x)}, "gradient": steps}
    largest = max([*finite, *(end for end, _ in limits[:-1])])
    ends = [(end if math.isfinite(end) else largest, colour) for end, colour in limits]
    return {
        "results": {key: {"value": _value(x), "bgColor": _colour(x, limits)} for key, x in known.items()},
        "thresholds": [{"value": end, "bgColor": colour} for end, colour in ends],
    }


def _limits(document: Document, measure: str) -> list[tuple[float, str]] | None:
    """The upper end of each range of numbers, and its colour; None where nobody knows a limit."""
    if measure == "sqnr":
        limit = task_of(document.task).error
        bad, poor = (-20 * math.log10(error) for error in (limit * ERROR_BAD, limit))
        return [(bad, _BAD), (poor, _BETWEEN), (math.inf, _GOOD)]
    if measure != "similarity" or document.threshold is None:
        return None
    function = document.similarity_function
    is_higher_better = function in METRICS and METRICS[function].higher_is_better
    colours = (_BAD, _GOOD) if is_higher_better else (_GOOD, _BAD)
    return [(document.threshold, colours[0]), (math.inf, colours[1])]


def _colour(x: float, limits: list[tuple[float, str]]) -> str:
    return _BAD if math.isnan(x) else next(colour for end, colour in limits if x <= end)


def _value(x: float) -> float | str:
    """JSON has no infinities: they are text."""
    return x if math.isfinite(x) else str(x)


def _graph_name(document: Document) -> str:
    return document.title or "model"


def _collection(document: Document, operators: Mapping[str, int]) -> dict[str, Any]:
    """The document as a collection of one graph."""
    name, boxes = _graph_name(document), boxes_around(document.operators)
    key_of = {index: key for key, index in operators.items()}
    about = {
        "models": f"{document.first}, {document.second}", "march": document.march, "batches": str(document.batches),
        "complete": "yes" if document.is_complete else "no: the run did not end, or is not at its end",
    }  # fmt: skip
    graph = {
        "id": name,
        "nodes": [_node(operator, boxes[operator.index], key_of) for operator in document.operators],
        "groupNodeAttributes": {"": {key: text for key, text in about.items() if text}},
        "nodeLabelsToHide": [],  # its own list would hide a module called `const`
    }
    return {"label": name, "graphs": [graph]}


def _node(operator: Operator, box: str, key_of: Mapping[int, str]) -> dict[str, Any]:
    key, shape = key_of[operator.index], " x ".join(map(str, operator.shape))
    sources = [source for source in operator.inputs if source in key_of and source != operator.index]
    attributes = {
        "module": operator.path, "type": operator.type, "line": operator.line,
        "format": operator.format, "scale": _scale(operator), "shape": shape, "reason": operator.reason,
    }  # fmt: skip
    return {
        "id": key,
        "label": _label(key, operator.type, box),
        "namespace": "/".join(part.translate(_SAFE) for part in box.split(".") if part),
        "attrs": _pairs(attributes),
        "incomingEdges": [
            {"sourceNodeId": key_of[source], "sourceNodeOutputId": "0", "targetNodeInputId": str(at)}
            for at, source in enumerate(sources)
        ],
        "outputsMetadata": [{"id": "0", "attrs": _pairs({"shape": shape, "format": operator.format})}],
    }


def _label(key: str, kind: str, box: str) -> str:
    """The name without its module, and the type if that does not say it."""
    short = key.removeprefix(box).removeprefix(".") if box and key.startswith((f"{box}.", f"{box}[")) else key
    return short if kind in short else f"{short}: {kind}"


def _scale(operator: Operator) -> str:
    if operator.scale is None:
        return ""
    largest = f"{operator.scale:.7g}"
    is_one = operator.scale_low is None or operator.scale_low == operator.scale
    return largest if is_one else f"{operator.scale_low:.7g} to {largest}"


def _pairs(texts: Mapping[str, str]) -> list[dict[str, str]]:
    """What is known, as Model Explorer has it."""
    return [{"key": key, "value": text} for key, text in texts.items() if text]
