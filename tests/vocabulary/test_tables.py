"""Tables and their looks."""

from __future__ import annotations

import csv
import io
import json
import math
from xml.etree import ElementTree

import pytest

from horizon_plugin_pytorch.tables import Table

NASTY = ["<b>&\"'</b>", 'comma, "quote"', "line\nbreak", "-1.50", None, 3, math.nan, math.inf, 0.25]
TABLE = Table(["what", "<value>"], [["cell", value] for value in NASTY])


def test_html_shows_what_is_in_the_cells() -> None:
    rows = ElementTree.fromstring(TABLE.html()).iter("tr")
    texts = [["".join(cell.itertext()) for cell in row] for row in rows]
    assert texts == [list(TABLE.headers), *(["cell", "" if value is None else str(value)] for value in NASTY)]


def test_csv_reads_back() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.csv(), newline="")))
    assert rows == [list(TABLE.headers), *(["cell", "" if value is None else str(value)] for value in NASTY)]


def test_json_reads_back_and_is_strict() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    rows = json.loads(TABLE.json(), parse_constant=refuse)
    assert [row["<value>"] for row in rows] == [*NASTY[:6], "nan", "inf", 0.25]
    assert json.loads(Table(["a"], []).json()) == []


def test_text_leaves_strings_of_digits_as_they_are() -> None:
    table = Table(["scale"], [["0.10"], ["12"]])
    assert "0.10" in table.text() and table.text().splitlines()[2:] == ["0.10", "12"]
    assert table.text(aligns_numbers=True).splitlines()[2:] == ["    0.1", "   12"]
    assert table.text("psql").startswith("+--")
    assert max(map(len, Table(["x"], [["word " * 9]]).text("psql", widths=[10]).splitlines())) <= 14


def test_rows_have_a_value_for_every_header() -> None:
    with pytest.raises(ValueError, match="2 columns has a row of 1: \\['x'\\]"):
        Table(["a", "b"], [["x"]])
