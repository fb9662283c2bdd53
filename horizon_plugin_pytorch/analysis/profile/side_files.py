"""A document for other programs: operators as CSV."""

from __future__ import annotations

from horizon_plugin_pytorch.analysis.profile.document import Document, Operator, Values
from horizon_plugin_pytorch.tables import Table

CSV_FILE = "profiler.csv"
_COLUMNS = (
    "index", "name", "path", "type", "line", "shape", "inputs", "format", "input_formats", "reason", "scale",
    "scale_low", "grid", "saturation", "at_end", "similarity", "sqnr", "atol", "error", "same_input_error",
)  # fmt: skip
_VALUES = ("low", "high", "mean", "var", "nan", "inf", "channels", "dead")


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
