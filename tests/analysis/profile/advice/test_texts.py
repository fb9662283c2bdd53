"""Every rule speaks both languages, with the same numbers."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from horizon_plugin_pytorch.analysis.profile.advice.texts import TEXTS, sentences
from horizon_plugin_pytorch.analysis.profile.document import Advice, Document, read_document
from horizon_plugin_pytorch.analysis.profile.tasks import TASKS


def arguments(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("rule", TEXTS)
def test_both_languages_have_the_same_numbers(rule: str) -> None:
    english, chinese = TEXTS[rule].en, TEXTS[rule].zh
    assert [arguments(part) for part in english] == [arguments(part) for part in chinese]
    assert not arguments(english.title)
    assert all(any("\u4e00" <= c <= "\u9fff" for c in part) for part in chinese)
    assert not any("\u4e00" <= c <= "\u9fff" for part in english for c in part)


def test_the_documentation_has_every_rule() -> None:
    page = (Path(__file__).parents[4] / "docs" / "advice.md").read_text()
    first_cells = "".join(re.findall(r"^\| (.*?) \|", page.split("## The rules")[1], re.MULTILINE))
    assert set(re.findall(r"`([a-z0-9-]+)`", first_cells)) == set(TEXTS)


def test_arguments_survive_json() -> None:
    """Texts of numbers stay texts, `nan` and `inf` too."""
    given = (("count", "nan"), ("total", "inf"), ("module", "<b>"))
    advice = Advice("never-calibrated", "error", "conv", (1,), "e", "r", arguments=given, explains=0.5)
    read = read_document(Document("net", "FvsQ", "float", "qat", advice=(advice,)).to_json()).advice[0]
    assert read == advice
    assert sentences(read).evidence.startswith("nan of inf fake quantizers never saw data, such as `<b>`")


def test_the_documentation_has_every_limit() -> None:
    page = (Path(__file__).parents[4] / "docs" / "advice.md").read_text()
    rows = re.findall(r"^\| (.*?) \| ([\d.]+) % \|$", page, re.MULTILINE)
    found = {name: float(limit) / 100 for names, limit in rows for name in re.findall(r"`([a-z-]+)`", names)}
    assert found == pytest.approx({name: task.error for name, task in TASKS.items() if name})
