"""The text of `model_check_result.txt`: sections, their order and their tables as the guides print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from horizon_plugin_pytorch.analysis.rows import (
    CalledTimes,
    DtypeCount,
    Message,
    ModelCheck,
    OutQConfig,
    SharedRange,
    WeightQConfig,
    shown,
)
from horizon_plugin_pytorch.analysis.unfused import Member, patterns_text
from horizon_plugin_pytorch.tables import Table

CHECK_FAILED = "The check did not finish"
_ALWAYS = ("torch.float32", "qint8", "qint16")


def render(check: ModelCheck) -> str:
    """The whole text of a check."""
    sections = [f"{CHECK_FAILED}: {check.failure}\nThe tables show what ran before."] if check.failure else []
    sections += [
        fusion_text(check.unfused),
        sharing_text(check.called_times),
        f"input dtype statistics:\n{dtype_table(check.input_dtypes)}",
        f"output dtype statistics:\n{dtype_table(check.output_dtypes)}",
        f"Each layer out qconfig:\n{out_qconfig_table(check.out_qconfigs)}",
        f"Weight qconfig:\n{weight_qconfig_table(check.weight_qconfigs)}",
        messages_text(check.messages),
    ]
    if check.compute_types:
        lines = [f"{row.name} {row.input}*{row.weight}" for row in check.compute_types]
        sections.append("\n".join(["Abnormal compute types:", *lines]))
    if check.mistakes:
        sections.append(f"Common mistakes:\n{message_table(check.mistakes)}")
    if check.powers is not None:
        sections.append(check.powers.text)
    if check.shared_ranges:
        sections.append(f"Ranges of modules called several times:\n{shared_range_table(check.shared_ranges)}")
    return "\n\n".join(sections) + "\n"


def fusion_text(patterns: Sequence[Sequence[Member]]) -> str:
    """A table for each pattern that could be fused."""
    text = patterns_text(patterns)
    return f"Fusable modules are listed below:\n{text}" if patterns else text


def sharing_text(rows: Sequence[CalledTimes]) -> str:
    """How often each module was called, if any was called more or less than once."""
    if all(row.count == 1 for row in rows):
        return "All modules in the model run exactly once."
    return f"Each module called times:\n{called_times_table(rows)}"


def called_times_table(rows: Iterable[CalledTimes]) -> str:
    """The table of calls."""
    return Table(["name", "called times"], [[row.name, row.count] for row in rows]).text(aligns_numbers=True)


def dtype_table(rows: Sequence[DtypeCount]) -> str:
    """Formats by module type, with their totals."""
    others = sorted({dtype for row in rows for dtype in row.counts} - set(_ALWAYS))
    columns = [*_ALWAYS, *others]
    body = [[str(row.type), *(row.counts.get(c, 0) for c in columns)] for row in rows]
    body.append(["total", *(sum(row.counts.get(c, 0) for row in rows) for c in columns)])
    return Table(["module type", *columns], body).text("psql", aligns_numbers=True)


def out_qconfig_table(rows: Sequence[OutQConfig]) -> str:
    """Formats and observer of each call, and the rules that chose them where these are known."""
    headers = ["Module Name", "Module Type", "Input dtype", "out dtype", "ch_axis", "observer", "reason"]
    body = [
        [r.name, str(r.type), shown(r.input_dtypes), shown(r.out_dtypes), r.ch_axis, r.observer, r.reason] for r in rows
    ]
    if not any(r.reason for r in rows):
        headers, body = headers[:-1], [line[:-1] for line in body]
    return Table(headers, body).text("psql")


def weight_qconfig_table(rows: Iterable[WeightQConfig]) -> str:
    """Format and observer of each weight."""
    body = [[r.name, str(r.type), r.dtype, r.ch_axis, r.observer] for r in rows]
    headers = ["Module Name", "Module Type", "weight dtype", "ch_axis", "observer"]
    return Table(headers, body).text("psql", aligns_numbers=True)


def messages_text(rows: Sequence[Message]) -> str:
    """What to look at, and below the table what to do about each kind of message."""
    text = f"Please check if these OPs qconfigs are expected..\n{message_table(rows)}"
    remedies = dict.fromkeys((_kind(row.text), row.remedy) for row in rows if row.remedy)
    return "\n".join([text, *(f"* {kind}: {remedy}." for kind, remedy in remedies)])


def _kind(text: str) -> str:
    """A message without what differs from module to module."""
    if text.startswith("input dtype"):
        return "input dtype is not same with out dtype"
    return "".join(text.partition(" scale")[:2])


def message_table(rows: Iterable[Message]) -> str:
    """A table of messages."""
    body = [[r.name, str(r.type), r.text] for r in rows]
    return Table(["Module Name", "Module Type", "Msg"], body).text("psql")


def shared_range_table(rows: Iterable[SharedRange]) -> str:
    """The ranges of each call, and whether own scales for each call would help."""
    body = []
    for row in rows:
        ranges = ", ".join(f"[{low:.4g}, {high:.4g}]" for low, high in row.ranges)
        body.append([row.name, str(row.type), ranges, f"{row.ratio:.3g}", row.message])
    headers = ["Module Name", "Module Type", "range of each call", "ratio", "own scales per call"]
    return Table(headers, body).text("psql")
