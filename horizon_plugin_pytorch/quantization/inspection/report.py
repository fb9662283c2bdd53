"""The text of `model_check_result.txt`: sections, their order and their tables as the guides print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from horizon_plugin_pytorch.quantization.inspection.rows import (
    CalledTimes,
    DtypeCount,
    Member,
    Message,
    ModelCheck,
    OutQConfig,
    SharedRange,
    WeightQConfig,
    shown,
)

_ALWAYS = ("torch.float32", "qint8", "qint16")


def render(check: ModelCheck) -> str:
    """The whole text of a check."""
    sections = [
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
    if check.shared_ranges:
        sections.append(f"Ranges of modules called several times:\n{shared_range_table(check.shared_ranges)}")
    return "\n\n".join(sections) + "\n"


def fusion_text(patterns: Sequence[Sequence[Member]]) -> str:
    """A table for each pattern that could be fused."""
    if not patterns:
        return "All fusable modules are fused in model!"
    tables = [tabulate([[m.name, str(m.type)] for m in members], headers=["name", "type"]) for members in patterns]
    return "Fusable modules are listed below:\n" + "\n\n".join(tables)


def sharing_text(rows: Sequence[CalledTimes]) -> str:
    """How often each module was called, if any was called more or less than once."""
    if all(row.count == 1 for row in rows):
        return "All modules in the model run exactly once."
    return f"Each module called times:\n{called_times_table(rows)}"


def called_times_table(rows: Iterable[CalledTimes]) -> str:
    """The table of calls."""
    return tabulate([[row.name, row.count] for row in rows], headers=["name", "called times"])


def dtype_table(rows: Sequence[DtypeCount]) -> str:
    """Formats by module type, with their totals."""
    others = sorted({dtype for row in rows for dtype in row.counts} - set(_ALWAYS))
    columns = [*_ALWAYS, *others]
    body = [[str(row.type), *(row.counts.get(c, 0) for c in columns)] for row in rows]
    body.append(["total", *(sum(row.counts.get(c, 0) for row in rows) for c in columns)])
    return tabulate(body, headers=["module type", *columns], tablefmt="psql")


def out_qconfig_table(rows: Iterable[OutQConfig]) -> str:
    """Formats and observer of each call."""
    body = [
        [r.name, str(r.type), shown(r.input_dtypes), shown(r.out_dtypes), r.ch_axis, r.observer] for r in rows
    ]  # fmt: skip
    headers = ["Module Name", "Module Type", "Input dtype", "out dtype", "ch_axis", "observer"]
    return tabulate(body, headers=headers, tablefmt="psql", disable_numparse=True)


def weight_qconfig_table(rows: Iterable[WeightQConfig]) -> str:
    """Format and observer of each weight."""
    body = [[r.name, str(r.type), r.dtype, r.ch_axis, r.observer] for r in rows]
    headers = ["Module Name", "Module Type", "weight dtype", "ch_axis", "observer"]
    return tabulate(body, headers=headers, tablefmt="psql")


def messages_text(rows: Sequence[Message]) -> str:
    """What to look at."""
    return f"Please check if these OPs qconfigs are expected..\n{message_table(rows)}"


def message_table(rows: Iterable[Message]) -> str:
    """A table of messages."""
    body = [[r.name, str(r.type), r.text] for r in rows]
    return tabulate(body, headers=["Module Name", "Module Type", "Msg"], tablefmt="psql", disable_numparse=True)


def shared_range_table(rows: Iterable[SharedRange]) -> str:
    """The ranges of each call, and whether own scales for each call would help."""
    body = []
    for row in rows:
        ranges = ", ".join(f"[{low:.4g}, {high:.4g}]" for low, high in row.ranges)
        advice = f"would help: {row.lost_bits:.1f} bits" if row.would_help else "not needed"
        body.append([row.name, str(row.type), ranges, f"{row.ratio:.3g}", advice])
    headers = ["Module Name", "Module Type", "range of each call", "ratio", "own scales per call"]
    return tabulate(body, headers=headers, tablefmt="psql", disable_numparse=True)
