"""A report in a few lines."""

from __future__ import annotations

from typing import Any

from horizon_plugin_pytorch.analysis.profile.document import Advice, Document, Operator
from horizon_plugin_pytorch.tables import Table


def summary_text(document: Document, count: int = 10) -> str:
    """The metric, the outputs, the worst operators and the advice of a report.

    Args:
        count: how many operators and pieces of advice.
    """
    chip = f" on {document.march}" if document.march else ""
    lines = [f"{document.title}: {document.first} and {document.second}{chip}, {len(document.operators)} operators"]
    if not document.is_complete:
        lines.append("The run did not finish: these are the operators that it reached.")
    if document.metric is not None:
        lines.append(f"{document.metric.name}: {document.metric.first:.7g} and {document.metric.second:.7g}")
    lines.append(_table("outputs", document.outputs, document))
    worst = worst_operators(document)[: max(count, 0)]
    lines.append(_table("worst operators", worst, document))
    given = document.advice
    lines += [advice_text(advice) for advice in given[: max(count, 0)]]
    if len(given) > max(count, 0):
        lines.append(f"and {len(given) - max(count, 0)} more pieces of advice")
    return "\n".join([*lines, *document.notes])


def summary_data(document: Document) -> dict[str, Any]:
    """The same for programs."""
    metric = document.metric
    return {
        "title": document.title,
        "mode": document.mode,
        "first": document.first,
        "second": document.second,
        "is_complete": document.is_complete,
        "metric": None if metric is None else vars(metric),
        "similarity_function": document.similarity_function,
        "outputs": [_row(operator) for operator in document.outputs],
        "operators": [_row(operator) for operator in document.operators],
        "advice": [vars(advice) for advice in document.advice],
        "notes": list(document.notes),
    }


def worst_operators(document: Document) -> list[Operator]:
    """Operators by the ratio of their signal to their error, the smallest first.

    >>> some = [Operator(i, f"conv{i}", "", "", sqnr=sqnr) for i, sqnr in enumerate((30.0, None, 10.0))]
    >>> [operator.name for operator in worst_operators(Document("", "", "", "", operators=tuple(some)))]
    ['conv2', 'conv0']
    """
    known = [(operator.sqnr, operator) for operator in document.operators if operator.sqnr is not None]
    return [operator for _, operator in sorted(known, key=lambda pair: (pair[0] == pair[0], pair[0]))]  # NaN first


def advice_text(advice: Advice) -> str:
    """A piece of advice in a line or two.

    >>> print(advice_text(Advice("outliers", "warning", "conv1", (0,), "One value is 100.", "Use int16.", "x = 1")))
    warning: conv1: One value is 100. Use int16.
        x = 1
    """
    line = f"{advice.severity}: {advice.place}: {advice.evidence} {advice.remedy}"
    return f"{line}\n    {advice.configuration}" if advice.configuration else line


def _table(title: str, operators: list[Operator], document: Document) -> str:
    rows = [
        [o.name, o.format, number(o.similarity), number(o.sqnr), number(o.error), number(o.same_input_error), o.line]
        for o in operators
    ]
    headers = (title, "format", document.similarity_function, "SQNR, dB", "error, steps", "own error, steps", "line")
    return Table(headers, rows).text() if rows else f"{title}: none"


def number(value: float | None) -> str:
    """A number in a table; nothing where there is none."""
    return "" if value is None else f"{value:.6g}"


def _row(operator: Operator) -> dict[str, Any]:
    names = ("name", "type", "line", "format", "similarity", "sqnr", "atol", "error", "same_input_error", "saturation")
    return {name: getattr(operator, name) for name in names}
