"""The answer of `tune`: formats by operator, as a setter, as Python to commit, and as a report."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_plugin_profiler.tuning.source import WEIGHTS, source_of
from horizon_plugin_pytorch.analysis.html_page import Curve, chart, page
from horizon_plugin_pytorch.analysis.tuning.costs import Cost
from horizon_plugin_pytorch.config.qconfig_setter import QconfigSetter
from horizon_plugin_pytorch.config.setters import QconfigTemplate
from horizon_plugin_pytorch.config.templates import ConvDtypeTemplate, MatmulDtypeTemplate, ModuleNameTemplate
from horizon_plugin_pytorch.dtype import qint8
from horizon_plugin_pytorch.fake_quant.qconfig import TRAINING_OBSERVER, get_qconfig
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.tables import Table

FORMATS, REPORT, PAGE = "tuned_formats.py", "tuning.txt", "tuning.html"
Formats = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Trial:
    """One mixture of formats that was run.

    Args:
        what: what it is.
        raised: how many operators are not int8.
        share: of all operators with a format.
        value: what it is judged by.
        error: the squared relative error of the outputs; None where it was not measured.
        is_met: does it meet the target? None where there is none.
        is_mixture: is it a mixture of the model that the answer is for, as calibration leaves it? Not so is what was
            run before the model was rewritten, or after it has learned.
    """

    what: str
    raised: int
    share: float
    value: float
    error: float | None
    is_met: bool | None
    is_mixture: bool = True


@dataclass(frozen=True)
class Bounds:
    """How few sites could do, if errors add up. Both bounds are conditional: they hold if the model of errors does.

    Args:
        chosen: how many sites (results and weights of operators) are raised.
        additive: the fewest whose errors add up to no more than `error`.
        corrected: the same with every sum multiplied by `rho`.
        rho: the lowest real error over the sum of errors, of all mixtures that were run.
        error: the largest squared relative error of the outputs among the mixtures that met the target.
        half: how many operators are float16 besides, in all these mixtures.
    """

    chosen: int
    additive: int | None
    corrected: int | None
    rho: float
    error: float
    half: int = 0

    def __str__(self) -> str:
        def told(count: int | None) -> str:
            return "no number" if count is None else str(count)

        raised = "1 result or weight is raised" if self.chosen == 1 else f"{self.chosen} results and weights are raised"
        besides = f" to int16, with {self.half} operators in float16 besides" if self.half else ""
        return (
            f"{raised}{besides}. If errors added up exactly, at least "
            f"{told(self.additive)} would be needed for an output error of {self.error:.3g}; if they came to no less "
            f"than rho = {self.rho:.3f} times their sum, as in all mixtures that were run, at least "
            f"{told(self.corrected)}. Both bounds are conditional on that."
        )


@dataclass
class TuningResult:
    """What `tune` found; printing it gives the report.

    Args:
        formats: of the operators that are not int8, as `ModuleNameTemplate` takes them.
        reasons: why, by operator.
        name: what values are called.
        value, float_value: of the answer, and of the float model.
        target: what was asked for; None where a budget was.
        is_met: does the answer meet the target, or keep the budget?
        operators: how many operators have a format.
        steps: the mixtures that were run, in order.
        sensitivity: rows ``(op_name, sensitive_type, op_type, metric, quant_dtype)``, the most sensitive first, as
            setters and templates take them; the metric is the squared relative error of the outputs.
        curve: for each number of raised sites, in the order of the sensitivity, the error that their sum predicts.
        forwards: runs over the data of the measurement, and calls of `evaluate`; calibration is not counted.
        costs: of int8 and of the answer.
        float_model: the model that the answer is for: the one that was given, or a rewritten copy of it.
        thresholds: largest magnitudes of operators whose scale is fixed, by path; the setter has them.
        prepare_args: what else `prepare` must be told, such as `own_scales`.
        int8_gemms: does the setter keep int8 for what layers and products of matrices multiply?
        rewrites: names of the functions that rewrote the float model, in their order.
        searched: on how many samples `search_scales` is to be called after `calibrate`; None where it is not.
        learned: what was done to the weights of the answer at last (``AdaRound``, ``training``), as far as it helped.
        prepared_model: the answer, prepared and calibrated, with what was learned; None where nothing was to be.
        higher_is_better: of values.
        is_verified: did the model, prepared anew with `setter()` and given the scales of the mixture that was measured,
            give the very same numbers? Scales that the setter fixes are its own; with `int8_gemms` it is calibrated.
    """

    formats: dict[str, dict[str, Any]]
    reasons: dict[str, str]
    name: str
    value: float
    float_value: float
    target: float | None
    is_met: bool
    operators: int
    march: str
    model: str
    steps: list[Trial] = field(default_factory=list)
    bounds: Bounds | None = None
    sensitivity: list[list[Any]] = field(default_factory=list)
    curve: list[float] = field(default_factory=list)
    forwards: float = 0.0
    costs: dict[str, Cost] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_verified: bool | None = None
    float_model: nn.Module | None = field(default=None, repr=False)
    thresholds: dict[str, float] = field(default_factory=dict)
    prepare_args: dict[str, Any] = field(default_factory=dict)
    int8_gemms: bool = False
    searched: int | None = None
    rewrites: list[str] = field(default_factory=list)
    learned: list[str] = field(default_factory=list)
    prepared_model: nn.Module | None = field(default=None, repr=False)
    higher_is_better: bool = True

    @property
    def share(self) -> float:
        """The share of the operators that are not int8."""
        return len(self.formats) / self.operators if self.operators else 0.0

    def setter(self, qat: bool = False, fix_scale: bool = False) -> QconfigSetter:
        """A qconfig setter for `prepare`, which takes `prepare_args` besides.

        Args:
            qat: observe as training does, rather than as calibration does.
            fix_scale: keep the scales of calibration while training.
        """
        qconfig = get_qconfig(TRAINING_OBSERVER, fix_scale=fix_scale) if qat else get_qconfig()
        return QconfigSetter(qconfig, templates(self.formats, self.thresholds, self.int8_gemms), save_dir=None)

    def source(self) -> str:
        """The setters as Python: to read, to edit, to commit."""
        return source_of(self)

    def summary(self) -> str:
        """The answer in a line."""
        verdict = "meets" if self.is_met else "does not meet"
        asked = f"the target {self.target:.6g}" if self.target is not None else "the budget"
        return (
            f"{self.name} {self.value:.6g} (float {self.float_value:.6g}) {verdict} {asked} with {len(self.formats)} "
            f"of {self.operators} operators ({self.share:.1%}) not int8"
        )

    def __str__(self) -> str:
        return "\n\n".join(self._parts())

    def _tables(self) -> dict[str, Table]:
        chosen = [
            [path, " ".join(f"{part} {_short(dtype)}" for part, dtype in parts.items()), self.reasons.get(path, "")]
            for path, parts in self.formats.items()
        ]
        steps = [
            [s.what, s.raised, f"{s.share:.1%}", f"{s.value:.6g}", "" if s.error is None else f"{s.error:.3g}", _met(s)]
            for s in self.steps
        ]
        best = [[f"{s.share:.1%}", s.raised, f"{s.value:.6g}", s.what] for s in self.front()]
        names = sorted({name for cost in self.costs.values() for name in cost.products})
        costs = [
            [what, *(f"{cost.products.get(name, 0):,}" for name in names), f"{cost.traffic:,}"]
            for what, cost in self.costs.items()
        ]
        return {
            "Formats that are not int8": Table(["operator", "formats", "why"], chosen),
            "What was run": Table(["mixture", "not int8", "share", self.name, "output error", "target"], steps),
            "The best that was run for each share of operators (Pareto)": Table(
                ["share", "not int8", self.name, "mixture"], best
            ),
            "Multiply-accumulates by format, and bytes read and written, of one batch": Table(
                ["", *names, "bytes"], costs
            ),
        }

    def _parts(self) -> list[str]:
        parts = [f"{self.model} on {self.march}: {self.summary()}."]
        parts += self.notes
        if self.prepare_args:
            told = ", ".join(f"{name}={value!r}" for name, value in self.prepare_args.items())
            parts.append(f"`prepare` must be told besides: {told}.")
        parts += [f"{title}:\n{table.text()}" for title, table in self._tables().items() if table.rows]
        if self.bounds is not None:
            parts.append(str(self.bounds))
        parts.append(f"{self.forwards:.0f} forwards over the data of the measurement, evaluations among them.")
        return parts

    def page(self) -> str:
        """The report as a page that needs no network."""
        parts = [f"<p>{escape(self.summary())}.</p>"]
        parts += [f"<p>{escape(note)}</p>" for note in self.notes]
        parts.append(f"<h2>{escape(self.name)} against the share of operators that are not int8</h2>")
        level = None if self.target is None else ("target", self.target)
        curves = [_curve("mixtures that were run", self.steps, False), _curve("the best for its share", self.front())]
        parts.append(chart(curves, "share of operators that are not int8", " %", level))
        if self.curve:
            parts.append("<h2>Output error that is predicted, as log10</h2>")
            told = [f"{count} raised: {value:.3g}" for count, value in enumerate(self.curve)]
            logarithms = [math.log10(value) if value > 0 else -math.inf for value in self.curve]
            parts.append(chart([Curve("sum of errors", logarithms, told)], "results and weights that are raised"))
        for title, table in self._tables().items():
            if table.rows:
                parts += [f"<h2>{escape(title)}</h2>", table.html()]
        if self.bounds is not None:
            parts.append(f"<p>{escape(str(self.bounds))}</p>")
        rows = [[path, kind, name, f"{error:.4g}", dtype] for path, kind, name, error, dtype in self.sensitivity]
        headers = ["operator", "of its", "type", "output error alone", "format"]
        parts += ["<h2>Sensitivity</h2>", Table(headers, rows).html()]
        return page(f"Mixed precision of {self.model}", *parts)

    def front(self) -> list[Trial]:
        """The mixtures that no other is better than with as few operators beyond int8, the fewest first."""
        found: list[Trial] = []
        sign = 1 if self.higher_is_better else -1
        mixtures = (step for step in self.steps if step.is_mixture)
        for step in sorted(mixtures, key=lambda step: (step.share, -sign * step.value)):
            if not found or sign * step.value > sign * found[-1].value:
                found.append(step)
        return found

    def write(self, folder: str | os.PathLike) -> list[Path]:
        """Write the setters, the report and the page; their paths."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        texts = {FORMATS: self.source(), REPORT: f"{self}\n", PAGE: self.page()}
        for name, text in texts.items():
            write_atomically(text.encode(), target / name)
        names = list(texts)
        if self.learned and self.prepared_model is not None:
            buffer = io.BytesIO()
            torch.save(self.prepared_model.state_dict(), buffer)
            write_atomically(buffer.getvalue(), target / WEIGHTS)
            names.append(WEIGHTS)
        return [target / name for name in names]


def templates(formats: Formats, thresholds: Mapping[str, float], int8_gemms: bool = False) -> list[QconfigTemplate]:
    """The templates of a setter: formats, what stays int8, and scales that are fixed by the largest magnitude."""
    found: list[QconfigTemplate] = [ModuleNameTemplate(formats)]
    if int8_gemms:
        found += [ConvDtypeTemplate(qint8, qint8), MatmulDtypeTemplate(qint8)]
    if thresholds:
        found.append(ModuleNameTemplate({path: {"threshold": end} for path, end in thresholds.items()}))
    return found


def _curve(name: str, steps: Sequence[Trial], is_joined: bool = True) -> Curve:
    labels = [f"{step.share:.1%} not int8: {step.value:.6g} ({step.what})" for step in steps]
    return Curve(name, [step.value for step in steps], labels, [100 * step.share for step in steps], is_joined)


def _met(step: Trial) -> str:
    return "" if step.is_met is None else "met" if step.is_met else "missed"


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.").removeprefix("q")
