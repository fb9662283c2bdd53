"""The inputs on which two models differ most."""

from __future__ import annotations

import io
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from tqdm import tqdm

from horizon_plugin_pytorch.analysis.html_page import Curve, chart, page
from horizon_plugin_pytorch.analysis.output import write_report
from horizon_plugin_pytorch.analysis.quant_analysis.outputs import OutputMetric, compared, kept, named_outputs
from horizon_plugin_pytorch.analysis.quant_analysis.selections import Selections
from horizon_plugin_pytorch.analysis.quant_analysis.subjects import Subject
from horizon_plugin_pytorch.calibration.batches import length_of, require_batches
from horizon_plugin_pytorch.errors import CheckError, QuantizationWarning, listed, require_whole, warn
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.nested import map_tensors
from horizon_plugin_pytorch.tables import Table

TEXT_FILE, STATE_FILE, PAGE_FILE = "badcase.txt", "all_badcase_info.pt", "badcase_report.html"
_SECONDS = 60.0  # between two writings of what there is so far
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
PostProcess = Callable[[Any], Any] | None


@dataclass
class BadCases:
    """The worst batches by each metric and output.

    Args:
        metrics: their names.
        worst: by output and metric the worst batches, the worst first: index and value.
        overall: by metric the batch of the worst output.
        inputs: the batches that are named, by their index.
        history: by output and metric the value of each batch that was compared.
        is_complete: did the search come to its end?
    """

    metrics: list[str]
    worst: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)
    overall: dict[str, int] = field(default_factory=dict)
    inputs: dict[int, Any] = field(default_factory=dict)
    history: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    is_complete: bool = True

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs that were compared."""
        return list(self.worst)

    def case(self, metric: str, output: str | None = None) -> int:
        """The index of the worst batch, of one output or of the worst one."""
        if output is None:
            return self.overall[metric] if metric in self.overall else next(iter(self.inputs))
        found = self.worst.get(output, {}).get(metric)
        return found[0][0] if found else self.case(metric)

    def text(self) -> str:
        """The three tables."""
        indices = [[name, *(_cell(of.get(m), 0) for m in self.metrics)] for name, of in self.worst.items()]
        values = [[name, *(_cell(of.get(m), 1) for m in self.metrics)] for name, of in self.worst.items()]
        overall = [[metric, self.overall.get(metric, "")] for metric in self.metrics]
        header = ["Name/Index", *self.metrics]
        parts = [
            ("The bad case input index of each output:", Table(header, indices)),
            ("The metric results of each badcase:", Table(header, values)),
            ("The bad case input index of the worst output:", Table(["metric", "dataloader index"], overall)),
        ]
        end = "" if self.is_complete else "The search did not come to its end; these are the batches before.\n"
        return "\n".join(f"{title}\n{table.text(aligns_numbers=True)}\n" for title, table in parts) + end

    def write(self, folder: str, who: str) -> None:
        """Write tables, page and the state that `load` reads."""
        write_report(self.text(), folder, TEXT_FILE, who)
        parts = [f"<pre>{_escaped(self.text())}</pre>"]
        for metric in self.metrics:
            curves = []
            for name, of in self.history.items():
                steps = of.get(metric, {})
                labels = [f"{name}, batch {step}: {value:.7g}" for step, value in steps.items()]
                curves.append(Curve(name, list(steps.values()), labels, list(steps)))
            parts += [f"<h2>{_escaped(metric)}</h2>", chart(curves, "batch")]
        write_report(page("Bad cases", *parts), folder, PAGE_FILE, who)
        state = {
            "metrics": self.metrics,
            "worst": self.worst,
            "overall": self.overall,
            "history": self.history,
            "is_complete": self.is_complete,
            "inputs": map_tensors(lambda x: x.detach().cpu().clone(), self.inputs),
        }
        buffer = io.BytesIO()
        try:
            torch.save(state, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            warn(
                f"{who}: the bad cases hold what cannot be read back without running code ({_short(error)}), so "
                f"{STATE_FILE} is not written, and `load_bad_case` cannot take them up. Let the loader give tensors, "
                "numbers and strings in tuples, lists and dictionaries.",
                QuantizationWarning,
            )
            return
        write_atomically(buffer.getvalue(), os.path.join(folder, STATE_FILE))

    @classmethod
    def load(cls, path: str | os.PathLike, who: str) -> BadCases:
        """What `write` wrote.

        Raises:
            CheckError: it cannot be read.
        """
        try:
            state = torch.load(path, weights_only=True)
            return cls(**{**state, "inputs": dict(state["inputs"])})
        except FileNotFoundError:
            raise CheckError(f"{who}: there is no `{os.fspath(path)}`; `auto_find_bad_case` writes it.") from None
        except Exception as error:
            raise CheckError(
                f"{who}: `{os.fspath(path)}` is not what `auto_find_bad_case` writes: {_short(error)}."
            ) from error


class Search:
    """Runs two subjects on batch after batch.

    Args:
        post_process: is applied to what each of them gives.
        topk: how many batches to keep for each output and metric.
    """

    def __init__(
        self,
        baseline: Subject,
        analysis: Subject,
        metrics: Sequence[OutputMetric],
        post_process: PostProcess,
        topk: int,
        who: str,
    ) -> None:
        require_whole(who, "topk", topk, 1)
        self._subjects, self._metrics, self._post_process = (baseline, analysis), metrics, post_process
        self._topk, self._who = topk, who
        self._refused: dict[tuple[str, str], list[int]] = {}
        self._not_numbers: dict[tuple[str, str], list[int]] = {}
        self._unlike: dict[str, list[int]] = {}
        self.found = BadCases([metric.name for metric in metrics], is_complete=False)

    def run(self, batches: Iterable[Any], count: int | None, write: Callable[[BadCases], Any]) -> BadCases:
        """Look at the first batches, or at all.

        Args:
            write: is given what was found, also if an error or an interrupt is the end.

        Raises:
            CheckError: a model or a function fails on a batch, or nothing can be compared.
        """
        require_batches(batches, self._who, "dataloader")
        if count is not None:
            require_whole(self._who, "num_steps", count, 1)
        self._tell_shuffled(batches)
        total = min((n for n in (count, length_of(batches)) if n is not None), default=None)
        steps = 0
        try:
            with self._subjects[0].quiet(), self._subjects[1].quiet():
                given = self._given(itertools.islice(batches, count))
                bar = tqdm(given, total=total, desc=self._who, disable=None)
                written = time.monotonic()
                for step, batch in enumerate(bar):
                    self._look_at(step, batch)
                    steps = step + 1
                    if time.monotonic() - written > _SECONDS and self.found.worst:
                        write(self.found)
                        written = time.monotonic()
            self.found.is_complete = True
        finally:
            if self.found.worst:
                write(self.found)
        self._tell(steps, count)
        return self.found

    def _given(self, batches: Iterable[Any]) -> Iterator[Any]:
        """What the loader gives; an error of its own says at which batch."""
        count = 0
        try:
            for batch in batches:
                count += 1
                yield batch
        except Exception as error:
            raise CheckError(f"{self._who}: the data loader failed at batch {count}: {_short(error)}.") from error

    def _look_at(self, step: int, batch: Any) -> None:
        wanted, found = self._outputs(step, batch)
        pairs = compared(wanted, found, lambda name, why: self._refused.setdefault((name, why), []).append(step))
        for name, (one, other) in pairs.items():
            for metric in self._metrics:
                try:
                    value = metric(one, other)
                except CheckError as error:
                    raise CheckError(f"{str(error).rstrip('.')}; at output {name} of batch {step}.") from error
                self.found.history.setdefault(name, {}).setdefault(metric.name, {})[step] = value
                if math.isnan(value):
                    self._not_numbers.setdefault((metric.name, name), []).append(step)
                self._keep(step, batch, name, metric, value)

    def _keep(self, step: int, batch: Any, name: str, metric: OutputMetric, value: float) -> None:
        if math.isnan(value) and metric.is_own:
            self.found.worst.setdefault(name, {}).setdefault(metric.name, [])
            return
        cases = self.found.worst.setdefault(name, {}).setdefault(metric.name, [])
        cases.append((step, value))
        cases.sort(key=lambda case: -metric.badness(case[1]))
        del cases[self._topk :]
        firsts = [of[metric.name][0] for of in self.found.worst.values() if of.get(metric.name)]
        self.found.overall[metric.name] = max(firsts, key=lambda case: metric.badness(case[1]))[0]
        if step not in self.found.inputs:
            self.found.inputs[step] = map_tensors(lambda x: x.detach().clone(), batch)
        used = {case[0] for of in self.found.worst.values() for cases in of.values() for case in cases}
        for index in self.found.inputs.keys() - used:
            del self.found.inputs[index]

    def _outputs(self, step: int, batch: Any) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        outputs, selections = [], Selections()
        for subject, selecting in zip(self._subjects, (selections.noting, selections.taking), strict=True):
            with torch.no_grad(), selecting():
                outputs.append(self._output(step, batch, subject))
        if selections.unlike:
            self._unlike.setdefault(selections.unlike, []).append(step)
        return outputs[0], outputs[1]

    def _output(self, step: int, batch: Any, subject: Subject) -> Mapping[str, Tensor]:
        what = subject.name
        try:
            out = subject.run(batch)
            if self._post_process is not None:
                what = f"post_process, on what {subject.name} gives,"
                out = self._post_process(out)
        except Exception as error:
            raise CheckError(f"{self._who}: {what} failed at batch {step}: {_short(error)}.") from error
        return kept(named_outputs(out))

    def _tell_shuffled(self, batches: Any) -> None:
        inner = getattr(getattr(batches, "batch_sampler", None), "sampler", None)
        if isinstance(batches, DataLoader) and any(isinstance(one, _SHUFFLING) for one in (batches.sampler, inner)):
            warn(
                f"{self._who}: the data loader shuffles, so the indices of {TEXT_FILE} are those of this run only; the "
                f"bad cases themselves are kept in {STATE_FILE}. Give shuffle=False, or a generator with a seed.",
                QuantizationWarning,
            )

    def _tell(self, steps: int, count: int | None) -> None:
        if not steps:
            raise CheckError(f"{self._who}: the data loader gave no batch; a generator can be used only once.")
        refused = [f"{name} ({why}; {_batches(at)})" for (name, why), at in self._refused.items()]
        if not self.found.worst:
            raise CheckError(
                f"{self._who}: no output of the two models can be compared: {listed(refused) or 'they give no tensor'}."
                " Remove what makes the number of results depend on their values, such as NMS, or give a post_process "
                "that takes the outputs before it."
            )
        if refused:
            warn(f"{self._who}: outputs are left out: {listed(refused)}.", QuantizationWarning)
        if count is not None and steps < count:
            warn(
                f"{self._who}: the data loader ended after {steps} of {count} batches; the bad cases are of these.",
                QuantizationWarning,
            )
        own = {metric.name for metric in self._metrics if metric.is_own}
        for (metric, name), at in self._not_numbers.items():
            what = "does not count" if metric in own else "counts as the worst: one of the models gives NaN or infinity"
            warn(
                f"{self._who}: {metric} of output {name} is not a number ({_batches(at)}), which {what}.",
                QuantizationWarning,
            )
        for why, at in self._unlike.items():
            warn(
                f"{self._who}: {why}, so selections of the analysed model are its own from there on "
                f"({_batches(at)}). Outputs behind them may not be comparable.",
                QuantizationWarning,
            )


def _cell(cases: Sequence[tuple[int, float]] | None, item: int) -> Any:
    """A number; where several batches were asked for, all of them, the worst first."""
    if not cases or len(cases) == 1:
        return "" if not cases else cases[0][item]
    return ", ".join(f"{case[item]:g}" for case in cases)


def _batches(steps: Sequence[int]) -> str:
    return f"batch {listed(map(str, dict.fromkeys(steps)))}"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().rstrip('.')}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
