"""A document for other programs: operators as CSV, and as node data of Google's Model Explorer."""

from __future__ import annotations

import json
import math

from horizon_plugin_pytorch.analysis.profile.document import Document, Operator, Values
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

    Args:
        measure: ``similarity``, ``sqnr`` or ``error``; operators for which it is not a number are left out.

    >>> net = Document("net", "FvsQ", "float", "qat", operators=(Operator(0, "conv", "conv", "Conv2d", sqnr=31.5),))
    >>> json.loads(node_data(net, "sqnr"))["results"]
    {'conv': {'value': 31.5}}
    """
    found = {operator.name: getattr(operator, measure) for operator in document.operators}
    results = {name: {"value": x} for name, x in found.items() if x is not None and math.isfinite(x)}
    gradient = [{"stop": number / 2, "bgColor": colour} for number, colour in enumerate(_GRADIENTS[measure])]
    return json.dumps({"results": results, "gradient": gradient}, ensure_ascii=False)
