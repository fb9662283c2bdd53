"""The commands: each takes the options that were typed and gives what it found."""

from __future__ import annotations

import os
import webbrowser
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_plugin_profiler.command_line.inputs import inputs_of
from horizon_plugin_profiler.command_line.outcomes import UsageError
from horizon_plugin_profiler.command_line.summary import summary_data, summary_text
from horizon_plugin_profiler.command_line.targets import call, find, load_checkpoint, models_of
from horizon_plugin_profiler.command_line.thresholds import Broken, Thresholds, read_thresholds
from horizon_plugin_pytorch.analysis.call_counts import called_counts
from horizon_plugin_pytorch.analysis.calls import record_calls
from horizon_plugin_pytorch.analysis.check import RESULT_FILE, inspect_model
from horizon_plugin_pytorch.analysis.memory import PAGE_NAME, show_cuda_memory_consumption, with_gradient
from horizon_plugin_pytorch.analysis.profile.document import Document, read_document
from horizon_plugin_pytorch.analysis.profile.profiler import JSON_FILE
from horizon_plugin_pytorch.analysis.profile.stages import PREPARED, stage_of
from horizon_plugin_pytorch.analysis.report import message_table, messages_text
from horizon_plugin_pytorch.analysis.unfused import unfused_patterns
from horizon_plugin_pytorch.export.node_data import write_node_data
from horizon_plugin_pytorch.march import set_march
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.tables import Table

OF_A_REPORT = ("outputs", "operators", "metric")  # sections of a threshold file


@dataclass(frozen=True)
class Result:
    """What a command found.

    Args:
        text: for people.
        data: for programs; plain values.
        broken: the limits that were not kept.
    """

    text: str
    data: dict[str, Any]
    broken: Sequence[Broken] = field(default_factory=list)


def check(options: Namespace) -> Result:
    """What is not fused, not called, or has formats to look at."""
    limits = limits_of(options, "check")
    model = _last_model(options)
    if options.checkpoint:
        load_checkpoint(model, options.checkpoint)
    inputs, stage = inputs_of(options.input, options.seed), stage_of(model)
    messages: list[Any] = []
    mistakes: list[Any] = []
    written = ""
    if stage in PREPARED:
        try:
            found = inspect_model(model, inputs, options.out)
        except OSError as error:
            raise UsageError(f"{RESULT_FILE} cannot be written into {options.out}: {error.strerror}.") from error
        unfused = [[member.name for member in pattern] for pattern in found.unfused]
        called = {row.name: row.count for row in found.called_times}
        messages, mistakes = list(found.messages), list(found.mistakes)
        written = os.path.join(options.out, RESULT_FILE) if options.out else ""
    else:
        recording = record_calls(model, inputs)
        called = called_counts(recording, model, inputs)
        patterns = sorted(unfused_patterns(recording), key=len) if stage == "float" else []
        unfused = [[member.name for member in pattern] for pattern in patterns]
    unused = [name for name, count in called.items() if count == 0]
    shared = {name: count for name, count in called.items() if count > 1}
    lines = [
        f"`{type(model).__name__}`, {stage}: {len(called)} operators",
        f"not fused: {_listed([' + '.join(pattern) for pattern in unfused])}",
        f"never called: {_listed(unused)}",
        f"called several times: {_listed([f'{name} ({count})' for name, count in shared.items()])}",
        *([messages_text(messages)] if messages else []),
        *([f"Common mistakes:\n{message_table(mistakes)}"] if mistakes else []),
        *([f"All tables: {written}"] if written else []),
    ]
    data = {
        "model": type(model).__name__,
        "stage": stage,
        "unfused": unfused,
        "called": called,
        "unused": unused,
        "messages": [_message(row) for row in messages],
        "mistakes": [_message(row) for row in mistakes],
        "file": written,
    }
    counts = {"unfused": len(unfused), "unused": len(unused), "messages": len(messages), "mistakes": len(mistakes)}
    return Result("\n".join(lines), data, limits.of_counts(**counts))


def memory(options: Namespace) -> Result:
    """What each operator allocates."""
    limits = limits_of(options, "memory")
    rows = show_cuda_memory_consumption(
        _last_model(options), inputs_of(options.input, options.seed), options.device, out_dir=options.out,
        custom_backward=_backward(options.loss),
    )  # fmt: skip
    if not rows:
        raise UsageError("The model has no operator that could be measured.")
    highest = max(rows, key=lambda row: row.peak)
    page = os.path.join(options.out, f"{PAGE_NAME}.html")
    largest = sorted(rows, key=lambda row: row.change, reverse=True)[: max(options.top, 0)]
    table = Table(
        ("operator", "type", "phase", "keeps, KiB", "peak, KiB"),
        [[r.name, r.type, r.phase, f"{r.change / 1024:.1f}", f"{r.peak / 1024:.1f}"] for r in largest],
    )
    text = f"peak: {highest.peak / 1024:.1f} KiB in {highest.name} ({highest.phase})\n{table.text()}\npage: {page}"
    data = {"peak": highest.peak, "peak_in": highest.name, "rows": [vars(row) for row in rows], "page": page}
    return Result(text, data, limits.of_memory(highest.name, highest.peak))


def show(options: Namespace) -> Result:
    """What a report says, and where its page is."""
    limits = limits_of(options, *OF_A_REPORT)
    path = Path(options.report)
    path = path / JSON_FILE if path.is_dir() else path
    document = read_report(path)
    page = path.with_suffix(".html")
    if options.command == "open":
        if not page.is_file():
            raise UsageError(f"There is no page {page} beside {path}.")
        if not webbrowser.open(page.resolve().as_uri()):
            raise UsageError(f"No browser could be started here. The page is {page.resolve()}.")
    where = str(page) if page.is_file() else ""
    text = summary_text(document, options.top) + (f"\npage: {where}" if where else "")
    return Result(text, summary_data(document) | {"page": where}, limits.of_document(document))


def nodes(options: Namespace) -> Result:
    """A report as node data of Model Explorer."""
    written = write_node_data(options.report, options.file, options.out)
    lines = [f"{written.known} of {written.nodes} nodes belong to operators of the report", *written.files]
    return Result("\n".join(lines), vars(written))


def read_report(path: Path) -> Document:
    """The document of a file.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    try:
        return read_document(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def limits_of(options: Namespace, *sections: str) -> Thresholds:
    """The limits, read before the long work begins; the file must have one of the sections."""
    return Thresholds({}) if options.thresholds is None else read_thresholds(options.thresholds, *sections)


def _last_model(options: Namespace) -> nn.Module:
    if options.march is not None:
        set_march(options.march)
    return models_of(options.model)[-1]


def _backward(loss: str | None) -> Callable[[Any], None]:
    """Backward from the user's loss, or from the sum of all outputs."""
    function = None if loss is None else find(loss)

    def run(out: Any) -> None:
        if loss is not None and function is not None:
            call(loss, function, out).backward()
        else:
            torch.stack([with_gradient(x).sum() for x in tensors_of(out) if x.requires_grad]).sum().backward()

    return run


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def _message(row: Any) -> dict[str, str]:
    return {"name": row.name, "type": row.type.__name__, "text": row.text, "remedy": row.remedy}
