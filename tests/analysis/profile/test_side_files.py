"""The document for other programs."""

from __future__ import annotations

import json
import math

import pytest

from horizon_plugin_pytorch.analysis.profile.document import Document, Operator
from horizon_plugin_pytorch.analysis.profile.side_files import node_data

BAD, BETWEEN, GOOD = "#d73027", "#fee08b", "#1a9850"


def of(measure: str, numbers: list[float | None], **about: object) -> dict:
    operators = tuple(Operator(at, f"op{at}", "", "", **{measure: x}) for at, x in enumerate(numbers))  # type: ignore[arg-type]
    return json.loads(node_data(Document("net", "FvsQ", "float", "qat", operators=operators, **about), measure))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "numbers"),
    [("", [13.9, 14.0, 20.1]), ("super-resolution", [53.9, 54.0, 60.1])],
)
def test_errors_are_coloured_by_the_limit_of_the_task(task: str, numbers: list[float]) -> None:
    """Infinities are text, as JSON has none, and have a colour."""
    found = of("sqnr", [*numbers, math.inf, -math.inf, None], task=task)
    assert [node["bgColor"] for node in found["results"].values()] == [BAD, BETWEEN, GOOD, GOOD, BAD]
    assert [node["value"] for node in found["results"].values()] == [*numbers, "inf", "-inf"]
    assert [limit["bgColor"] for limit in found["thresholds"]] == [BAD, BETWEEN, GOOD]
    assert found["thresholds"][-1]["value"] == numbers[-1] and "gradient" not in found


@pytest.mark.parametrize(("function", "colours"), [("Cosine", [BAD, GOOD]), ("MSE", [GOOD, BAD])])
def test_similarity_is_coloured_by_its_threshold(function: str, colours: list[str]) -> None:
    found = of("similarity", [0.9, 0.999], similarity_function=function, threshold=0.99)
    assert [node["bgColor"] for node in found["results"].values()] == colours
    assert [limit["value"] for limit in found["thresholds"]] == [0.99, 0.999]


def test_what_has_no_limit_is_coloured_from_the_best_to_the_worst() -> None:
    assert [item["stop"] for item in of("error", [1.0, 7.0])["gradient"]] == [0, 0.5, 1]
    assert "thresholds" not in of("similarity", [1.0], similarity_function="mine")


def test_operators_of_one_name_are_told_apart() -> None:
    same = tuple(Operator(at, "add", "", "add", error=float(at)) for at in range(2))
    found = json.loads(node_data(Document("net", "FvsQ", "float", "qat", operators=same), "error"))
    assert found["results"] == {"add": {"value": 0.0}, "add#2": {"value": 1.0}}
