"""A document for other programs: operators as CSV, and as node data of Google's Model Explorer."""

from __future__ import annotations

import json
import math
from typing import Any

from horizon_plugin_pytorch.analysis.profile.document import Document, Operator, Values
from horizon_plugin_pytorch.analysis.profile.tasks import ERROR_BAD, task_of
from horizon_plugin_pytorch.statistics.metrics import METRICS
from horizon_plugin_pytorch.tables import Table

CSV_FILE = "profiler.csv"
_COLUMNS = (
    "index", "name", "path", "type", "line", "shape", "inputs", "format", "input_formats", "reason", "scale",
    "scale_low", "grid", "saturation", "at_end", "similarity", "sqnr", "atol", "error", "same_input_error",
)  # fmt: skip
_VALUES = ("low", "high", "mean", "var", "nan", "inf", "channels", "dead")
_BAD, _BETWEEN, _GOOD = "#d73027", "#fee08b", "#1a9850"
_GRADIENTS = {  # from the smallest number to the largest
    "similarity": (_BAD, _BETWEEN, _GOOD), "sqnr": (_BAD, _BETWEEN, _GOOD), "error": (_GOOD, _BETWEEN, _BAD),
}  # fmt: skip
NODE_DATA_FILES = {measure: f"model_explorer_{measure}.json" for measure in _GRADIENTS}


def operators_csv(document: Document) -> str:
    """A line for each operator, for a spreadsheet.

    >>> net = Document("net", "FvsQ", "float", "qat", operators=(Operator(0, "conv", "conv", "Conv2d"),))
    >>> operators_csv(net).splitlines()[1][:19]
    '0,conv,conv,Conv2d,'
    """
    values = [f"{which}_{name}" for which in ("first", "second") for name in _VALUES]
    return Table([*_COLUMNS, *values], [_cells(operator) for operator in document.operators]).csv()


def _cells(operator: Operator) -> list[object]:
    cells: list[object] = []
    for name in _COLUMNS:
        value = getattr(operator, name)
        cells.append(" ".join(map(str, value)) if isinstance(value, tuple) else value)
    for values in (operator.first, operator.second):
        cells += [getattr(values, name) if isinstance(values, Values) else None for name in _VALUES]
    return cells


def node_data(document: Document, measure: str) -> str:
    """Numbers of the operators as node data of Model Explorer, which shows them as colours on its own graph.

    Nodes go by `Document.keys`. Colours are those of the page's verdict, where there is a limit: the threshold of
    similarity, or the error that the task allows; otherwise they run from the best operator to the worst.

    Args:
        measure: ``similarity``, ``sqnr`` or ``error``; operators for which it is not known are left out.

    >>> net = Document("net", "FvsQ", "float", "qat", operators=(Operator(0, "conv", "conv", "Conv2d", sqnr=31.5),))
    >>> json.loads(node_data(net, "sqnr"))["results"]
    {'conv': {'value': 31.5, 'bgColor': '#1a9850'}}
    """
    found = zip(document.keys, (getattr(operator, measure) for operator in document.operators), strict=True)
    known = {key: x for key, x in found if x is not None}
    finite = [x for x in known.values() if math.isfinite(x)]
    limits = _limits(document, measure)
    if limits is None:
        colours = _GRADIENTS[measure]
        rest = {"gradient": [{"stop": at / (len(colours) - 1), "bgColor": colour} for at, colour in enumerate(colours)]}
        results: dict[str, Any] = {key: {"value": x} for key, x in known.items() if math.isfinite(x)}
    else:
        largest = max([*finite, *(end for end, _ in limits[:-1])])
        ends = [(end if math.isfinite(end) else largest, colour) for end, colour in limits]
        rest = {"thresholds": [{"value": end, "bgColor": colour} for end, colour in ends]}
        results = {key: {"value": _value(x), "bgColor": _colour(x, limits)} for key, x in known.items()}
    return json.dumps({"results": results, **rest}, ensure_ascii=False, allow_nan=False)


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
