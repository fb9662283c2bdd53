"""`QuantAnalysis`: from an accuracy that is too low to the operators that need more precision."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.analysis.chosen import Chosen
from horizon_plugin_pytorch.analysis.comparison import require_two_models
from horizon_plugin_pytorch.analysis.html_page import Curve, chart, page
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.profile.collect import Collector
from horizon_plugin_pytorch.analysis.profile.page import page_of
from horizon_plugin_pytorch.analysis.profile.stages import PREPARED, stage_of
from horizon_plugin_pytorch.analysis.quant_analysis import layers
from horizon_plugin_pytorch.analysis.quant_analysis.bad_cases import STATE_FILE, BadCases, Search
from horizon_plugin_pytorch.analysis.quant_analysis.estimate import METRIC, REMEDY, estimate
from horizon_plugin_pytorch.analysis.quant_analysis.op_infos import OpInfoManager
from horizon_plugin_pytorch.analysis.quant_analysis.outputs import GivenMetric, MetricFunction, OutputMetric, metrics_of
from horizon_plugin_pytorch.analysis.quant_analysis.plots import plot_bars, plot_histograms
from horizon_plugin_pytorch.analysis.quant_analysis.request import devices_of, type_of
from horizon_plugin_pytorch.analysis.quant_analysis.selections import Selections
from horizon_plugin_pytorch.analysis.quant_analysis.sensitivity import SensitivityRun, SensitivityTable, tables_of
from horizon_plugin_pytorch.analysis.quant_analysis.subjects import (
    ModelSubject,
    ProgramSubject,
    Subject,
    subject_of,
)
from horizon_plugin_pytorch.analysis.quant_analysis.tuning import Tuner, targets_of, write_tuned
from horizon_plugin_pytorch.analysis.similarity_function import SimilarityFunction
from horizon_plugin_pytorch.errors import (
    CheckError,
    QuantizationConfigError,
    QuantizationWarning,
    require_module,
    require_whole,
    warn,
)
from horizon_plugin_pytorch.statistics.metrics import METRICS
from horizon_plugin_pytorch.tables import Table
from horizon_plugin_pytorch.watch.call_log import CallLog

OUT_DIR = "./horizon_quant_analysis"
LAYERS_FILE, ADVISOR_FILE, PAGE_FILE = "compare_per_layer_out", "abnormal_layer_advisor", "profiler.html"
BASELINE_FOLDER, ANALYSIS_FOLDER = "baseline_model", "analysis_model"
_WHO = "QuantAnalysis"


class QuantAnalysis:
    """Finds where a model loses accuracy on its way to integers: bad cases, layers, sensitive operators.

    The calls go one after another: bad cases are found, or given; the models run on them; layers are compared, and
    the sensitivity of the outputs is measured. Each writes its files into one folder. Models are not changed.

    Args:
        baseline_model: the better one: float for ``fake_quant``, QAT for the others.
        analysis_model: what was made of it.
        analysis_model_type: ``fake_quant`` a calibration or QAT model; ``pre_export`` what `hbdk4.pre_export` gives;
            ``export`` the integer graph of `hbdk4.export`; ``convert`` a converted model, or its integer graph.
            ``pt_lut`` is the old name of ``pre_export``.
        device_ids: the number of a GPU for both models, or a list of one or two: of the baseline, of the other.
            None leaves models and data where they are.
        post_process: is applied to what each model gives before outputs are compared.
        out_dir: the folder of the files.
        infer_func: runs a model on a batch, ``infer_func(model, batch)``, and gives what is compared; None calls the
            model with the batch's arguments.

    Raises:
        CheckError: both are one model.
        QuantizationConfigError: the type does not fit the model.

    >>> import copy, tempfile
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import FakeQuantState, QuantWrapper, get_default_qconfig
    >>> from horizon_plugin_pytorch.quantization import prepare_qat_fx, set_fake_quantize
    >>> set_march(March.NASH_E)
    >>> net = QuantWrapper(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())).eval()
    >>> calibrated = prepare_qat_fx(copy.deepcopy(net), {"": get_default_qconfig()})
    >>> batches = [torch.randn(2, 4) for _ in range(3)]
    >>> _ = [calibrated(batch) for batch in batches]
    >>> set_fake_quantize(calibrated.eval(), FakeQuantState.VALIDATION)
    >>> qa = QuantAnalysis(net, calibrated, "fake_quant", out_dir=tempfile.mkdtemp())
    >>> _ = qa.auto_find_bad_case(batches)
    >>> qa.run()
    >>> [row.name for row in qa.compare_per_layer()]
    ['quant', 'module.0', 'module.1', 'dequant']
    >>> table = qa.sensitivity()["0"]
    >>> sorted(row[:2] for row in table)
    [['module.0', 'activation'], ['module.0', 'weight'], ['module.1', 'activation'], ['quant', 'activation']]
    """

    def __init__(
        self,
        baseline_model: nn.Module,
        analysis_model: Any,
        analysis_model_type: str,
        device_ids: int | Sequence[int] | None = None,
        post_process: Callable[[Any], Any] | None = None,
        out_dir: str | os.PathLike = OUT_DIR,
        infer_func: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        require_module(baseline_model, _WHO)
        if post_process is not None and not callable(post_process):
            raise TypeError(f"{_WHO}: post_process is a function of what a model gives; got {post_process!r}.")
        self.analysis_model_type = type_of(analysis_model_type, analysis_model, _WHO)
        if isinstance(analysis_model, nn.Module):
            require_two_models(baseline_model, analysis_model, _WHO)
        if self.analysis_model_type == "fake_quant" and stage_of(baseline_model) != "float":
            warn(
                f'{_WHO}: "fake_quant" compares with the float model, and the baseline is a {stage_of(baseline_model)} '
                "model, whose own rounding does not show. Preparation may work in place: keep `copy.deepcopy(model)` "
                "of the float model from before as the baseline.",
                QuantizationWarning,
            )
        devices = devices_of(device_ids, _WHO)
        if not torch.backends.flags_frozen():  # by `torch.backends.disable_global_flags`: then it is as it is
            torch.backends.cudnn.deterministic = True  # as the documents say: runs are compared
        self._baseline = ModelSubject(baseline_model, devices[0], _WHO, infer_func)
        self._analysis: Subject = subject_of(analysis_model, self._baseline.model, devices[1], _WHO, infer_func)
        self._post_process, self._devices = post_process, devices
        self.out_dir = os.fspath(out_dir)
        self._cases: BadCases | None = None
        self._managers: list[OpInfoManager | None] = [None, None]
        self._logs: list[CallLog | None] = [None, None]
        self._places: dict[int, int] = {}
        self._selections = Selections()
        self._case: int | None = None
        self._own: dict[str, OutputMetric] = {}  # functions of the user's that the search had, by name

    # -- bad cases

    def auto_find_bad_case(
        self,
        dataloader: Iterable[Any],
        num_steps: int | None = None,
        metric: GivenMetric = None,
        topk: int = 1,
        higher_is_better: bool | None = None,
    ) -> BadCases:
        """Find the batches on which the outputs of the two models differ most, by each metric.

        Writes ``badcase.txt``, ``badcase_report.html``, and ``all_badcase_info.pt`` with the batches themselves; also
        if an error or an interrupt ends the search. `sort`, `topk` and `argmax` of the analysed model select what the
        baseline selects: else a small error would swap results, and they could not be compared.

        Args:
            dataloader: batches, as `prepare` takes example inputs; labels may stand behind the inputs.
            num_steps: how many batches to look at; None takes all.
            metric: Cosine, MSE, L1, KL, SQNR, a function ``metric(baseline, analysis)`` of two tensors, or a list of
                these; None is all five.
            topk: how many batches to keep for each output and metric.
            higher_is_better: of a function, whether a large number is a good one; None is False.

        Raises:
            CheckError: a model, the post_process or a metric fails on a batch, or no output can be compared.
        """
        who = "auto_find_bad_case"
        metrics = metrics_of(metric, higher_is_better, who)
        search = Search(self._baseline, self._analysis, metrics, self._post_process, topk, who)
        self._own = {one.name: one for one in metrics if one.is_own}
        self._take(search.run(dataloader, num_steps, lambda found: found.write(self.out_dir, who)))
        assert self._cases is not None
        return self._cases

    def set_bad_case(self, data: Any) -> None:
        """Give a batch to analyse instead of searching for one."""
        self._take(BadCases([], inputs={0: data}))

    def load_bad_case(self, path: str | os.PathLike | None = None) -> BadCases:
        """Take up the bad cases that a search has found.

        Args:
            path: None is ``all_badcase_info.pt`` in the folder.
        """
        cases = BadCases.load(path or os.path.join(self.out_dir, STATE_FILE), "load_bad_case")
        self._take(cases)
        return cases

    def save_bad_case(self) -> None:
        """Write the bad cases that there are, so that `load_bad_case` can take them up."""
        self._found("save_bad_case").write(self.out_dir, "save_bad_case")

    def _take(self, cases: BadCases) -> None:
        self._cases = cases
        self._logs, self._managers, self._case = [None, None], [None, None], None

    def _found(self, who: str) -> BadCases:
        if self._cases is None or not self._cases.inputs:
            raise CheckError(
                f"{who}: there is no bad case yet; call `auto_find_bad_case(dataloader)`, `set_bad_case(batch)` or "
                "`load_bad_case()` first."
            )
        return self._cases

    def _metric(
        self, given: str | MetricFunction | None, higher_is_better: bool | None, cases: BadCases, who: str
    ) -> OutputMetric:
        """The metric that is asked for; else that of the search."""
        name = _default_metric(cases) if given is None else getattr(given, "__name__", "")
        if name in self._own:
            return self._own[name]
        if given is None and name not in METRICS:
            raise CheckError(
                f"{who}: the bad cases were found with the function `{name}`, which the file does not hold: give it as "
                "metric."
            )
        return OutputMetric(given or name, higher_is_better, who)

    # -- layers

    def run(self, run_baseline_model: bool = True, run_analysis_model: bool = True, index: int | None = None) -> None:
        """Run the models on a bad case and write down what each operator takes and gives.

        Each model has a folder, ``baseline_model`` and ``analysis_model``, with ``op_infos/``, ``statistic.txt`` and
        ``statistic.csv``. As in the search, the analysed model selects (`sort`, `topk`, `argmax`) what the baseline has
        selected.

        Args:
            run_baseline_model, run_analysis_model: a model that is not run keeps what was written of it before.
            index: of the bad case; None is the worst by L1, or by the first metric of the search.
        """
        who = "run"
        cases = self._found(who)
        if index is not None and index not in cases.inputs:
            raise CheckError(f"{who}: the bad cases are {', '.join(map(str, cases.inputs))}; there is no {index}.")
        wanted = cases.case(_default_metric(cases)) if index is None else index
        if self._case is not None and wanted != self._case and not (run_baseline_model and run_analysis_model):
            raise CheckError(f"{who}: what was written before is of batch {self._case}; run both models on {wanted}.")
        batch = cases.inputs[wanted]
        subjects: tuple[Subject, Subject] = self._baseline, self._analysis
        folders = BASELINE_FOLDER, ANALYSIS_FOLDER
        asked = run_baseline_model, run_analysis_model
        for number, (subject, folder, is_asked) in enumerate(zip(subjects, folders, asked, strict=True)):
            if not is_asked:
                if self._managers[number] is None:
                    raise CheckError(f"{who}: the {folder.replace('_', ' ')} has not run yet on this bad case.")
                continue
            manager = OpInfoManager(os.path.join(self.out_dir, folder), who)
            if isinstance(subject, ModelSubject):
                selecting = self._selections.taking if number else self._selections.noting
                with selecting():
                    self._logs[number] = subject.watch(batch, manager.add)
            elif isinstance(subject, ProgramSubject):
                base = self._logs[0] or self._baseline.watch(batch, lambda call: None)
                self._places = subject.write(batch, base.calls, manager)
            else:
                raise CheckError(f"{who}: {subject.name} gives outputs only; it has no operators to look at.")
            manager.write_statistics()
            self._managers[number] = manager
        self._case = wanted

    def compare_per_layer(self, prefixes: Sequence[str] = (), types: Sequence[type] = ()) -> list[layers.LayerRow]:
        """Compare what each operator gave in the two models on the bad case that they have run on.

        Writes ``compare_per_layer_out.txt``, ``.csv`` and ``.html``, and of layers whose numbers and scales do not fit
        ``abnormal_layer_advisor.txt``, ``.csv`` and ``.html``. Where both are models, ``profiler.html`` shows them, as
        the page of `model_profiler`. A member of a fused operator has no metrics: the analysed model does not have its
        result.

        Args:
            prefixes, types: only operators whose names start so, and those of these classes.
        """
        who = "compare_per_layer"
        if self._case is None:
            self.run()
        chosen = Chosen(who, prefixes, types)
        chosen.tell_unused(self._baseline.model)
        (log, other), (base, analysis) = self._logs, self._managers
        assert log is not None and base is not None and analysis is not None
        if other is not None:
            rows = layers.compare_models((log, other), (base, analysis), chosen, who)
        else:
            rows = layers.compare_with_graph(log, (base, analysis), self._places, chosen, who)
        self._write(layers.layer_table(rows), LAYERS_FILE, who, "Layers", layers.layer_curve(rows))
        self._write(layers.abnormal_layers(rows), ADVISOR_FILE, who, "Layers whose numbers and scales do not fit")
        if isinstance(self._analysis, ModelSubject):
            self._page(self._analysis.model, who)
        return rows

    def _write(self, table: Table, stem: str, who: str, title: str, *curves: Curve) -> None:
        write_report(f"{table.text('psql')}\n", self.out_dir, f"{stem}.txt", who)
        write_report(table.csv(), self.out_dir, f"{stem}.csv", who)
        parts = [chart(curves)] if curves else []
        write_report(page(title, *parts, table.html()), self.out_dir, f"{stem}.html", who)

    def _page(self, model: nn.Module, who: str) -> None:
        assert self._case is not None
        batch = self._baseline.inputs(self._found(who).inputs[self._case])
        similarity = SimilarityFunction("Cosine", who)
        models = self._baseline.model, model
        devices = [device for device in self._devices if device is not None] or None
        collector = Collector(*models, [batch], similarity, devices, who)
        mode = "FvsQ" if stage_of(models[0]) == "float" else "CvsQ" if stage_of(model) in PREPARED else "QvsQ"
        collector.describe(f"{type(models[0]).__name__}: bad case {self._case}", mode, None, "", None)
        collector.run(lambda document: None)
        write_report(page_of([collector.document]), self.out_dir, PAGE_FILE, who)

    # -- sensitivity

    def sensitivity(
        self,
        metric: str | MetricFunction | None = None,
        prefixes: Sequence[str] = (),
        types: Sequence[type] = (),
        use_sensitivity_v2: bool = False,
        outputs: Sequence[str] | None = None,
        higher_is_better: bool | None = None,
        draws: int | None = None,
    ) -> dict[str, list[list[Any]]]:
        """Measure how much each fake quantizer alone changes each output, on the output's bad case.

        One fake quantizer rounds at a time, and the outputs are compared with the baseline's. For each output
        ``output_<name>_<metric>_sensitive_ops.txt`` (and ``.html``) is written, the most sensitive first, and a ``.pt``
        that the setters and templates take (``sensitive_op_..._qconfig_setter(table, ratio=0.2)``,
        `SensitivityTemplate`). What is before a quantizer is not run again. An interrupted call goes on where it was.

        Args:
            metric: None is that of the search; L1, if it had several.
            prefixes, types: only operators whose names start so, and those of these classes.
            use_sensitivity_v2: estimate the mean squared errors of all quantizers at once, by gradients, in a few
                runs for each output instead of one for each quantizer. The documents have the name; this is what it
                does here. It finds the operators that matter, not exact numbers.
            outputs: names of the outputs, as ``badcase.txt`` has them; None is all.
            higher_is_better: of a function that the search did not have, whether a large number is a good one.
            draws: of an estimate, how many backwards to take for each output. None is as many as fit into a tenth of
                the runs that measuring would take. Nothing depends on the clock: the same call gives the same table.

        Returns:
            The tables by output: rows ``[op_name, sensitive_type, op_type, metric, quant_dtype, flops]``.

        Raises:
            CheckError: the analysed model has no fake quantizers, or there is no bad case.
        """
        who = "sensitivity"
        cases, chosen = self._found(who), Chosen(who, prefixes, types)
        if use_sensitivity_v2 and metric not in (None, METRIC):
            raise QuantizationConfigError(f"{who}: use_sensitivity_v2=True estimates {METRIC}; leave the metric out.")
        if draws is not None:
            require_whole(who, "draws", draws, 1)
            if not use_sensitivity_v2:
                raise QuantizationConfigError(f"{who}: draws are those of an estimate; give use_sensitivity_v2=True.")
        wanted = self._metric(METRIC if use_sensitivity_v2 else metric, higher_is_better, cases, who)
        tables = self._tables(wanted, chosen, outputs, who, use_sensitivity_v2, draws)
        return {table.output: table.rows for table in tables}

    def _tables(
        self,
        metric: OutputMetric,
        chosen: Chosen,
        outputs: Sequence[str] | None,
        who: str,
        is_estimated: bool = False,
        draws: int | None = None,
    ) -> list[SensitivityTable]:
        analysis, cases = self._prepared(who), self._found(who)
        chosen.tell_unused(analysis.model)
        unknown = [name for name in outputs or () if cases.outputs and name not in cases.outputs]
        if unknown:
            raise CheckError(f"{who}: there is no output {unknown[0]!r}; there are {', '.join(cases.outputs)}.")
        by_case: dict[int, list[str] | None] = {}
        for name in outputs or cases.outputs:
            names = by_case.setdefault(cases.case(metric.name, name), [])
            assert names is not None
            names.append(name)
        if not by_case:  # a batch that was given: nobody has looked at outputs yet
            by_case[cases.case(metric.name)] = None if outputs is None else list(outputs)
        run = SensitivityRun(self._baseline, analysis, [metric], self._post_process, chosen, self.out_dir, who)
        found: list[SensitivityTable] = []
        for case, asked in by_case.items():
            if is_estimated:
                is_asked = outputs is not None
                batch = cases.inputs[case]
                every = estimate(self._baseline, analysis, batch, asked, self._post_process, who, is_asked, draws)
                values = {site: one for site, one in every.items() if chosen.has(site.operator, one[0].module)}
            else:
                values = run.measure(cases.inputs[case], asked)
            there = list(dict.fromkeys(name for _, of in values.values() for name in of))
            found += tables_of(values, metric, [name for name in asked or there if name in there], case)
        if is_estimated and not found:
            raise CheckError(f"{who}: the outputs have no gradient, so they cannot be estimated. {REMEDY}")
        order = {name: number for number, name in enumerate(cases.outputs)}
        found.sort(key=lambda table: order.get(table.output, len(order)))
        for table in found:
            table.write(self.out_dir, who)
        run.finish()
        return found

    def _prepared(self, who: str) -> ModelSubject:
        analysis = self._analysis
        if not isinstance(analysis, ModelSubject) or stage_of(analysis.model) not in PREPARED:
            raise CheckError(
                f"{who} lets one fake quantizer round at a time, and {analysis.name} has none. Analyse the calibration "
                'or QAT model, with analysis_model_type="fake_quant".'
            )
        return analysis

    def tune_bad_case(
        self, outputs_config: Mapping[str, Any], skip_prefix: Sequence[str] | str = ()
    ) -> dict[str, list[list[Any]]]:
        """Find the operators that need more precision for the bad cases to reach what is asked of each output.

        The documents name the call and its arguments; this is what it does here. Quantizers are taken in the order of
        their sensitivity, and bisection finds how many of them must not round, which stands for a format of more
        precision. Writes ``tune_bad_case.txt``, and for each output ``tune_bad_case_<output>.pt``, whose rows setters
        and templates take with ``ratio=1.0``.

        Args:
            outputs_config: the metric and the limit of each output that counts: ``{"0-0": ("Cosine", 0.99)}``.
            skip_prefix: operators whose names start so go on rounding.
        """
        who = "tune_bad_case"
        cases, targets = self._found(who), targets_of(outputs_config, who)
        skipped = (skip_prefix,) if isinstance(skip_prefix, str) else tuple(skip_prefix)
        tuner = Tuner(self._baseline, self._prepared(who), self._post_process, skipped, who)
        tuned = []
        try:
            for output, (metric, limit) in targets.items():
                tables = self._tables(metric, Chosen(who), [output], who)
                if not tables or not tables[0].ops:
                    raise CheckError(f"{who}: there is no output {output!r} that can be compared.")
                tuned.append(tuner.fewest(cases.inputs[tables[0].case], tables[0], metric, limit))
        finally:
            if tuned:
                write_tuned(tuned, self.out_dir, who)
        return {one.output: one.rows for one in tuned}

    # -- plots

    def plot_opinfo(self, prefixes: Sequence[str] = (), types: Sequence[type] = ()) -> list[str]:
        """Show how the numbers of each operator are distributed in both models, on a page for each.

        A member of a fused operator whose result the analysed model does not have is shown for the baseline alone.

        Args:
            prefixes, types: only operators whose names start so, and those of these classes.

        Returns:
            The paths of the pages, in ``plot_opinfo/``.
        """
        return self._plot("plot_opinfo", plot_histograms, prefixes, types)

    def plot_opinfo_bar3d(self, prefixes: Sequence[str] = (), types: Sequence[type] = ()) -> list[str]:
        """Show where in its channels the results of each operator are large, as bars, in both models.

        Returns:
            The paths of the pages, in ``plot_opinfo_bar3d/``.
        """
        return self._plot("plot_opinfo_bar3d", plot_bars, prefixes, types)

    def _plot(self, who: str, plot: Callable[..., str], prefixes: Sequence[str], types: Sequence[type]) -> list[str]:
        if self._case is None:
            self.run()
        chosen = Chosen(who, prefixes, types)
        chosen.tell_unused(self._baseline.model)
        (log, other), (base, analysis) = self._logs, self._managers
        assert log is not None and base is not None and analysis is not None
        partners = layers.partners_of((log, other), analysis, self._places)
        pages = []
        for call, info in zip(log.calls, base, strict=True):
            if chosen.has(call.path, call.module):
                tensors = [one.load()["output"] for one in (info, partners.get(call.index)) if one is not None]
                name = f"{os.path.basename(info.file).removesuffix('.opinfo')}.html"
                pages.append(write_report(plot(info.name, tensors), os.path.join(self.out_dir, who), name, who))
        return pages


def _default_metric(cases: BadCases) -> str:
    """The name of the metric of a search; L1, if it had several or there was none."""
    return "L1" if "L1" in cases.metrics or not cases.metrics else cases.metrics[0]
