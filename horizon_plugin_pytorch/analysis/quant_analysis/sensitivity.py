"""How much each fake quantizer alone changes the outputs of a model."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from horizon_plugin_pytorch.analysis.chosen import Chosen
from horizon_plugin_pytorch.analysis.html_page import Curve, chart, page
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.quant_analysis.bad_cases import PostProcess
from horizon_plugin_pytorch.analysis.quant_analysis.outputs import OutputMetric, compared, kept, named_outputs
from horizon_plugin_pytorch.analysis.quant_analysis.quantizers import PartlyRounded, Rounding
from horizon_plugin_pytorch.analysis.quant_analysis.selections import Selections
from horizon_plugin_pytorch.analysis.quant_analysis.subjects import ModelSubject, Subject
from horizon_plugin_pytorch.analysis.tuning.ledger import Ledger
from horizon_plugin_pytorch.analysis.tuning.sites import Site
from horizon_plugin_pytorch.asking.functions import code_text
from horizon_plugin_pytorch.calibration.fingerprint import digest
from horizon_plugin_pytorch.errors import CheckError, QuantizationWarning, listed, warn
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.tables import Table

PROGRESS_FILE = "sensitivity_progress.pt"
_SECONDS = 20.0  # between two writings of what there is so far


@dataclass(frozen=True)
class SensitiveOp:
    """A row of a sensitivity table."""

    rounding: Rounding
    value: float

    @property
    def row(self) -> list[Any]:
        """As the file has it, and setters and templates take it."""
        site, module, quantizer = self.rounding.site, self.rounding.module, self.rounding.quantizer
        flops = f"{self.rounding.operations}({self.rounding.share:.2%})"
        return [site.operator, site.kind, str(type(module)), self.value, str(quantizer.dtype), flops]


@dataclass(frozen=True)
class SensitivityTable:
    """How sensitive one output of a model is to each fake quantizer, the most sensitive first."""

    output: str
    metric: str
    case: int
    ops: Sequence[SensitiveOp]

    @property
    def rows(self) -> list[list[Any]]:
        """As `torch.load` gives them."""
        return [op.row for op in self.ops]

    @property
    def stem(self) -> str:
        """The name of the files without its end."""
        name = re.sub(r"[^\w.-]", "_", f"{self.output}_{self.metric}")
        return f"output_{name}_sensitive_ops"

    def write(self, folder: str, who: str) -> None:
        """Write the table as text, as a page and for `torch.load`."""
        table = Table(["op_name", "sensitive_type", "op_type", self.metric, "quant_dtype", "flops"], self.rows)
        write_report(f"{table.text(aligns_numbers=True)}\n", folder, f"{self.stem}.txt", who)
        labels = [f"{op.rounding.site.operator} {op.rounding.site.kind}: {op.value:.7g}" for op in self.ops]
        curve = chart([Curve(self.metric, [op.value for op in self.ops], labels)])
        title = f"Sensitivity of output {self.output} on batch {self.case}"
        write_report(page(title, curve, table.html()), folder, f"{self.stem}.html", who)
        buffer = io.BytesIO()
        torch.save(self.rows, buffer)
        write_atomically(buffer.getvalue(), os.path.join(folder, f"{self.stem}.pt"))


Values = dict[str, dict[str, float]]  # by output and metric
Measured = dict[Site, tuple[Rounding, Values]]


class SensitivityRun:
    """Measures quantizers one by one, on as many bad cases as are asked for.

    Args:
        metrics: what to compute of the outputs.
        folder: where progress is kept, so that an interrupted run can go on; None keeps none.
    """

    def __init__(
        self,
        baseline: ModelSubject,
        analysis: ModelSubject,
        metrics: Sequence[OutputMetric],
        post_process: PostProcess,
        chosen: Chosen,
        folder: str | None,
        who: str,
    ) -> None:
        self._baseline, self._analysis, self._metrics = baseline, analysis, metrics
        self._post_process, self._chosen, self._who = post_process, chosen, who
        self._folder = folder
        self._ledger: Ledger | None = None

    def finish(self) -> None:
        """All is measured and written: forget the progress."""
        if self._ledger is not None:
            self._ledger.forget()

    def measure(self, batch: Any, outputs: Sequence[str] | None = None) -> Measured:
        """The values of each site that is asked for, on one batch.

        Args:
            outputs: which are compared; None compares all.
        """
        comparison = OutputComparison(self._baseline, batch, self._post_process, self._metrics, self._who, outputs)
        found: Measured = {}
        with PartlyRounded(self._analysis, batch, self._who) as runs:
            asked = [one for one in runs.roundings if self._chosen.has(one.site.operator, one.module)]
            if not asked:
                raise CheckError(f"{self._who}: the prefixes and types that are given choose no operator that rounds.")
            ledger = self._progress()
            of = digest([batch, [metric.text for metric in self._metrics], outputs])
            by_quantizer: dict[Any, Values] = {}
            try:
                for one in tqdm(asked, desc=self._who, disable=None):
                    values = by_quantizer.get(one.quantizer)  # several operators may share it
                    if values is None:
                        run = partial(comparison.values, partial(runs.run, [one.quantizer]))
                        values = ledger.get(f"{of:016x} {one.site}", run)
                    by_quantizer[one.quantizer] = values
                    found[one.site] = one, values
            finally:
                ledger.save()
        comparison.tell()
        return found

    def _progress(self) -> Ledger:
        """What an earlier run with these models has found."""
        if self._ledger is None:
            file = None if self._folder is None else os.path.join(self._folder, PROGRESS_FILE)
            models = [subject.fingerprint() for subject in (self._baseline, self._analysis)]
            functions = None if self._post_process is None else code_text(self._post_process)
            self._ledger = Ledger(file, f"{digest([models, functions]):016x}", seconds=_SECONDS)
        return self._ledger


class OutputComparison:
    """What a model gives on one batch, compared with what the baseline gives, as often as is wanted.

    Args:
        outputs: which are compared; None compares all.

    Attributes:
        wanted: what the baseline gives.
        selections: what it selects.
    """

    def __init__(
        self,
        baseline: Subject,
        batch: Any,
        post_process: PostProcess,
        metrics: Sequence[OutputMetric],
        who: str,
        outputs: Sequence[str] | None = None,
    ) -> None:
        self._post_process, self._metrics, self._who, self._asked = post_process, metrics, who, outputs
        self.selections = Selections()
        self._refused: dict[str, str] = {}
        self._not_numbers: dict[str, int] = {}
        with baseline.quiet(), torch.no_grad(), self.selections.noting():
            self.wanted = kept(self._named(lambda: baseline.run(batch)))
        if outputs is not None and not self.wanted:
            raise CheckError(f"{who}: the baseline gives no output {listed(map(repr, outputs))} on this batch.")

    def _named(self, run: Callable[[], Any]) -> dict[str, Tensor]:
        out = run()
        named = named_outputs(out if self._post_process is None else self._post_process(out))
        return named if self._asked is None else {name: x for name, x in named.items() if name in self._asked}

    def values(self, run: Callable[[], Any]) -> Values:
        """The metrics of each output that a run gives."""
        with torch.no_grad(), self.selections.taking():
            found = self._named(run)
        pairs = compared(self.wanted, found, self._refused.__setitem__)
        if not pairs:
            why = listed(f"{name} ({reason})" for name, reason in self._refused.items())
            raise CheckError(f"{self._who}: no output can be compared: {why or 'the models give no tensor'}.")
        values = {name: {m.name: m(one, other) for m in self._metrics} for name, (one, other) in pairs.items()}
        for of in values.values():
            for metric, value in of.items():
                if math.isnan(value):
                    self._not_numbers[metric] = self._not_numbers.get(metric, 0) + 1
        return values

    def tell(self) -> None:
        """Say what could not be compared."""
        if self._refused:
            text = listed(f"{name} ({why})" for name, why in self._refused.items())
            warn(f"{self._who}: outputs are left out: {text}.", QuantizationWarning)
        for metric, count in self._not_numbers.items():
            warn(f"{self._who}: {metric} was not a number {count} times; see the table.", QuantizationWarning)


def tables_of(found: Measured, metric: OutputMetric, outputs: Sequence[str], case: int) -> list[SensitivityTable]:
    """A table for each output, the most sensitive quantizer first."""
    tables = []
    for output in outputs:
        ops = [SensitiveOp(one, values[output][metric.name]) for one, values in found.values() if output in values]
        ops.sort(key=lambda op: -metric.badness(op.value))
        tables.append(SensitivityTable(output, metric.name, case, ops))
    return tables
