"""`profiler.html`: a document, or several side by side, as one page that needs no network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from horizon_plugin_pytorch.analysis.profile.advice.texts import TEXTS, Sentences, sentences
from horizon_plugin_pytorch.analysis.profile.document import Advice, Document, Histogram, Operator, Weight
from horizon_plugin_pytorch.analysis.profile.layout import Box, layout_of
from horizon_plugin_pytorch.analysis.profile.tasks import ERROR_BAD, METRIC_BAD, METRIC_WATCH, TASKS
from horizon_plugin_pytorch.analysis.similarity_function import THRESHOLDS
from horizon_plugin_pytorch.statistics.metrics import METRICS

_ASSETS = Path(__file__).with_name("assets")
LANGUAGES = ("en", "zh")
# Histograms are most of a page. 128 bins for each of two results and of a weight make 1,500 operators about 1 MB.
_ALL_BINS = 500_000
_FEWEST_BINS = 16
_IMPORT = re.compile(r'^import (\{.*?\}) from "\./(\w+)\.js";$', re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (?=(?:const|class|(?:async )?function) (\w+))", re.MULTILINE)


def page_of(documents: Sequence[Document]) -> str:
    """The page of one document, or of several, whose operators are compared by name.

    Everything is in the page: scripts, texts in English and Chinese, and the data, packed. Nothing else can run in it,
    and nothing is fetched: a policy in its head says so to the browser. Names are shown as they are.

    Raises:
        ValueError: there is no document.

    >>> page = page_of([Document("<net>", "FvsQ", "float", "qat")])
    >>> page[:15], "&lt;net&gt;" in page, "<net>" in page
    ('<!DOCTYPE html>', True, False)
    """
    if not documents:
        raise ValueError("A page shows at least one document.")
    script, style = page_script(), (_ASSETS / "page.css").read_text(encoding="utf-8")
    parts = {
        "title": html.escape(" / ".join(dict.fromkeys(document.title for document in documents)) or "profiler"),
        "script": script,
        "script-hash": _hash(script),
        "style": style,
        "style-hash": _hash(style),
        "data": _packed(_data(documents)),
    }
    template = (_ASSETS / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([a-z-]+)\}\}", lambda found: parts[found[1]], template)


@cache
def page_script() -> str:
    """The script of every page: the files of ``assets/`` in the order of their imports, and the texts."""
    texts = {language: json.loads(_read(f"texts.{language}.json")) for language in LANGUAGES}
    for name, task in TASKS.items():
        texts["en"][f"task-{name}"], texts["zh"][f"task-{name}"] = name or "any task", task.chinese
    tasks = {name: task.error for name, task in TASKS.items()}
    metrics = {
        name: {"threshold": THRESHOLDS[name], "higher_is_better": metric.higher_is_better}
        for name, metric in METRICS.items()
    }
    bounds = {"error_bad": ERROR_BAD, "metric_watch": METRIC_WATCH, "metric_bad": METRIC_BAD}
    facts = {"texts": texts, "tasks": tasks, "metrics": metrics, "bounds": bounds}
    known = json.dumps(facts, ensure_ascii=False).replace("</", "<\\/")
    files: dict[str, str] = {}
    _collect("main", files)
    return "\n".join(['"use strict";', f"const KNOWN = {known};", *files.values()])


def _collect(name: str, files: dict[str, str]) -> None:
    """A file as a function with names of its own, after those that it imports from; there are no circles."""
    text = _read(f"{name}.js")
    for _, other in _IMPORT.findall(text):
        if other not in files:
            _collect(other, files)
    exported = ", ".join(_EXPORT.findall(text))
    text = _EXPORT.sub("", _IMPORT.sub(r"const \1 = \2File;", text))
    files[name] = f"const {name}File = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();"


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _packed(data: Any) -> str:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _data(documents: Sequence[Document]) -> dict[str, Any]:
    layouts: dict[tuple[Box, ...], int] = {}
    # Runs of one model have one layout.
    chosen = [layouts.setdefault(layout_of(document.operators), len(layouts)) for document in documents]
    merging = _merging(documents)
    return {
        "documents": [_document(document, merging) for document in documents],
        "layouts": [[_box(box) for box in layout] for layout in layouts],
        "layout_of": chosen,
    }


def _document(document: Document, merging: int) -> dict[str, Any]:
    """With what follows from it: its outputs, and the keys of operators whose names others have."""
    named = zip(document.operators, document.keys, strict=True)
    shown = replace(document, first_calls=(), second_calls=())  # they are for other files
    return {
        **_plain(shown, merging),
        "outputs": [operator.index for operator in document.outputs],
        "keys": {operator.index: key for operator, key in named if key != operator.name},
    }


def _box(box: Box) -> dict[str, Any]:
    members = [[member.kind, member.target, member.row, member.place] for member in box.members]
    return {"path": box.path, "label": box.label, "members": members, "routes": box.routes}


def _merging(documents: Sequence[Document]) -> int:
    """How many bins become one, so that a page of many operators stays small."""
    holders: list[Operator | Weight] = [
        *(o for d in documents for o in d.operators),
        *(w for d in documents for w in d.weights),
    ]
    values = [v for holder in holders for v in (holder.first, holder.second) if v is not None and v.histogram]
    bins = sum(len(v.histogram.counts) for v in values if v.histogram)
    return 2 ** max(0, math.ceil(math.log2(bins / _ALL_BINS))) if bins else 1


def _plain(value: Any, merging: int) -> Any:
    """In values that JSON has; numbers to nine digits, which tell two float32 apart."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    if isinstance(value, Histogram):
        return _histogram(value, merging)
    if isinstance(value, Advice):
        return _advice(value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name), merging) for field in fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, merging) for item in value]
    return value


def _advice(advice: Advice) -> dict[str, Any]:
    """With its sentences in all languages."""
    said = {language: _said(advice, language)._asdict() for language in LANGUAGES}
    plain = {name: getattr(advice, name) for name in ("rule", "severity", "place", "operators", "configuration")}
    return {**plain, "explains": _plain(advice.explains, 1), "said": said}


def _said(advice: Advice, language: str) -> Sentences:
    """In a language; as it is, if the rule or one of its numbers is of another version."""
    if advice.rule not in TEXTS:
        return Sentences(advice.rule, advice.evidence, advice.remedy)
    try:
        said = sentences(advice, language)
        return Sentences(*map(_chinese_punctuation, said)) if language == "zh" else said
    except KeyError:
        return Sentences(getattr(TEXTS[advice.rule], language).title, advice.evidence, advice.remedy)


_HALF_WIDTH = re.compile(r"`[^`]*`|(?<!\d)[,;:](?! )|(?<=\d)[,;:](?![\d ])")


def _chinese_punctuation(text: str) -> str:
    """Commas as wide as characters, but for those of code, numbers and lists of names."""
    wide = {",": "\uff0c", ";": "\uff1b", ":": "\uff1a"}
    return _HALF_WIDTH.sub(lambda found: wide.get(found[0], found[0]), text)


def _histogram(histogram: Histogram, merging: int) -> dict[str, Any]:
    counts, high = list(histogram.counts), histogram.high
    together = min(merging, max(1, len(counts) // _FEWEST_BINS))
    if together > 1:
        width = (histogram.high - histogram.low) / len(counts)
        missing = -len(counts) % together
        counts += [0] * missing
        high += width * missing
        counts = [sum(counts[at : at + together]) for at in range(0, len(counts), together)]
    return {"low": _plain(histogram.low, 1), "high": _plain(high, 1), "counts": counts}
