"""Calibration as one call: it stops when the scales have settled, and goes on where it was interrupted."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_pytorch.calibration.batches import (
    length_of,
    no_batches,
    place_of,
    require_batches,
    require_quantizers,
    run_batch,
    split_unseen,
    undone_after_an_error,
    unseen_lines,
)
from horizon_plugin_pytorch.calibration.fingerprint import describe, digest
from horizon_plugin_pytorch.calibration.state import StateFile
from horizon_plugin_pytorch.errors import (
    CalibrationError,
    CalibrationWarning,
    OperatorInputError,
    QuantizationConfigError,
    listed,
    require_module,
    require_whole,
)
from horizon_plugin_pytorch.fake_quant.dynamic import DynamicFakeQuantize
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize
from horizon_plugin_pytorch.passes.late_modules import has_unmet_code, meeting_calls
from horizon_plugin_pytorch.passes.swap import is_inside, paths_left_float
from horizon_plugin_pytorch.passes.unmet import has_code
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.statistics.clipping import tell_clipped
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase
from horizon_plugin_pytorch.statistics.processes import all_reduce, is_distributed, rank, require_same
from horizon_plugin_pytorch.tables import Table

_UNEVEN = 1.25  # a range over the one that was taken

Forward = Callable[[nn.Module, Any], Any]


@dataclass
class CalibrationResult:
    """What `calibrate` did; printing it gives a table of the scales.

    Args:
        steps: batches that were run, those of an interrupted run included.
        has_settled: did it stop because the scales no longer moved?
        ending: why it stopped, in words.
        scales: scale of each quantized tensor, by its module's path.
        unseen: modules that no batch of this run reached with finite values.
        left_float: modules that only real numbers reached, in code that tracing does not enter: they need no scale.
        uneven: tensors whose range in some batch was more than 1.25 times the one that was taken, the mean of the
            batches; with how many times.
    """

    steps: int = 0
    has_settled: bool = False
    ending: str = "all data were run"
    scales: dict[str, Tensor] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    left_float: list[str] = field(default_factory=list)
    uneven: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [[name, f"{float(s.min()):.6g}", f"{float(s.max()):.6g}", s.numel()] for name, s in self.scales.items()]
        table = Table(["tensor", "smallest scale", "largest scale", "scales"], rows).text()
        lines = [table, f"{self.steps} batches; {self.ending}.", *unseen_lines(self.unseen, self.left_float)]
        if self.uneven:
            worst = sorted(self.uneven, key=self.uneven.__getitem__, reverse=True)
            shown = listed((f"{name} {self.uneven[name]:.1f} times" for name in worst), most=5)
            lines.append(
                f"A batch needed a wider range than the mean of all, which was taken: {shown}. If "
                "clipping it hurts: larger batches, the observer histogram, or `auto_calibrate`."
            )
        return "\n".join(lines)


@torch.no_grad()
def calibrate(
    model: nn.Module,
    data: Iterable[Any],
    *,
    forward: Forward = run_batch,
    steps: int | None = None,
    tolerance: float = 0.002,
    patience: int = 8,
    state_file: str | os.PathLike | None = None,
    save_interval: int = 20,
    progress: bool = True,
) -> CalibrationResult:
    """Calibrate a prepared model: run data through it until the scales have settled.

    Every batch counts the same, whatever `averaging_constant` the observers have (0 still freezes a scale), and all
    calls of a module in a batch count together. What an earlier calibration has seen does not count, but a module that
    no batch reaches now keeps its scale. Under
    ``torch.distributed``, call it in every process with that process's share of the data: the processes stay in step
    and end with the same scales. The model is left in eval mode and in the VALIDATION state.

    Args:
        model: from `prepare`, `prepare_qat_fx` or `prepare_qat`.
        data: batches; a `DataLoader`, a list, a generator.
        forward: how to run the model on a batch.
        steps: at most so many batches.
        tolerance: scales have settled when none has moved by more than this share ...
        patience: ... over so many batches, and every module was reached; 0 runs all data.
        state_file: written every `save_interval` batches and at the end of an interrupted run; if it is there at the
            start, the batches that it has seen are skipped. It is refused if model, weights or these batches are not
            those of that run. It is removed at the end. Of several processes the first reads and writes it.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.NASH_E)
    >>> net = prepare_qat_fx(QuantWrapper(nn.Conv2d(1, 2, 1)), {"": get_default_qconfig()})
    >>> calibrate(net, [torch.ones(1, 1, 4, 4) * i for i in (1, 2, 3)]).steps
    3
    """
    require_module(model, "calibrate")
    _check(data, steps, tolerance, patience, save_interval)
    if has_unmet_code(model):
        data = _rehearsed(forward, model, data)
    if _needs_no_scales(model):
        model.eval()
        set_fake_quantize(model, FakeQuantState.VALIDATION)
        return CalibrationResult(ending="no operator has a scale to calibrate")
    quantizers = require_quantizers(model, "calibrate")
    device = next(iter(quantizers.values())).scale.device
    description = describe(model) if state_file is not None or is_distributed() else {}
    if is_distributed():
        wanted = {"steps": steps, "tolerance": tolerance, "patience": patience, "a state_file": state_file is not None}
        require_same({**{k: str(v) for k, v in wanted.items()}, **description}, "calibrate", device)
    file = StateFile(state_file, quantizers, description, device)
    file.read(steps)
    result, watch = CalibrationResult(), _Settling(quantizers, tolerance, patience)
    batches = _Batches(data, file, device)
    with ExitStack() as observing:
        with undone_after_an_error(model):  # such as a file that does not fit
            model.eval()
            set_fake_quantize(model, FakeQuantState.CALIBRATION)
            begin = observing.enter_context(_equal_weights(quantizers))
            watch.past = file.begin()
        result.steps = file.steps
        with file.kept_after_an_error():
            for batch in batches.in_step(result, steps, progress):
                _run(forward, model, batch, result.steps, quantizers, device, begin)
                result.steps += 1
                watch.follow(_awaited(model, quantizers))
                result.has_settled = watch.have_settled()
                if result.has_settled:
                    result.ending = "the scales have settled"
                    break
                file.add(batches.digests, watch.past, save_interval)
        if result.steps == 0:
            raise no_batches("calibrate")
        set_fake_quantize(model, FakeQuantState.VALIDATION)  # observers take in what they still wait with
        is_seen = {name: _has_seen(quantizer) for name, quantizer in quantizers.items()}
        result.uneven = _uneven(quantizers)
    activations = [seen for name, seen in is_seen.items() if not name.endswith("weight_fake_quant")]
    if activations and not any(activations):
        raise CalibrationError(
            f"calibrate: in {result.steps} batches no finite value reached any activation. Look for NaN or infinity in "
            "the data and in the float model's weights, and whether `forward` runs the model."
        )
    file.remove()
    limits = {place_of(name): q.activation_post_process.clipped_from for name, q in quantizers.items()}
    tell_clipped({name: ratio for name, ratio in result.uneven.items() if ratio > limits[name]}, "calibrate")
    result.scales = {place_of(n): q.scale.detach().clone() for n, q in quantizers.items() if is_seen[n]}
    result.unseen, result.left_float = split_unseen(model, [n for n, seen in is_seen.items() if not seen])
    return result


def _needs_no_scales(model: nn.Module) -> bool:
    """True for a prepared model whose operators all compute in float16, or with scales of the moment."""
    modules = list(model.modules())
    has_scales = any(isinstance(m, FakeQuantize) for m in modules)
    return not has_scales and any(isinstance(m, (FakeCast, DynamicFakeQuantize)) for m in modules)


def _awaited(model: nn.Module, quantizers: Mapping[str, FakeQuantize]) -> dict[str, FakeQuantize]:
    """Those that some batch can still reach: not of modules that are used on real numbers."""
    floats = [path for path, is_used in paths_left_float(model).items() if is_used]
    return {name: quantizer for name, quantizer in quantizers.items() if not is_inside(name, floats)}


def _has_seen(quantizer: FakeQuantize) -> bool:
    """Has it a scale by this run, or one that no run changes?"""
    observer = quantizer.activation_post_process
    learns = observer.learns and observer.averaging_constant and not quantizer.is_fixed
    return observer.has_statistics or (quantizer.has_statistics and not learns)


def _uneven(quantizers: Mapping[str, FakeQuantize]) -> dict[str, float]:
    """The tensors, with one scale, whose widest batch is far from the mean of all; and how far."""
    found = {}
    for name, quantizer in quantizers.items():
        observer = quantizer.activation_post_process
        if observer.widest is not None and observer.widest.numel() == 1 and observer.has_statistics:
            taken = float(torch.maximum(observer.min_val.neg(), observer.max_val))
            ratio = float(observer.widest) / taken if taken > 0 else 1.0
            observer.uneven = ratio
            if ratio > _UNEVEN:
                found[place_of(name)] = ratio
    return found


def _check(data: Any, steps: Any, tolerance: Any, patience: Any, save_interval: Any) -> None:
    """Refuse arguments that make no sense."""
    require_batches(data, "calibrate", "data")
    require_whole("calibrate", "steps", 1 if steps is None else steps, 1)
    require_whole("calibrate", "patience", patience, 0)
    require_whole("calibrate", "save_interval", save_interval, 1)
    if not (isinstance(tolerance, Real) and 0 <= float(tolerance) < math.inf):
        raise QuantizationConfigError(f"calibrate: tolerance must be a share from 0 on, got {tolerance!r}.")


def _run(
    forward: Forward,
    model: nn.Module,
    batch: Any,
    step: int,
    quantizers: dict[str, FakeQuantize],
    device: torch.device,
    begin: Callable[[FakeQuantize], None],
) -> None:
    """Run a batch, and then let the observers take in what they have seen of it, in whatever calls.

    So what was interrupted has not been seen, and several processes share when all have run theirs. What code that
    tracing does not enter calls for the first time gets its observer in this very batch.

    Args:
        begin: begins the calibration of such a one.
    """
    for quantizer in quantizers.values():
        if not quantizer.is_fixed:
            quantizer.activation_post_process.hold()
    failure: Exception | None = None
    try:
        _call(forward, model, batch, step)
    except Exception as error:
        failure = error
    if is_distributed():
        _meet(1, failure, f"the model of process {{}} failed at batch {step}", step, device)
    elif failure is not None:
        raise failure
    if has_code(model):
        found = require_quantizers(model, "calibrate")
        for name in found.keys() - quantizers.keys():
            begin(found[name])
        quantizers.update(found)
    for quantizer in quantizers.values():
        if not quantizer.is_fixed:
            quantizer.release()


class _Again:
    """Data whose first batch has been taken already."""

    def __init__(self, first: list[Any], rest: Iterator[Any], length: int | None) -> None:
        self._batches, self._length = itertools.chain(first, rest), length

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError
        return self._length


def _rehearsed(forward: Forward, model: nn.Module, data: Iterable[Any]) -> Iterable[Any]:
    """Run the first batch without looking at it, so that code which tracing does not enter has its modules."""
    batches = iter(data)
    first = list(itertools.islice(batches, 1))
    if first:
        with meeting_calls(model):
            _call(forward, model, own_tensors(first[0]), 0)
    return _Again(first, batches, length_of(data))


def _call(forward: Forward, model: nn.Module, batch: Any, step: int) -> None:
    try:
        forward(model, batch)
    except (TypeError, AttributeError, OperatorInputError) as error:
        is_whole = isinstance(batch, Mapping) and bool(arguments_of(model, batch)[0])
        if forward is not run_batch or not (is_whole or isinstance(error, TypeError)):
            raise
        keys = ", ".join(map(str, batch)) if is_whole else ""
        how = f"its keys, {keys}, are no parameters of it, and as the only argument: " if is_whole else ""
        raise CalibrationError(
            f"calibrate: batch {step} does not fit the model's forward: {how}{error}. Give `forward=lambda model, "
            "batch: model(...)`, which calls the model as your data need it."
        ) from error


def _meet(value: int, failure: Exception | None, what: str, step: int, device: torch.device) -> list[int]:
    """The values of all processes. One that failed tells the others, which would wait for it, and raises its error.

    Args:
        what: what failed, for the others' message, with a place for the process.
    """
    values = torch.full((dist.get_world_size(),), torch.iinfo(torch.int64).max, device=device)
    values[rank()] = value if failure is None else -1
    try:
        all_reduce(values, dist.ReduceOp.MIN, "calibrate", f" at batch {step}")
    except CalibrationError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    failed = [str(process) for process, has in enumerate(values.tolist()) if has < 0]
    if failed:
        raise CalibrationError(
            f"calibrate: {what.format(', '.join(failed))}; its output has the error. With `state_file` a new run goes "
            "on from here."
        )
    return values.tolist()


class _Batches:
    """The data of a run, from the first batch that it has not seen.

    Args:
        file: what an interrupted run has seen; it refuses other data.
    """

    def __init__(self, data: Iterable[Any], file: StateFile, device: torch.device) -> None:
        self._total, self._iterator = length_of(data), iter(data)
        self._file, self._device = file, device
        self.digests: list[int] = []  # what stands for the last batch, in each process
        failure: Exception | None = None
        try:
            file.skip(self._iterator)
        except Exception as error:
            failure = error
        if is_distributed() and file.steps:
            _meet(1, failure, "the data of process {} are not those of the state_file", 0, device)
        elif failure is not None:
            raise failure

    def in_step(self, result: CalibrationResult, steps: int | None, progress: bool) -> Iterator[Any]:
        """Batches that are not yet run; of several processes, as long as all of them have one."""
        total = self._total
        if steps is not None:
            total = steps if total is None else min(steps, total)
        is_shown = None if progress and rank() == 0 else True  # None: not when the output is no terminal
        with tqdm(total=total, desc="calibrate", disable=is_shown, initial=result.steps) as bar:
            while steps is None or result.steps < steps:
                batch = self._next(result)
                if batch is _END:
                    return
                yield batch
                bar.update()
        result.ending = f"steps={steps} were wanted"

    def _next(self, result: CalibrationResult) -> Any:
        """The next batch if all processes have one."""
        step, batch, number = result.steps, _END, 0
        failure: Exception | None = None
        try:
            batch = next(self._iterator, _END)
            if batch is not _END:
                number = digest(batch) if self._file.is_wanted else 1
        except Exception as error:
            failure = error
        if is_distributed():
            what = f"the data of process {{}} failed at batch {step}"
            self.digests = _meet(number, failure, what, step, self._device)
        elif failure is not None:
            raise failure
        else:
            self.digests = [number]
        if all(self.digests):
            return batch
        if any(self.digests):
            result.ending = "a process had no more data"
        if batch is not _END:
            warnings.warn(
                f"calibrate: process {rank()} has data left after {step} batches, another has none; give every process "
                "the same number.",
                CalibrationWarning,
                stacklevel=5,
            )
        return _END


_END = object()


@contextmanager
def _equal_weights(quantizers: Mapping[str, FakeQuantize]) -> Iterator[Callable[[FakeQuantize], None]]:
    """Every batch counts the same, and nothing that was seen before; processes share what they see.

    What is yielded does so for a quantizer that was made since, and holds what it has seen of its first batch.
    """
    before: list[tuple[ObserverBase, bool, Callable[[], None]]] = []

    def begin(quantizer: FakeQuantize, is_new: bool = True) -> None:
        observer = quantizer.activation_post_process
        before.append((observer, observer.is_sync_quantize, observer.snapshot()))
        if not is_new:
            observer.begin_calibration()
        observer.is_sync_quantize = observer.is_sync_quantize or is_distributed()

    for quantizer in quantizers.values():
        begin(quantizer, is_new=False)
    try:
        yield begin
    finally:
        for observer, was_synced, undo in before:
            if not observer.has_statistics:
                undo()
            observer.batches, observer.is_sync_quantize = None, was_synced
            observer.hold(False)


class _Settling:
    """Have the scales stopped moving? Not as long as there are modules that no batch has reached."""

    def __init__(self, quantizers: Mapping[str, FakeQuantize], tolerance: float, patience: int) -> None:
        self._tolerance, self._wanted_patience = tolerance, patience
        self.past: list[Tensor] = []  # the scales after each of the last batches
        self._count = -1
        self.follow(quantizers)

    def follow(self, quantizers: Mapping[str, FakeQuantize]) -> None:
        """Watch these."""
        if len(quantizers) == self._count:
            return
        self._count, patience = len(quantizers), self._wanted_patience
        self._quantizers = [q for q in quantizers.values() if q.activation_post_process.learns]
        self._patience = patience
        intervals = [getattr(q.activation_post_process, "update_interval", 1) for q in self._quantizers]
        if patience and max(intervals, default=1) > 1:  # between its updates a scale only seems to have settled
            self._patience = max(patience, 2 * max(intervals))

    def have_settled(self) -> bool:
        if not self._patience or not self._quantizers:
            return False
        now = torch.cat([q.scale.detach().reshape(-1) for q in self._quantizers])
        self.past = [*self.past, now][-self._patience - 1 :]
        past = torch.stack([s for s in self.past if s.shape == now.shape])
        if len(past) <= self._patience or not all(map(_has_seen, self._quantizers)):
            return False
        moved = (past.amax(0) - past.amin(0)) / now
        return bool((moved <= self._tolerance).all())
