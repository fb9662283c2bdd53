"""Commands that write reports: two stages of a model compared, and runs side by side."""

from __future__ import annotations

import copy
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from horizon_plugin_profiler.command_line.commands import OF_A_REPORT, Result, limits_of, read_report
from horizon_plugin_profiler.command_line.inputs import batches_of, inputs_of
from horizon_plugin_profiler.command_line.outcomes import UsageError
from horizon_plugin_profiler.command_line.summary import number, summary_data, summary_text
from horizon_plugin_profiler.command_line.targets import call, find, load_checkpoint, models_of
from horizon_plugin_profiler.command_line.thresholds import worsening
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.profile.document import Document, Metric, Operator
from horizon_plugin_pytorch.analysis.profile.page import page_of
from horizon_plugin_pytorch.analysis.profile.profiler import JSON_FILE, PAGE_FILE, model_profiler
from horizon_plugin_pytorch.analysis.profile.stages import stage_of
from horizon_plugin_pytorch.analysis.watched_run import undisturbed_evaluation
from horizon_plugin_pytorch.march import set_march
from horizon_plugin_pytorch.tables import Table

_COMPARED = "compare"  # the name of the files


def profile(options: Namespace) -> Result:
    """Two stages of a model, operator by operator."""
    limits = limits_of(options, *OF_A_REPORT)
    first, second = _pair(options.model, options.second, options)
    if options.checkpoint:
        load_checkpoint(second, options.checkpoint)
    document = _profiled(first, second, options, options.out, "")
    page = os.path.join(options.out, PAGE_FILE)
    data = summary_data(document) | {"page": page, "report": os.path.join(options.out, JSON_FILE)}
    return Result(f"{summary_text(document, options.top)}\npage: {page}", data, limits.of_document(document))


def compare(options: Namespace) -> Result:
    """Runs side by side: of reports, or of checkpoints."""
    limits = limits_of(options, *OF_A_REPORT, "drop")
    runs = _profiled_checkpoints(options) if options.checkpoint else _reports(options)
    documents = list(runs.values())
    rows = _rows(documents)
    headers = ["operator", *(f"{what}, {label}" for label in runs for what in ("similarity", "SQNR, dB")), "SQNR lost"]
    table = Table(headers, [_cells(name, found, lost) for name, found, lost in rows])
    page = write_report(page_of(documents), options.out, f"{_COMPARED}.html", _COMPARED)
    write_report(table.csv(), options.out, f"{_COMPARED}.csv", _COMPARED)
    notes = _notes(runs)
    lines = [
        *(f"{label}: {d.metric.name} {d.metric.second:.7g}" for label, d in runs.items() if d.metric is not None),
        Table(headers, table.rows[: max(options.top, 0)]).text(),
        *notes,
        f"page: {page}",
    ]
    data = {
        "runs": {label: summary_data(document) for label, document in runs.items()},
        "operators": [{"name": name, "sqnr_lost": lost} for name, _, lost in rows],
        "notes": notes,
        "page": page,
    }
    first, *others = runs
    broken = [
        replace(limit, name=f"{label}: {limit.name}")
        for label in others
        for limit in limits.of_pair(runs[first], runs[label])
    ]
    return Result("\n".join(lines), data, broken)


def _pair(target: str, second: str | None, options: Namespace) -> tuple[nn.Module, nn.Module]:
    if options.march is not None:
        set_march(options.march)
    models = models_of(target)
    if second is not None:
        models = (models[0], models_of(second)[-1])
    if len(models) != 2:
        raise UsageError(
            f"`{target}` gives one model, and two are compared: let it give a pair (float model, quantized model), or "
            "name a second module:function."
        )
    return models[0], models[1]


def _profiled(first: nn.Module, second: nn.Module, options: Namespace, folder: str, title: str) -> Document:
    inputs, *further = batches_of(inputs_of(options.input, options.seed), options.batch)
    similarity = {"featuremap_similarity": {"similarity_func": options.similarity}}
    return model_profiler(
        first, second, inputs, options.mode or _mode_of(first, second), folder, similarity,
        batches=further, metric=_metric(options, first, second), task=options.task, title=title,
    )  # fmt: skip


def _mode_of(first: nn.Module, second: nn.Module) -> str:
    """What is compared; the profiler says what is wrong with models that do not fit."""
    if stage_of(first) == "float":
        return "FvsQ"
    return "QvsQ" if stage_of(second) == "quantized" else "CvsQ"


def _metric(options: Namespace, first: nn.Module, second: nn.Module) -> Metric | None:
    if options.metric is None:
        return None
    function = find(options.metric)
    if not callable(function):
        raise UsageError(f"`{options.metric}` is a {type(function).__name__}: give a function of a model.")
    name = options.metric.rpartition(":")[2]
    return Metric(
        name,
        _number(options.metric, function, first),
        _number(options.metric, function, second),
        not options.lower_is_better,
    )


def _number(target: str, function: Callable[..., Any], model: nn.Module) -> float:
    with undisturbed_evaluation(model):
        found = call(target, function, model)
    try:
        return float(found)
    except (TypeError, ValueError):
        raise UsageError(f"`{target}` gives a {type(found).__name__}: a metric is a number.") from None


def _reports(options: Namespace) -> dict[str, Document]:
    """The reports, by names that tell them apart."""
    if len(options.runs) < 2:
        raise UsageError(
            "Give two reports (profiler.json, or their folders) to compare; or module:function and --checkpoint, at "
            "least twice."
        )
    paths = [Path(run) / JSON_FILE if Path(run).is_dir() else Path(run) for run in options.runs]
    return _labelled([_label(path) for path in paths], [read_report(path) for path in paths])


def _label(path: Path) -> str:
    return path.resolve().parent.name if path.name == JSON_FILE else path.stem


def _labelled(labels: Sequence[str], documents: Sequence[Document]) -> dict[str, Document]:
    found: dict[str, Document] = {}
    for label, document in zip(labels, documents, strict=True):
        free, count = label, 2
        while free in found:
            free, count = f"{label} {count}", count + 1
        found[free] = replace(document, title=f"{document.title} ({free})")
    return found


def _profiled_checkpoints(options: Namespace) -> dict[str, Document]:
    if len(options.runs) != 1 or len(options.checkpoint) < 2:
        raise UsageError("With --checkpoint, give one module:function, and --checkpoint at least twice.")
    if not options.input:
        raise UsageError("With --checkpoint, models run: give their inputs (--input 1x3x224x224).")
    documents, labels = [], [Path(path).stem for path in options.checkpoint]
    for number_, (path, label) in enumerate(zip(options.checkpoint, labels, strict=True)):
        first, second = _pair(options.runs[0], None, options)
        second = copy.deepcopy(second)  # a model that is no function's is the same one each time
        load_checkpoint(second, path)
        folder = os.path.join(options.out, f"{number_ + 1}_{label}")
        documents.append(_profiled(first, second, options, folder, ""))
    return _labelled(labels, documents)


def _rows(documents: Sequence[Document]) -> list[tuple[str, list[Operator | None], float | None]]:
    """Each operator in all runs, and how much SQNR the last one has lost against the first; the most first."""
    known = [{operator.name: operator for operator in document.operators} for document in documents]
    names = dict.fromkeys(name for of_one in reversed(known) for name in of_one)
    lost = {operator.name: operator.sqnr for operator in worsening(documents[0], documents[-1]).operators}
    rows = [(name, [of_one.get(name) for of_one in known], lost.get(name)) for name in names]
    return sorted(rows, key=lambda row: (row[2] is None, -(row[2] or 0.0)))


def _cells(name: str, found: Sequence[Operator | None], lost: float | None) -> list[str]:
    numbers = [
        number(None if operator is None else value)
        for operator in found
        for value in ((None, None) if operator is None else (operator.similarity, operator.sqnr))
    ]
    return [name, *numbers, number(lost)]


def _notes(runs: dict[str, Document]) -> list[str]:
    """What makes a comparison say less than it seems to."""
    notes = [f"{label}: the run did not finish." for label, d in runs.items() if not d.is_complete]
    documents = list(runs.values())
    if len({document.inputs for document in documents}) > 1:
        notes.append("The runs saw different inputs: differences may come from these.")
    if len({document.similarity_function for document in documents}) > 1:
        notes.append("The runs measured similarity by different functions: compare SQNR.")
    counts = Counter(name for document in documents for name in {operator.name for operator in document.operators})
    alone = sum(count < len(documents) for count in counts.values())
    return notes + ([f"{alone} operators are not in all runs."] if alone else [])
