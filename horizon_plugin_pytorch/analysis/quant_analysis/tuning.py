"""The fewest quantizers that must not round for the bad cases to be good."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.quant_analysis.bad_cases import PostProcess
from horizon_plugin_pytorch.analysis.quant_analysis.outputs import OutputMetric
from horizon_plugin_pytorch.analysis.quant_analysis.quantizers import PartlyRounded
from horizon_plugin_pytorch.analysis.quant_analysis.sensitivity import OutputComparison, SensitivityTable
from horizon_plugin_pytorch.analysis.quant_analysis.subjects import ModelSubject, Subject
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, warn
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.tables import Table

FILE = "tune_bad_case"


def targets_of(config: Mapping[str, Any], who: str) -> dict[str, tuple[OutputMetric, float]]:
    """What each output has to reach: ``{"0-0": ("Cosine", 0.99)}`` or ``{"0-0": {"Cosine": 0.99}}``.

    >>> targets_of({"0": {"L1": 0.1}}, "tune_bad_case")["0"][1]
    0.1
    """
    if not isinstance(config, Mapping) or not config:
        raise QuantizationConfigError(
            f'{who}: outputs_config is a dictionary of outputs, such as {{"0-0": ("Cosine", 0.99)}}; got {config!r}.'
        )
    found = {}
    for name, wanted in config.items():
        pairs = list(wanted.items()) if isinstance(wanted, Mapping) else [tuple(wanted)]
        if len(pairs) != 1 or len(pairs[0]) != 2 or not isinstance(pairs[0][1], (int, float)):
            raise QuantizationConfigError(
                f'{who}: output {name!r} needs one metric and its limit, such as ("Cosine", 0.99); got {wanted!r}.'
            )
        found[str(name)] = OutputMetric(pairs[0][0], None, who), float(pairs[0][1])
    return found


@dataclass(frozen=True)
class Tuned:
    """What one output needs.

    Args:
        before, after: the metric as it was, and with more precision at the rows.
        rows: of the sensitivity table, as setters and templates take them.
        of: how many rows the table has.
        is_reached: does `after` keep the limit?
    """

    output: str
    metric: str
    limit: float
    before: float
    after: float
    rows: list[list[Any]]
    of: int
    is_reached: bool

    @property
    def cells(self) -> list[Any]:
        """Its row in the summary."""
        reached = "yes" if self.is_reached else "no"
        return [self.output, self.metric, self.limit, self.before, self.after, len(self.rows), self.of, reached]


def write_tuned(found: Sequence[Tuned], folder: str, who: str) -> None:
    """Write the rows of each output for `torch.load`, and a text for people; warn of what is not reached."""
    headers = ["output", "metric", "limit", "before", "after", "operators", "of", "reached"]
    text = [Table(headers, [one.cells for one in found]).text(aligns_numbers=True)]
    for one in found:
        if not one.is_reached:
            warn(
                f"{who}: output {one.output} does not reach {one.metric} {one.limit:g} even where nothing rounds: it "
                f"has {one.after:g}. Is the limit that of the float model? What skip_prefix names rounds still.",
                QuantizationWarning,
            )
        names = Table(["op_name", "sensitive_type", "quant_dtype"], [[row[0], row[1], row[4]] for row in one.rows])
        text.append(f"Output {one.output}:\n{names.text()}")
        buffer = io.BytesIO()
        torch.save(one.rows, buffer)
        name = re.sub(r"[^\w.-]", "_", one.output)
        write_atomically(buffer.getvalue(), os.path.join(folder, f"{FILE}_{name}.pt"))
    write_report("\n\n".join(text) + "\n", folder, f"{FILE}.txt", who)


class Tuner:
    """Finds how many of the most sensitive quantizers of an output must not round.

    Args:
        skipped: quantizers of operators whose names start so go on rounding.
    """

    def __init__(
        self, baseline: Subject, analysis: ModelSubject, post_process: PostProcess, skipped: Sequence[str], who: str
    ) -> None:
        self._baseline, self._analysis, self._post_process = baseline, analysis, post_process
        self._skipped, self._who = tuple(skipped), who

    def fewest(self, batch: Any, table: SensitivityTable, metric: OutputMetric, limit: float) -> Tuned:
        """The rows of the table that must have more precision.

        The most sensitive rows are taken first, and the number is found by bisection: more precision makes errors
        smaller as a rule, not always. All of them are given if even that does not reach the limit.
        """
        comparison = OutputComparison(self._baseline, batch, self._post_process, [metric], self._who)
        may = [op for op in table.ops if not (self._skipped and op.rounding.site.operator.startswith(self._skipped))]
        with PartlyRounded(self._analysis, batch, self._who) as runs:

            def reached(count: int) -> float:
                left = {op.rounding.site for op in may[:count]}
                off = {one.quantizer for one in runs.roundings if one.site in left}
                rounding = [one.quantizer for one in runs.roundings if one.quantizer not in off]
                return comparison.values(lambda: runs.run(rounding))[table.output][metric.name]

            def is_good(value: float) -> bool:
                return value >= limit if metric.higher_is_better else value <= limit  # NaN is neither

            def tuned(count: int, value: float) -> Tuned:
                rows, all_of = [op.row for op in may[:count]], len(table.ops)
                return Tuned(table.output, metric.name, limit, before, value, rows, all_of, is_good(value))

            before = reached(0)
            if is_good(before):
                return tuned(0, before)
            low, high, value = 0, len(may), reached(len(may))
            if not is_good(value):
                return tuned(len(may), value)
            while high - low > 1:
                middle = (low + high) // 2
                found = reached(middle)
                if is_good(found):
                    high, value = middle, found
                else:
                    low = middle
            return tuned(high, value)
