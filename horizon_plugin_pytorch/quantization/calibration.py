"""Calibration as one call: it stops when the scales have settled, and goes on where it was interrupted."""

from __future__ import annotations

import inspect
import io
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning, QuantizationConfigError
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize, FakeQuantState, set_fake_quantize
from horizon_plugin_pytorch.quantization.processes import all_reduce, is_distributed, rank

_VERSION = 1
Forward = Callable[[nn.Module, Any], Any]
Statistics = dict[str, dict[str, Tensor]]


@dataclass
class CalibrationResult:
    """What `calibrate` did; printing it gives a table of the scales.

    Args:
        steps: batches that were run, those of an interrupted run included.
        has_settled: did it stop because the scales no longer moved?
        scales: scale of each quantized tensor, by its module's path.
        unseen: modules without a scale: no batch reached them.
    """

    steps: int = 0
    has_settled: bool = False
    scales: dict[str, Tensor] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [[name, f"{float(s.min()):.6g}", f"{float(s.max()):.6g}", s.numel()] for name, s in self.scales.items()]
        table = tabulate(rows, headers=["tensor", "smallest scale", "largest scale", "scales"], disable_numparse=True)
        ending = "the scales have settled" if self.has_settled else "all data were run"
        lines = [table, f"{self.steps} batches; {ending}."]
        if self.unseen:
            lines.append(f"No batch reached: {', '.join(self.unseen)}. Their scale stays 1, and convert warns of it.")
        return "\n".join(lines)


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Call a model on what a data loader gives: a tensor, a dict of keyword arguments, or a tuple.

    Of a tuple, such as ``(images, labels)``, as many items are used as the model's forward has parameters.

    >>> run_batch(nn.ReLU(), (torch.tensor([-1.0]), "label"))
    tensor([0.])
    """
    args, kwargs = arguments_of(model, batch)
    return model(*args, **kwargs)


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple, dict[str, Any]]:
    """The arguments that `run_batch` calls a model with."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    wrapped = model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model
    parameters = inspect.signature(wrapped.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return tuple(batch), {}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(batch[: len(positional)]), {}


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

    Every batch counts the same, whatever `averaging_constant` the observers have (0 still freezes a scale). Under
    ``torch.distributed``, call it in every process with that process's share of the data: the processes stay in step
    and end with the same scales. The model is left in eval mode and in the VALIDATION state.

    Args:
        model: from `prepare`, `prepare_qat_fx` or `prepare_qat`.
        data: batches; a `DataLoader`, a list, a generator.
        forward: how to run the model on a batch.
        steps: at most so many batches.
        tolerance: scales have settled when none has moved by more than this share ...
        patience: ... over so many batches; 0 runs all data.
        state_file: written every `save_interval` batches and at the end of an interrupted run; if it is there at the
            start, the batches that it has seen are skipped. It is removed at the end. Of several processes the first
            reads and writes it.

    >>> from horizon_plugin_pytorch.march import March, set_march
    >>> from horizon_plugin_pytorch.quantization import QuantWrapper, get_default_qconfig, prepare_qat_fx
    >>> set_march(March.NASH_E)
    >>> net = prepare_qat_fx(QuantWrapper(nn.Conv2d(1, 2, 1)), {"": get_default_qconfig()})
    >>> calibrate(net, [torch.ones(1, 1, 4, 4) * i for i in (1, 2, 3)]).steps
    3
    """
    quantizers = {name: m for name, m in model.named_modules() if isinstance(m, FakeQuantize)}
    if not quantizers:
        raise QuantizationConfigError("calibrate: the model has no fake quantizers; call `prepare` first.")
    if steps is not None and steps < 1:
        raise QuantizationConfigError(f"calibrate: steps must be at least 1, got {steps}.")
    result = CalibrationResult()
    device = next(iter(quantizers.values())).scale.device
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    with _equal_weights(quantizers.values()):
        if state_file is not None:
            result.steps = _load(quantizers, state_file, device)
            _save(_statistics(quantizers), result.steps, state_file)  # rather now than after many batches: can it be?
        watch = _Settling(quantizers, tolerance, patience)
        whole: Statistics | None = None  # of whole batches, while a batch runs
        try:
            for batch in _in_step(data, result, steps, progress, device):
                whole = None if state_file is None else _statistics(quantizers)
                _run(forward, model, batch, result.steps, quantizers, device)
                result.steps, whole = result.steps + 1, None
                if state_file is not None and result.steps % save_interval == 0:
                    _save(_statistics(quantizers), result.steps, state_file)
                if watch.have_settled():
                    result.has_settled = True
                    break
        except BaseException:
            if state_file is not None and result.steps:
                _save(whole or _statistics(quantizers), result.steps, state_file)
            raise
    if result.steps == 0:
        raise QuantizationConfigError("calibrate: the data have no batches; a generator can be used only once.")
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    if state_file is not None and os.path.exists(state_file) and rank() == 0:
        os.unlink(state_file)
    result.scales = {place_of(n): q.scale.detach().clone() for n, q in quantizers.items() if q.has_statistics}
    result.unseen = [place_of(n) for n, q in quantizers.items() if not q.has_statistics]
    return result


def place_of(name: str) -> str:
    """The module's path rather than that of its fake quantizer; its weight is called so."""
    owner, _, last = name.rpartition(".")
    return owner if last == "activation_post_process" else name


def _run(
    forward: Forward,
    model: nn.Module,
    batch: Any,
    step: int,
    quantizers: Mapping[str, FakeQuantize],
    device: torch.device,
) -> None:
    """Run a batch. Several processes share what they have seen when all have run theirs, whichever way it took."""
    if not is_distributed():
        _call(forward, model, batch, step)
        return
    free = [q for q in quantizers.values() if not q.is_fixed]
    for quantizer in free:
        quantizer.activation_post_process.hold()
    failure: Exception | None = None
    try:
        _call(forward, model, batch, step)
    except Exception as error:
        failure = error
    _meet(1, failure, f"the model of process {{}} failed at batch {step}", step, device)
    for quantizer in free:
        quantizer.release()


def _call(forward: Forward, model: nn.Module, batch: Any, step: int) -> None:
    try:
        forward(model, batch)
    except TypeError as error:
        if forward is not run_batch:
            raise
        raise CalibrationError(
            f"calibrate: batch {step} does not fit the model's forward: {error}. Give `forward=lambda model, batch: "
            "model(...)`, which calls the model as your data need it."
        ) from error


def _meet(value: int, failure: Exception | None, what: str, step: int, device: torch.device) -> list[int]:
    """The values of all processes. One that failed tells the others, which would wait for it, and raises its error.

    Args:
        what: what failed, for the others' message, with a place for the process.
    """
    values = torch.ones(dist.get_world_size(), dtype=torch.int32, device=device)
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


def _in_step(
    data: Iterable[Any], result: CalibrationResult, steps: int | None, progress: bool, device: torch.device
) -> Iterator[Any]:
    """Batches that are not yet run; of several processes, as long as all of them have one."""
    total = len(data) if hasattr(data, "__len__") else None  # type: ignore[arg-type]
    if steps is not None:
        total = steps if total is None else min(steps, total)
    is_shown = None if progress and rank() == 0 else True  # None: not when the output is no terminal
    bar = tqdm(total=total, desc="calibrate", disable=is_shown, initial=result.steps)
    iterator = itertools.islice(data, result.steps, None)  # an interrupted run has seen the first ones
    with bar:
        while steps is None or result.steps < steps:
            batch = _next(iterator, result.steps, device) if is_distributed() else next(iterator, _END)
            if batch is _END:
                return
            yield batch
            bar.update()


def _next(iterator: Iterator[Any], step: int, device: torch.device) -> Any:
    """The next batch if all processes have one."""
    batch: Any = _END
    failure: Exception | None = None
    try:
        batch = next(iterator, _END)
    except Exception as error:
        failure = error
    have = _meet(int(batch is not _END), failure, f"the data of process {{}} failed at batch {step}", step, device)
    if all(have):
        return batch
    if batch is not _END:
        warnings.warn(
            f"calibrate: process {rank()} has data left after {step} batches, another has none; give every process the "
            "same number.",
            CalibrationWarning,
            stacklevel=5,
        )
    return _END


_END = object()


@contextmanager
def _equal_weights(quantizers: Iterable[FakeQuantize]) -> Iterator[None]:
    """Every batch counts the same; processes share what they see."""
    observers = [q.activation_post_process for q in quantizers]
    before = [o.is_sync_quantize for o in observers]
    for observer in observers:
        observer.batches = 0
        observer.is_sync_quantize = observer.is_sync_quantize or is_distributed()
    try:
        yield
    finally:
        for observer, was_synced in zip(observers, before, strict=True):
            observer.batches, observer.is_sync_quantize = None, was_synced
            observer.hold(False)


class _Settling:
    """Have the scales stopped moving?"""

    def __init__(self, quantizers: Mapping[str, FakeQuantize], tolerance: float, patience: int) -> None:
        self._quantizers = [q for q in quantizers.values() if not q.is_fixed]
        self._tolerance, self._patience = tolerance, patience
        intervals = [getattr(q.activation_post_process, "update_interval", 1) for q in self._quantizers]
        if patience and max(intervals, default=1) > 1:  # between its updates a scale only seems to have settled
            self._patience = max(patience, 2 * max(intervals))
        self._before: list[Tensor] = []

    def have_settled(self) -> bool:
        if not self._patience or not self._quantizers:
            return False
        now = torch.cat([q.scale.detach().reshape(-1) for q in self._quantizers])
        self._before.append(now)
        if len(self._before) <= self._patience:
            return False
        past = torch.stack([s for s in self._before[-self._patience - 1 :] if s.shape == now.shape])
        self._before = self._before[-self._patience :]
        moved = (past.amax(0) - past.amin(0)) / now
        return len(past) > self._patience and bool((moved <= self._tolerance).all())


def _statistics(quantizers: Mapping[str, FakeQuantize]) -> Statistics:
    """What all observers have learned, as it is now."""
    return {
        name: {key: value.clone() for key, value in quantizer.activation_post_process.statistics().items()}
        for name, quantizer in quantizers.items()
        if not quantizer.is_fixed
    }


def _save(observers: Statistics, steps: int, path: str | os.PathLike) -> None:
    """The same in every process, so one writes it."""
    if rank():
        return
    buffer = io.BytesIO()
    torch.save({"version": _VERSION, "steps": steps, "observers": observers}, buffer)
    try:
        write_atomically(buffer.getvalue(), os.fspath(path))
    except OSError as error:
        raise CalibrationError(
            f"calibrate: state_file={os.fspath(path)!r} cannot be written: {error}. Give a path in a folder that can "
            "be written to, or none."
        ) from error


def _load(quantizers: Mapping[str, FakeQuantize], path: str | os.PathLike, device: torch.device) -> int:
    """Go on from a state, if there is one; the first process reads it for all."""
    content: list[bytes | None] = [None]
    if rank() == 0 and os.path.exists(path):
        with open(path, "rb") as file:
            content = [file.read()]
    if is_distributed():
        dist.broadcast_object_list(content, device=device)
    if content[0] is None:
        return 0
    try:
        state = torch.load(io.BytesIO(content[0]), weights_only=True, map_location="cpu")
        observers, steps, version = state["observers"], int(state["steps"]), state["version"]
    except Exception as error:
        raise CalibrationError(
            f"calibrate: {os.fspath(path)!r} is not a state that calibrate wrote. Remove it to begin anew."
        ) from error
    mine = {n for n, q in quantizers.items() if not q.is_fixed}
    if version != _VERSION or set(observers) != mine:
        different = sorted(mine ^ set(observers))
        raise CalibrationError(
            f"calibrate: {os.fspath(path)!r} is of another model or version (different: "
            f"{', '.join(different[:5]) or version}). Remove it to begin anew."
        )
    for name, statistics in observers.items():
        observer = quantizers[name].activation_post_process
        try:
            observer.restore(statistics)
        except (KeyError, AttributeError) as error:
            raise CalibrationError(
                f"calibrate: {os.fspath(path)!r} was written with another observer at `{place_of(name)}`, which has no "
                f"{error}. Remove it to begin anew."
            ) from error
        if observer.has_statistics:
            quantizers[name].refresh_scale()
    return steps
