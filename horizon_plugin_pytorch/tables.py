"""Rows with headers, and their looks: text, CSV, JSON and HTML."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate


@dataclass(frozen=True)
class Table:
    """Rows, each with a value for every header.

    Args:
        headers: the names of the columns.
        rows: strings, numbers, None.

    >>> table = Table(["layer", "error"], [["conv1", "0.10%"], ["fc", "2.00%"]])
    >>> print(table.text())
    layer    error
    -------  -------
    conv1    0.10%
    fc       2.00%
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        wrong = next((row for row in self.rows if len(row) != len(self.headers)), None)
        if wrong is not None:
            raise ValueError(f"a table of {len(self.headers)} columns has a row of {len(wrong)}: {wrong!r}.")

    def text(self, style: str = "simple", aligns_numbers: bool = False, widths: Sequence[int | None] = ()) -> str:
        """The table in characters of one width.

        Args:
            style: as `tabulate` calls it: ``"simple"``, ``"psql"``, ``"pipe"``.
            aligns_numbers: put numbers below each other by their points? They are written anew for it: strings of
                digits count as numbers.
            widths: the largest width of each column; longer texts are broken.
        """
        limits: dict[str, Any] = {"maxcolwidths": list(widths)} if widths else {}
        return tabulate(self.rows, list(self.headers), style, disable_numparse=not aligns_numbers, **limits)

    def csv(self) -> str:
        r"""The table with commas, for a spreadsheet: lines end as RFC 4180 says.

        >>> Table(["name", "args"], [["add", "x, 1"]]).csv()
        'name,args\r\nadd,"x, 1"\r\n'
        """
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(self.headers)
        writer.writerows(self.rows)
        return out.getvalue()

    def json(self) -> str:
        """A list with an object for each row. JSON has no NaN and no infinity: they are strings.

        >>> print(Table(["layer", "SQNR"], [["conv1", float("inf")]]).json())
        [
          {"layer": "conv1", "SQNR": "inf"}
        ]
        """
        lines = (json.dumps(dict(zip(self.headers, map(_as_json, row), strict=True)), default=str) for row in self.rows)
        body = ",\n  ".join(lines)
        return f"[\n  {body}\n]" if body else "[]"

    def html(self) -> str:
        """A ``<table>``; whatever is in the cells is shown as text.

        >>> print(Table(["name"], [["<lambda>"]]).html())
        <table>
        <thead><tr><th>name</th></tr></thead>
        <tbody>
        <tr><td>&lt;lambda&gt;</td></tr>
        </tbody>
        </table>
        """
        body = "".join(f"{_html_row(row, 'td')}\n" for row in self.rows)
        return f"<table>\n<thead>{_html_row(self.headers, 'th')}</thead>\n<tbody>\n{body}</tbody>\n</table>"


def _as_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _html_row(cells: Iterable[Any], tag: str) -> str:
    shown = (html.escape("" if cell is None else str(cell)) for cell in cells)
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in shown)}</tr>"
