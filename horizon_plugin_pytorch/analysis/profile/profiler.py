"""All tools in one go, and one page that shows what they found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

from torch import nn

from horizon_plugin_pytorch.analysis.call_counts import called_counts
from horizon_plugin_pytorch.analysis.check_qconfig import QConfigChecker
from horizon_plugin_pytorch.analysis.comparison import require_two_models
from horizon_plugin_pytorch.analysis.features import STATISTICS, StatisticsStream
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.profile.collect import WITHOUT_WEIGHTS, Collector
from horizon_plugin_pytorch.analysis.profile.document import Document, Metric
from horizon_plugin_pytorch.analysis.profile.model_explorer import explorer_files
from horizon_plugin_pytorch.analysis.profile.page import page_of
from horizon_plugin_pytorch.analysis.profile.side_files import CSV_FILE, operators_csv
from horizon_plugin_pytorch.analysis.profile.stages import PREPARED, stage_of
from horizon_plugin_pytorch.analysis.profile.tasks import task_of
from horizon_plugin_pytorch.analysis.profile.tools import ToolSettings
from horizon_plugin_pytorch.analysis.report import called_times_table
from horizon_plugin_pytorch.analysis.rows import CalledTimes
from horizon_plugin_pytorch.analysis.similarity import tell_poor, write_similarity
from horizon_plugin_pytorch.analysis.similarity_function import SimilarityFunction
from horizon_plugin_pytorch.analysis.unfused import ALL_FUSED, check_unfused_operations
from horizon_plugin_pytorch.analysis.watched_run import undisturbed_evaluation
from horizon_plugin_pytorch.analysis.weights import compare_weights
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import CheckError, QuantizationConfigError, require_module

OUT_DIR, PAGE_FILE, JSON_FILE = "horizon_quant_debug", "profiler.html", "profiler.json"
CALLED_FILE, UNFUSED_FILE = "module_called_count.txt", "unfused_operations.txt"
_WHO = "model_profiler"
MODES = {
    "FvsQ": (("float",), (*PREPARED, "quantized"), "a float model and its calibration, QAT or quantized form"),
    "QvsQ": (PREPARED, ("quantized",), "a QAT model and its quantized form"),
    "CvsQ": (PREPARED, PREPARED, "a calibration model and the QAT model that was made of it"),
}
GivenMetric = Metric | tuple[str, float, float] | Callable[[nn.Module], float] | None


def model_profiler(
    model1: nn.Module,
    model2: nn.Module,
    example_inputs: Any,
    mode: str,
    out_dir: str | os.PathLike | None = None,
    kwargs_dict: dict[str, dict[str, Any]] | None = None,
    *,
    batches: Iterable[Any] = (),
    metric: GivenMetric = None,
    task: str = "",
    title: str = "",
) -> Document:
    """Run all tools on two stages of a model, and show what they find on one page, ``profiler.html``.

    Similarity, statistics, weights, counts of calls, unfused patterns and the check of formats; the files of all of
    them are in the folder, too, and the same data as ``profiler.json`` and ``profiler.csv``, and for Model Explorer as
    ``model_explorer_*.json``: a graph, and node data that colour it (`write_node_data` colours an exported file). If an
    error or an interrupt ends the run, the files have what was found until then.

    Args:
        model1, model2: the earlier and the later stage; they are not changed. Both run in eval mode.
        example_inputs: the arguments of both models, as `prepare` takes them.
        mode: what is compared: ``FvsQ`` float and calibration, QAT or quantized; ``QvsQ`` QAT and quantized; ``CvsQ``
            calibration and QAT.
        out_dir: the folder of the files; None is ``horizon_quant_debug`` in the current one.
        kwargs_dict: arguments of the tools by their names: `featuremap_similarity`, `get_raw_features`,
            `profile_featuremap`, `get_module_called_count`, `check_unfused_operations`, `compare_weights`,
            `check_qconfig`. Models and inputs are not among them, and an out_dir is replaced.
        batches: further inputs, each as `example_inputs`; the numbers of all of them are put together. Memory does not
            grow with them.
        metric: of your task, which is shown first: ``("top-1", 0.761, 0.754)``, a `Metric`, or a function of a model
            that gives a number, which is called with both.
        task: whose thresholds judge the errors, such as ``"classification"``; empty for the general ones.
        title: of the page; empty for the name of the model's class.

    Returns:
        The document that the page shows.

    Raises:
        QuantizationConfigError: the mode does not fit the models, or the task or an argument of a tool is not known.
        CheckError: both are one model, they have nothing in common, one of them fails on these inputs, or makes other
            calls on a further batch.

    >>> import copy, tempfile, torch
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, convert_fx, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> qat = prepare_qat_fx(QuantWrapper(nn.ReLU()).eval(), {"": get_default_qconfig()}).eval()
    >>> x = torch.linspace(-1, 1, 8)
    >>> _ = qat(x)
    >>> quantized = convert_fx(copy.deepcopy(qat))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = model_profiler(qat, quantized, x, mode="QvsQ", out_dir=folder)  # doctest: +ELLIPSIS
    Please check if these OPs qconfigs are expected...
    >>> [(operator.name, operator.error) for operator in found.operators]
    [('quant', 0), ('module', 0), ('dequant', 0)]
    """
    settings = ToolSettings(kwargs_dict)
    task_of(task)  # before anything runs
    models = model1, model2
    for model in models:
        require_module(model, _WHO)
    require_two_models(*models, _WHO)
    _require_mode(mode, *models)
    run = _ProfilerRun(models, example_inputs, mode, os.fspath(out_dir or OUT_DIR), settings)
    return run.run(batches, _metric(metric, models), task, title)


class _ProfilerRun:
    """One call of the profiler."""

    def __init__(
        self, models: tuple[nn.Module, nn.Module], inputs: Any, mode: str, folder: str, settings: ToolSettings
    ) -> None:
        self._models, self._inputs, self._mode, self._folder, self._settings = models, inputs, mode, folder, settings

    def run(self, batches: Iterable[Any], metric: Metric | None, task: str, title: str) -> Document:
        given = self._settings.of("featuremap_similarity")
        similarity = SimilarityFunction(given.get("similarity_func", "Cosine"), _WHO)
        threshold, devices = given.get("threshold"), given.get("devices")
        has_formats = any(stage_of(model) in PREPARED for model in self._models)
        checker = QConfigChecker(**self._settings.of("check_qconfig")) if has_formats else None
        with ExitStack() as stack:
            streams = [stack.enter_context(stream) for stream in self._streams()]
            inputs = chain([self._inputs], batches)
            collector = self._collector(inputs, similarity, devices, streams)
            collector.describe(title, self._mode, threshold, task, metric)
            self._structure(collector, checker)

            def write(document: Document) -> None:
                write_similarity(collector.rows, similarity.name, self._folder)
                self._write(document)

            collector.run(write)
        tell_poor(collector.rows, similarity, threshold)
        return collector.document

    def _collector(
        self, inputs: Iterable[Any], similarity: SimilarityFunction, devices: Any, streams: list[StatisticsStream]
    ) -> Collector:
        """What compares the models; the runs by which it pairs their calls are those of the statistics, too."""
        device = self._settings.of("get_raw_features").get("device")
        also = None if device is not None else (streams[0], streams[1])
        collector = Collector(*self._models, inputs, similarity, devices, _WHO, also)
        for stream in streams:
            if device is not None:
                stream.watch(self._inputs, device)
            stream.write()
        return collector

    def _write(self, document: Document) -> None:
        """All forms of the document."""
        write_report(document.to_json(), self._folder, JSON_FILE, _WHO)
        write_report(page_of([document]), self._folder, PAGE_FILE, _WHO)
        write_report(operators_csv(document), self._folder, CSV_FILE, _WHO)
        for name, text in explorer_files(document).items():
            write_report(text, self._folder, name, _WHO)

    def _structure(self, collector: Collector, checker: QConfigChecker | None) -> None:
        """The tools that look at one model, and at weights; one run of the prepared model serves them and the page."""
        recording, counting = collector.recording, self._settings.of("get_module_called_count")
        prints_counts = counting.pop("print_tabulate", False)
        if checker is not None:
            with _noting(collector, "Formats are not checked."):
                checker.check(collector.recorded, self._inputs, recording, self._folder)
        with _noting(collector, "Calls are not counted."):
            counts = called_counts(recording, collector.recorded, self._inputs, **counting)
            table = called_times_table([CalledTimes(*one) for one in counts.items()])
            write_report(f"{table}\n", self._folder, CALLED_FILE, _WHO)
            if prints_counts:
                print(table)
        if stage_of(self._models[0]) == "float":
            with _noting(collector, "Unfused patterns are not known."):
                settings = {"print_tabulate": False, **self._settings.of("check_unfused_operations")}
                found = check_unfused_operations(self._models[0], self._inputs, **settings)
                lines = ["\n".join(names) for names in found] or [ALL_FUSED]
                write_report("\n\n".join(lines) + "\n", self._folder, UNFUSED_FILE, _WHO)
        with _noting(collector, WITHOUT_WEIGHTS):
            compare_weights(*self._models, **self._settings.of("compare_weights"), out_dir=self._folder)

    def _streams(self) -> Iterator[StatisticsStream]:
        """The statistics of both models, in files that are named after their stages."""
        record, show = self._settings.of("get_raw_features"), self._settings.of("profile_featuremap")
        stem = str(show.pop("file_name", None) or STATISTICS)
        record.pop("device", None)
        stages = [stage_of(model) for model in self._models]
        names = stages if stages[0] != stages[1] else [f"{stages[0]}_1", f"{stages[1]}_2"]
        for model, name in zip(self._models, names, strict=True):
            yield StatisticsStream(model, record, {**show, "file_name": f"{stem}_{name}"}, self._folder)


@contextmanager
def _noting(collector: Collector, what: str) -> Iterator[None]:
    """What a tool cannot do is said on the page, and the others go on."""
    try:
        yield
    except CheckError as error:
        collector.add_note(f"{what} {error}")


def _require_mode(mode: str, model1: nn.Module, model2: nn.Module) -> None:
    if mode not in MODES:
        raise QuantizationConfigError(f"{_WHO}: mode is one of {', '.join(MODES)}; got {mode!r}.")
    first, second = stage_of(model1), stage_of(model2)
    wanted = MODES[mode]
    if first in wanted[0] and second in wanted[1]:
        return
    fitting = [name for name, (one, other, _) in MODES.items() if first in one and second in other]
    swapped = [name for name, (one, other, _) in MODES.items() if second in one and first in other]
    if fitting:
        advice = f"Give mode={fitting[0]!r}."
    elif swapped:
        advice = f"Give them in the other order, with mode={swapped[0]!r}."
    elif first == second:
        advice = (
            "Was one of them made of the other in place? Keep `copy.deepcopy(model)` from before preparation and "
            "conversion, and give that."
        )
    else:
        advice = f"Give two stages of one model: {', '.join(f'{name} {text}' for name, (*_, text) in MODES.items())}."
    raise QuantizationConfigError(
        f"{_WHO}: mode {mode!r} takes {wanted[2]}; these are a {first} model and a {second} one. {advice}"
    )


def _metric(given: GivenMetric, models: tuple[nn.Module, nn.Module]) -> Metric | None:
    if given is None or isinstance(given, Metric):
        return given
    if callable(given):
        found = []
        for model in models:
            with undisturbed_evaluation(model):
                found.append(float(given(model)))
        return Metric(getattr(given, "__name__", type(given).__name__), found[0], found[1])
    if isinstance(given, tuple) and len(given) == 3 and isinstance(given[0], str):
        return Metric(given[0], float(given[1]), float(given[2]))
    raise TypeError(
        f"{_WHO}: metric is (name, number of model1, number of model2), a Metric, or a function of a model that gives "
        f"a number; got {given!r}."
    )


show_at("utils.quant_profiler", model_profiler)
