"""How much each fake quantizer alone changes the outputs of a model."""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_pytorch.analysis.chosen import Chosen
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.quant_analysis.bad_cases import PostProcess
from horizon_plugin_pytorch.analysis.quant_analysis.outputs import OutputMetric, compared, kept, named_outputs
from horizon_plugin_pytorch.analysis.quant_analysis.quantizers import PartlyRounded, Site
from horizon_plugin_pytorch.analysis.quant_analysis.selections import Selections
from horizon_plugin_pytorch.analysis.quant_analysis.subjects import ModelSubject, Subject
from horizon_plugin_pytorch.errors import CheckError, QuantizationWarning, listed, warn
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.tables import Table

PROGRESS_FILE = "sensitivity_progress_{key}.pt"
_SECONDS = 20.0  # between two writings of what there is so far


@dataclass(frozen=True)
class SensitiveOp:
    """A row of a sensitivity table."""

    site: Site
    value: float
    share: float  # of all operations

    @property
    def row(self) -> list[Any]:
        """As the file has it, and setters and templates take it."""
        module, quantizer = self.site.module, self.site.quantizer
        flops = f"{self.site.operations}({self.share:.2%})"
        return [self.site.name, self.site.kind, str(type(module)), self.value, str(quantizer.dtype), flops]


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
        """Write the table as text and for `torch.load`."""
        headers = ["op_name", "sensitive_type", "op_type", self.metric, "quant_dtype", "flops"]
        write_report(f"{Table(headers, self.rows).text(aligns_numbers=True)}\n", folder, f"{self.stem}.txt", who)
        buffer = io.BytesIO()
        torch.save(self.rows, buffer)
        write_atomically(buffer.getvalue(), os.path.join(folder, f"{self.stem}.pt"))


Values = dict[str, dict[str, float]]  # by output and metric


class SensitivityRun:
    """Measures quantizers one by one, on as many bad cases as are asked for.

    Args:
        metrics: what to compute of the outputs.
        folder: where progress is kept, so that an interrupted run can go on; None keeps none.
    """

    def __init__(
        self,
        baseline: Subject,
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
        self._progress: list[_Progress] = []

    def finish(self) -> None:
        """All is measured and written: forget the progress."""
        for progress in self._progress:
            progress.end()

    def measure(self, batch: Any) -> dict[tuple[str, str], tuple[Site, Values]]:
        """The values of each site that is asked for, on one batch."""
        comparison = OutputComparison(self._baseline, batch, self._post_process, self._metrics, self._who)
        found: dict[tuple[str, str], tuple[Site, Values]] = {}
        with PartlyRounded(self._analysis, batch, self._who) as runs:
            sites = [site for site in runs.sites if self._chosen.has(site.name, site.module)]
            if not sites:
                raise CheckError(f"{self._who}: the prefixes and types that are given choose no operator that rounds.")
            progress = _Progress(self._folder, self._key(batch))
            self._progress.append(progress)
            by_quantizer: dict[Any, Values] = {}
            try:
                for site in tqdm(sites, desc=self._who, disable=None):
                    values = by_quantizer.get(site.quantizer) or progress.get(site)
                    if values is None:
                        values = comparison.values(lambda site=site: runs.run([site.quantizer]))  # type: ignore[misc]
                        progress.put(site, values)
                    by_quantizer[site.quantizer] = values
                    found[site.key] = site, values
            finally:
                progress.write()
        comparison.tell()
        return found

    def _key(self, batch: Any) -> str:
        """What results depend on."""
        digest = hashlib.blake2b(digest_size=16)
        model = getattr(self._baseline, "model", None)
        baseline = list(model.state_dict().values()) if isinstance(model, nn.Module) else []
        analysis = [*self._analysis.model.parameters(), *self._analysis.model.buffers()]
        for x in (*tensors_of(batch), *(x for x in (*baseline, *analysis) if isinstance(x, Tensor))):
            data = x.detach().cpu().contiguous().flatten()
            digest.update(f"{tuple(x.shape)} {x.dtype}".encode())
            digest.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
        digest.update(" ".join(metric.name for metric in self._metrics).encode())
        return digest.hexdigest()


class OutputComparison:
    """What a model gives on one batch, compared with what the baseline gives, as often as is wanted.

    Attributes:
        wanted: what the baseline gives.
        selections: what it selects.
    """

    def __init__(
        self, baseline: Subject, batch: Any, post_process: PostProcess, metrics: Sequence[OutputMetric], who: str
    ) -> None:
        self._post_process, self._metrics, self._who = post_process, metrics, who
        self.selections = Selections()
        self._refused: dict[str, str] = {}
        self._not_numbers: dict[str, int] = {}
        with baseline.quiet(), torch.no_grad(), self.selections.noting():
            self.wanted = kept(named_outputs(self._processed(lambda: baseline.run(batch))))

    def _processed(self, run: Callable[[], Any]) -> Any:
        out = run()
        return out if self._post_process is None else self._post_process(out)

    def values(self, run: Callable[[], Any]) -> Values:
        """The metrics of each output that a run gives."""
        with torch.no_grad(), self.selections.taking():
            found = named_outputs(self._processed(run))
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


class _Progress:
    """Values that were measured, in a file as long as the run is not complete."""

    def __init__(self, folder: str | None, key: str) -> None:
        file = None if folder is None else os.path.join(folder, PROGRESS_FILE.format(key=key[:8]))
        self._file, self._key = file, key
        self._values: dict[tuple[str, str], Values] = {}
        self._written = time.monotonic()
        if file is not None and os.path.exists(file):
            try:
                state = torch.load(file, weights_only=True)
                if state["key"] == key:
                    self._values = {(name, kind): values for name, kind, values in state["values"]}
            except Exception:  # of another version, or no such file: all is measured anew
                self._values = {}

    def get(self, site: Site) -> Values | None:
        return self._values.get(site.key)

    def put(self, site: Site, values: Values) -> None:
        self._values[site.key] = values
        if time.monotonic() - self._written > _SECONDS:
            self.write()

    def write(self) -> None:
        if self._file is None or not self._values:
            return
        self._written = time.monotonic()
        buffer = io.BytesIO()
        rows = [[name, kind, values] for (name, kind), values in self._values.items()]
        torch.save({"key": self._key, "values": rows}, buffer)
        write_atomically(buffer.getvalue(), self._file)

    def end(self) -> None:
        if self._file is not None and os.path.exists(self._file):
            os.unlink(self._file)


def tables_of(
    found: Mapping[tuple[str, str], tuple[Site, Values]], metric: OutputMetric, outputs: Sequence[str], case: int
) -> list[SensitivityTable]:
    """A table for each output, the most sensitive quantizer first."""
    total = sum({site.name: site.operations for site, _ in found.values()}.values()) or 1
    tables = []
    for output in outputs:
        ops = [
            SensitiveOp(site, values[output][metric.name], site.operations / total)
            for site, values in found.values()
            if output in values
        ]
        ops.sort(key=lambda op: -metric.badness(op.value))
        tables.append(SensitivityTable(output, metric.name, case, ops))
    return tables
