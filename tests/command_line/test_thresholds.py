"""Limits: which are kept, which are broken, and which guard nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horizon_plugin_profiler.command_line.outcomes import UsageError
from horizon_plugin_profiler.command_line.thresholds import read_thresholds, thresholds_of
from horizon_plugin_pytorch.analysis.profile.document import Document, Metric, Operator

CONV = Operator(0, "backbone.conv", "backbone.conv", "Conv2d", similarity=0.98, sqnr=18.0, error=3.0, saturation=0.02)
ADD = Operator(1, "add[add]", "add", "add", inputs=(0,), similarity=0.95, sqnr=12.0)
HEAD = Operator(2, "head", "head", "Linear", inputs=(1,), similarity=0.999, sqnr=31.0)
NET = Document("Net", "FvsQ", "float", "qat", metric=Metric("top-1", 0.76, 0.74), operators=(CONV, ADD, HEAD))


def broken(limits: dict[str, Any], document: Document = NET) -> list[str]:
    return [str(limit) for limit in thresholds_of(limits).of_document(document)]


def test_kept_limits_say_nothing() -> None:
    limits = {
        "outputs": {"similarity": 0.99, "sqnr": 30},
        "operators": {"*": {"similarity": 0.9, "error": 3}, "add[add]": {"sqnr": 12}},
        "metric": {"second": 0.74, "loss": 0.021},
    }
    assert broken(limits) == []


def test_broken_limits_name_operator_value_limit_and_rule() -> None:
    assert broken({"operators": {"backbone.*": {"similarity": 0.99, "saturation": 0.01}}}) == [
        'backbone.conv: similarity is 0.98, must be at least 0.99 (operators."backbone.*")',
        'backbone.conv: saturation is 0.02, must be at most 0.01 (operators."backbone.*")',
    ]
    assert broken({"outputs": {"sqnr": 40}}) == ["head: sqnr is 31, must be at least 40 (outputs)"]
    assert broken({"metric": {"second": 0.75, "loss": 0.01}}) == [
        "top-1: second is 0.74, must be at least 0.75 (metric)",
        "top-1: loss is 0.02, must be at most 0.01 (metric)",
    ]


def test_where_less_is_better_the_limit_is_an_upper_one() -> None:
    net = replace(NET, similarity_function="MSE", metric=Metric("error", 0.1, 0.2, higher_is_better=False))
    assert broken({"operators": {"head": {"similarity": 0.5}}, "metric": {"second": 0.15, "loss": 0.2}}, net) == [
        'head: similarity is 0.999, must be at most 0.5 (operators."head")',
        "error: second is 0.2, must be at most 0.15 (metric)",
    ]


def test_what_is_not_a_number_or_not_known_keeps_no_limit() -> None:
    net = replace(NET, operators=(replace(CONV, similarity=math.nan), ADD, HEAD), metric=None)
    assert "backbone.conv: similarity is nan" in broken({"operators": {"*": {"similarity": 0.1}}}, net)[0]
    assert "head: saturation is not known" in broken({"outputs": {"saturation": 1.0}}, net)[0]
    assert "metric: second is not known" in broken({"metric": {"second": 0.1}}, net)[0]


def test_a_pattern_that_fits_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match=r'operators."neck.\*": no operator of `Net`.*guards nothing'):
        broken({"operators": {"neck.*": {"similarity": 0.9}}})


def test_a_later_run_may_be_worse_by_so_much() -> None:
    later = replace(
        NET,
        operators=(replace(CONV, sqnr=17.0), ADD, replace(HEAD, similarity=0.95)),
        metric=Metric("top-1", 0.76, 0.7),
    )
    limits = thresholds_of({"drop": {"operators": {"*": {"similarity": 0.01, "sqnr": 2}}, "metric": 0.01}})
    assert [str(limit) for limit in limits.of_pair(NET, later)] == [
        'head: loss of similarity is 0.049, must be at most 0.01 (drop.operators."*")',
        "top-1: loss against the first run is 0.04, must be at most 0.01 (drop.metric)",
    ]
    assert limits.of_pair(NET, NET) == []


def test_counts_and_memory() -> None:
    limits = thresholds_of({"check": {"unfused": 0, "messages": 2}, "memory": {"peak": "1 KiB"}})
    assert [str(x) for x in limits.of_counts(unfused=1, messages=2)] == [
        "check: unfused is 1, must be at most 0 (check)"
    ]
    assert limits.of_memory("conv", 1024) == []
    assert str(limits.of_memory("conv", 1025)[0]) == "conv: peak is 1025, must be at most 1024 (memory)"


def test_files_of_both_formats(tmp_path: Path) -> None:
    toml, other = tmp_path / "limits.toml", tmp_path / "limits.json"
    toml.write_text('[operators."*"]\nsimilarity = 0.9\n')
    other.write_text('{"operators": {"*": {"similarity": 0.9}}}')
    assert read_thresholds(str(toml)) == read_thresholds(str(other))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[operators", "is no threshold file"),
        ("[operator]", "`operator` is not known: there are outputs, operators"),
        ('[operators."*"]\ncosine = 1', r'`operators."\*".cosine` is not known'),
        ('[outputs]\nsimilarity = "0.9"', "outputs.similarity is '0.9', and must be a number"),
        ("[outputs]\nsimilarity = nan", "must be a number"),
        ("[operators]\nsimilarity = 0.9", '`operators."similarity"` holds no names with limits'),
        ('[memory]\npeak = "big"', "'big' is no size of memory"),
        ("[metric]\naccuracy = 1", "`metric.accuracy` is not known: there are second, loss"),
    ],
)
def test_wrong_files_are_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "limits.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_thresholds(str(tmp_path / "limits.toml"))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_thresholds(str(tmp_path / "missing.toml"))


def test_the_file_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    (tmp_path / "limits.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    limits = read_thresholds(str(tmp_path / "limits.toml"))
    assert set(limits.sections) == {"outputs", "operators", "metric", "drop", "check", "memory"}
