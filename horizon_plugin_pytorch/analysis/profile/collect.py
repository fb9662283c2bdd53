"""Two models compared in one streamed run: the document that the page, the tables and the advice are made of."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch._version import __version__
from horizon_plugin_pytorch.analysis.calls import Recording, record_calls
from horizon_plugin_pytorch.analysis.comparison import ComparedCall, Comparison, Devices, parts_of, unexpected
from horizon_plugin_pytorch.analysis.profile.advice.rules import advise
from horizon_plugin_pytorch.analysis.profile.document import Document, Message, Metric, ModelCall, Operator, Weight
from horizon_plugin_pytorch.analysis.profile.running_values import RunningValues
from horizon_plugin_pytorch.analysis.profile.stages import PREPARED, stage_of
from horizon_plugin_pytorch.analysis.profile.tasks import task_of
from horizon_plugin_pytorch.analysis.rows import CalledTimes, messages
from horizon_plugin_pytorch.analysis.similarity import SimilarityRow
from horizon_plugin_pytorch.analysis.similarity_function import (
    RunningSimilarity,
    SimilarityFunction,
    largest_difference,
)
from horizon_plugin_pytorch.analysis.unfused import unfused_patterns
from horizon_plugin_pytorch.analysis.weights import PairedWeight, paired_weights
from horizon_plugin_pytorch.config.choice import reason_of
from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.errors import CheckError, QuantizationWarning, listed, warn
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.notes import note_of
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.statistics.metrics import SQNR
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.watch import Consumer

BINS, FEWER_BINS, MANY_OPERATORS = 128, 32, 1500
_ROUNDING = 0.51  # of a step
WITHOUT_WEIGHTS = "Weights are not compared."
_SECONDS = 20.0  # between two writings of what there is so far


def collect(
    model1: nn.Module,
    model2: nn.Module,
    batches: Iterable[Any],
    mode: str = "FvsQ",
    similarity_func: str | Callable[[Tensor, Tensor], Any] = "Cosine",
    threshold: float | None = None,
    devices: Devices = None,
    title: str = "",
    task: str = "",
    metric: Metric | None = None,
    write: Callable[[Document], Any] | None = None,
    who: str = "model_profiler",
) -> Document:
    """Run two models in step and write down what each operator does in both.

    Each pair of results is let go when it has been looked at, and numbers are added up over the batches: memory is that
    of two forwards, however many batches there are.

    Args:
        model1, model2: of two stages, the better one first; they are not changed.
        batches: the inputs of each run, as `prepare` takes them.
        mode: what is compared: ``FvsQ``, ``QvsQ``, ``CvsQ``.
        similarity_func, threshold, devices: as of `featuremap_similarity`.
        title: what the page is called; the name of the model's class if it is empty.
        task: whose thresholds judge the errors.
        metric: the task's metric of both models.
        write: is given the document now and then, and at the end, also if an error or an interrupt is the end; until
            all has run its `is_complete` is False.
        who: the tool that was asked, for messages.

    Raises:
        CheckError: both are one model, they have nothing in common, one of them fails on these inputs, or makes other
            calls on a further batch.
        QuantizationConfigError: there is no such task.

    >>> import copy
    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.BAYES)
    >>> net = QuantWrapper(nn.ReLU()).eval()
    >>> qat = prepare_qat_fx(copy.deepcopy(net), {"": get_default_qconfig()}).eval()
    >>> found = collect(net, qat, [torch.linspace(-1, 1, 8)])
    >>> [(operator.name, operator.format, operator.inputs) for operator in found.operators]
    [('quant', 'qint8', ()), ('module', 'qint8', (0,)), ('dequant', 'torch.float32', (1,))]
    """
    similarity = SimilarityFunction(similarity_func, who)
    task_of(task)  # before anything runs
    collector = Collector(model1, model2, batches, similarity, devices, who)
    collector.describe(title, mode, threshold, task, metric)
    collector.run(write)
    return collector.document


class Collector:
    """Makes a document of two models, batch by batch.

    Args:
        batches: the inputs of each run; the first is taken at once, to pair the calls.
        also: is told of each call of either model on the first batch.

    Attributes:
        about: the parts of the document that are not measured.
        recorded: the model that tells of structure and formats: the prepared one, the later if both are; the first
            if none is.
    """

    def __init__(
        self,
        model1: nn.Module,
        model2: nn.Module,
        batches: Iterable[Any],
        similarity: SimilarityFunction,
        devices: Devices,
        who: str,
        also: tuple[Consumer, Consumer] | None = None,
    ) -> None:
        self._models, self._similarity, self._who = (model1, model2), similarity, who
        self._batches = iter(batches)
        try:
            self._inputs = next(self._batches)
        except StopIteration:
            raise CheckError(f"{who}: there is no batch of inputs to run the models on.") from None
        self._comparison = Comparison(model1, model2, self._inputs, devices, who, also)
        pairs = self._comparison.pairing.pairs
        self._position = {other.index: number for number, (_, other) in enumerate(pairs)}
        self._bins = BINS if len(pairs) <= MANY_OPERATORS else FEWER_BINS
        self._operators: list[_RunningOperator | None] = [None] * len(pairs)
        self._digest = hashlib.blake2b(digest_size=12)
        self.recorded = next((m for m in (model2, model1) if stage_of(m) in PREPARED), model1)
        march = note_of(model2, "march") or note_of(model1, "march")
        self.about = Document(
            type(model1).__name__,
            "",
            stage_of(model1),
            stage_of(model2),
            march=march.value if isinstance(march, March) else "",
            package_version=__version__,
            similarity_function=similarity.name,
            is_complete=False,
            returned=tuple(sorted(self._operators_of(self._comparison.logs[1].returned))),
            first_calls=self._calls(0),
            second_calls=self._calls(1),
        )
        if alone := unexpected(self._comparison.pairing):
            self.add_note(f"Calls without a partner in the other model are left out: {listed(map(str, alone))}.")

    def _calls(self, side: int) -> tuple[ModelCall, ...]:
        """All calls of one of the models, each with its operator."""
        pairing = self._comparison.pairing
        numbers = {pair[side].index: number for number, pair in enumerate(pairing.pairs)}
        fused = {pair[1 - side].name: number for number, pair in enumerate(pairing.pairs)}
        for name, members in parts_of((pairing.first_only, pairing.second_only)[side]).items():
            numbers.update({member.index: fused[name] for member in members if name in fused})
        return tuple(
            ModelCall(call.path, "" if call.module is not None else call.operator, call.line, numbers.get(call.index))
            for call in self._comparison.logs[side].calls
        )

    def describe(self, title: str, mode: str, threshold: float | None, task: str, metric: Metric | None) -> None:
        """Say what the document is about; see `collect`."""
        self.about = replace(
            self.about,
            title=title or type(self._models[0]).__name__,
            mode=mode,
            threshold=self._similarity.threshold if threshold is None else threshold,
            task=task,
            metric=metric,
        )

    def add_note(self, note: str) -> None:
        """Say what was left out, and why; once, if it is said again."""
        self.about = replace(self.about, notes=tuple(dict.fromkeys((*self.about.notes, note))))

    @cached_property
    def recording(self) -> Recording:
        """A run of `recorded` on the first batch."""
        return record_calls(self.recorded, self._inputs)

    @property
    def document(self) -> Document:
        """What is known so far."""
        operators = tuple(one.operator() for one in self._operators if one is not None)
        return replace(self.about, operators=operators, inputs=self._digest.hexdigest() if self.about.batches else "")

    @property
    def rows(self) -> list[SimilarityRow]:
        """What is known so far, as `featuremap_similarity` has it."""
        return [one.row() for one in self._operators if one is not None]

    def run(self, write: Callable[[Document], Any] | None = None) -> None:
        """Run all batches, then look at weights and formats."""
        write = write or (lambda document: None)
        written = time.monotonic()

        def consume(call: ComparedCall) -> None:
            nonlocal written
            self._consume(call)
            if time.monotonic() - written > _SECONDS:
                write(self.document)
                written = time.monotonic()

        try:
            self._comparison.run(consume)
            self._count_batch(self._inputs)
            self._add_structure()
            for batch in self._batches:
                self._comparison.run_on(batch, consume)
                self._count_batch(batch)
            self._comparison.tell_not_comparable()
            self._tell_doubts()
            self._add_advice()
            self.about = replace(self.about, is_complete=True)
        finally:  # what is known when an error or an interrupt ends it, too
            write(self.document)

    def _tell_doubts(self) -> None:
        """Say what looks as if the two models were not stages of one, or did not see the same."""
        doubts = []
        others = [w.name for w in self.about.weights if w.scale and (w.atol or 0.0) > _ROUNDING * w.scale]
        if others and self.about.second == "quantized" and self.about.first in PREPARED:
            doubts.append(
                f"{listed(others)} differ by more than rounding: the quantized model was not made of this QAT model as "
                "it is now. Convert a copy of it again."
            )
        stubs = [one.about.name for one in self._operators if one is not None and one.has_other_inputs]
        if stubs:
            doubts.append(
                f"{listed(stubs)} got other numbers in the two models, on the same inputs, so errors behind it mean "
                "little. Does the forward draw random numbers, count its calls, or write to its inputs?"
            )
        for doubt in doubts:
            self._warn(doubt)

    def _warn(self, text: str) -> None:
        warn(f"{self._who}: {text}", QuantizationWarning)
        self.add_note(text)

    def _add_advice(self) -> None:
        def failed(rule: str, error: Exception) -> None:  # a long run is not lost for it
            self._warn(
                f"the rule `{rule}` failed, so advice may be missing. This is a defect of the package; please report "
                f"it: {type(error).__name__}: {error}"
            )

        found = advise(self.document, *self._comparison.models, [self._comparison.first_inputs], failed)
        self.about = replace(self.about, advice=tuple(found))

    def _count_batch(self, batch: Any) -> None:
        for x in tensors_of(batch):
            real = (x.as_real() if isinstance(x, QTensor) else x).detach().cpu().contiguous()
            self._digest.update(str(tuple(real.shape)).encode())
            self._digest.update(real.flatten().view(torch.uint8).numpy().tobytes() if real.numel() else b"")
        self.about = replace(self.about, batches=self.about.batches + 1)

    def _consume(self, call: ComparedCall) -> None:
        number = self._position[call.other.index]
        found = self._operators[number]
        if found is None:
            about = self._about(number, call)
            found = self._operators[number] = _RunningOperator(about, call, self._similarity, self._bins)
        found.update(call)

    def _about(self, number: int, call: ComparedCall) -> Operator:
        """What is known of an operator without its numbers."""
        one, other = call.one, call.other
        with_scale = next((x for x in map(_with_scale, (other, one)) if x is not None), None)
        scale = None if with_scale is None or with_scale.dtype == qbool else with_scale.scale
        return Operator(
            number,
            call.name,
            other.path,
            other.operator if other.module is None else type(other.module).__name__,
            line=other.line or one.line,
            inputs=tuple(sorted(self._operators_of(self._comparison.logs[1].producers[other.index]))),
            shape=tuple(other.outputs[0].shape) if other.outputs else (),
            format=_format(other),
            input_formats=tuple(str(x.dtype) for x in other.inputs),
            reason=next((r for m, c in zip(self._models[::-1], (other, one), strict=True) if (r := _reason(m, c))), ""),
            scale=None if scale is None else float(scale.max()),
            scale_low=None if scale is None else float(scale.min()),
            grid=None if scale is None or with_scale is None else _ends(with_scale.dtype, float(scale.max())),
            operator=other.operator,
        )

    def _operators_of(self, calls: Iterable[int | None]) -> set[int]:
        """The operators behind calls of the second model: those before them, where they are no operators here."""
        producers, found, seen = self._comparison.logs[1].producers, set(), set()
        waiting = [call for call in calls if call is not None]
        while waiting:
            call = waiting.pop()
            if call in seen:
                continue
            seen.add(call)
            if call in self._position:
                found.add(self._position[call])
            else:
                waiting += [p for p in producers[call] if p is not None]
        return found

    def _add_structure(self) -> None:
        """Weights, and what one run of the prepared model tells: counts of calls, patterns, formats."""
        first_use: dict[str, int] = {}
        for number, one in enumerate(self._operators):
            if one is not None:
                first_use.setdefault(one.about.path, number)
        weights = []
        try:
            for pair in paired_weights(*self._models, tells=False):
                weights.append(self._weight(pair, _user_of(pair.path, first_use)))
        except CheckError as error:
            self.add_note(f"{WITHOUT_WEIGHTS} {error}")
        self.about = replace(self.about, weights=tuple(weights))
        recording = self.recording
        if recording.failure is not None:
            self.add_note(f"Calls are not counted, nor formats checked: {recording.failure}")
            return
        self.about = replace(
            self.about,
            called=tuple(CalledTimes(name, count) for name, count in recording.counts.items()),
            unfused=tuple(tuple(member.name for member in members) for members in unfused_patterns(recording)),
            messages=_messages(recording) if stage_of(self.recorded) in PREPARED else (),
        )

    def _weight(self, pair: PairedWeight, operator: int | None) -> Weight:
        similarity = RunningSimilarity(self._similarity)
        similarity.update(pair.first, pair.second)
        values = RunningValues(self._bins), RunningValues(self._bins)
        scale, format = _weight_scale(pair.module)
        step = float(scale) if scale is not None and scale.numel() == 1 and pair.is_rounded else None
        values[0].update(pair.first, has_channels=False)
        values[1].update(pair.second, step, has_channels=False)
        return Weight(
            pair.name,
            operator,
            format or str(pair.second.dtype),
            similarity.result(),
            largest_difference(pair.first, pair.second),
            None if scale is None else float(scale.max()),
            None if scale is None else float(scale.min()),
            values[0].values(),
            values[1].values(),
        )


class _RunningOperator:
    """An operator over all batches."""

    def __init__(self, about: Operator, call: ComparedCall, similarity: SimilarityFunction, bins: int) -> None:
        self.about = about
        self._type, self._scale = call.type, call.scale
        self._similarity, self._sqnr = RunningSimilarity(similarity), SQNR()
        self._values = RunningValues(bins), RunningValues(bins)
        self._count = self._saturated = self._at_end = 0
        row = call.other.row
        self._is_stub = row is not None and row.is_quant
        self._errors: dict[str, float | None] = {}

    def update(self, call: ComparedCall) -> None:
        """Count another call."""
        self._similarity.update(call.first, call.second)
        self._sqnr.update(call.second, call.first)
        for name in ("atol", "error", "same_input_error"):
            self._errors[name] = _larger(self._errors.get(name), getattr(call, name))
        is_one = len(call.other.outputs) == 1
        for values, x, one in zip(self._values, (call.first, call.second), (call.one, call.other), strict=True):
            q = _with_scale(one)
            is_on_grid = is_one and q is not None and q.is_rounded and q.scale.numel() == 1 and q.dtype != qbool
            values.update(x, float(q.scale) if is_on_grid and q is not None else None, has_channels=is_one)
        q = _with_scale(call.other)
        if is_one and q is not None and q.is_rounded and q.dtype != qbool:
            self._count_ends(call.first, call.second, q)

    def _count_ends(self, first: Tensor, second: Tensor, q: QTensor) -> None:
        self._count += first.numel()
        scale = q.scale.detach().to(second.device)
        if scale.numel() > 1:
            shape = [1] * second.dim()
            shape[q.per_channel_axis] = -1
            scale = scale.reshape(shape)
        low, high = (q.dtype.min + 0.5) * scale, (q.dtype.max - 0.5) * scale
        for is_there, is_beyond in (
            (second <= low, lambda: first < low - scale),
            (second >= high, lambda: first > high + scale),
        ):
            count = int(is_there.sum())
            if count:
                self._at_end += count
                self._saturated += int((is_there & is_beyond()).sum())

    def operator(self) -> Operator:
        """What is known so far."""
        return replace(
            self.about,
            saturation=self._saturated / self._count if self._count else None,
            at_end=self._at_end / self._count if self._count else None,
            similarity=self._similarity.result(),
            sqnr=self._sqnr.result(),
            first=self._values[0].values(),
            second=self._values[1].values(),
            atol=self._errors["atol"],
            error=self._errors["error"],
            same_input_error=self._errors["same_input_error"],
        )

    @property
    def has_other_inputs(self) -> bool:
        """Is this a stub that rounds as it should, and whose results differ by more than that?"""
        error, alone = self._errors["error"], self._errors["same_input_error"]
        return self._is_stub and error is not None and alone is not None and error > alone + 1

    def row(self) -> SimilarityRow:
        """The same as `featuremap_similarity` has it."""
        errors = self._errors
        return SimilarityRow(
            self.about.index, self.about.name, self._type, self._similarity.result(), self._scale,
            errors["atol"] or 0.0, errors["error"], errors["same_input_error"],
        )  # fmt: skip


def _user_of(path: str, first_use: dict[str, int]) -> int | None:
    """The first operator at a path, or the operator that the path is a part of, as a layer inside of attention is."""
    while path and path not in first_use:
        path = path.rpartition(".")[0]
    return first_use.get(path)


def _larger(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)


def _with_scale(call: OperatorCall) -> QTensor | None:
    return next((x for x in call.outputs if isinstance(x, QTensor)), None)


def _ends(dtype: Any, scale: float) -> tuple[float, float]:
    return dtype.min * scale, dtype.max * scale


def _format(call: OperatorCall) -> str:
    """The format of a result; float16 also where a cast only stands for it."""
    if not call.outputs:
        return ""
    cast = getattr(call.module, "activation_post_process", None)
    text = str(call.outputs[0].dtype)
    return str(cast.dtype) if isinstance(cast, FakeCast) and text == "torch.float32" else text


def _reason(model: nn.Module, call: OperatorCall) -> str:
    return reason_of(model, call.path) if call.module is not None else ""


def _messages(recording: Recording) -> tuple[Message, ...]:
    return tuple(Message(row.name, row.type.__name__, row.text, row.remedy) for row in messages(recording))


def _weight_scale(module: nn.Module) -> tuple[Tensor | None, str]:
    """Scale and format of a layer's weight; None and nothing where it has none."""
    quantizer = getattr(module, "weight_fake_quant", None)
    if isinstance(module, QATModule) and isinstance(quantizer, FakeQuantize):
        return quantizer.scale.detach(), str(quantizer.dtype)
    scale = getattr(module, "weight_scale", None)
    return (scale.detach(), str(getattr(module, "weight_dtype", ""))) if isinstance(scale, Tensor) else (None, "")
