"""How far the outputs of a model are from those of its float form while single operators are changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.calibration.batches import run_batch
from horizon_plugin_pytorch.calibration.resumed import ResumableGraph, Snapshot
from horizon_plugin_pytorch.errors import CalibrationError, CalibrationWarning, warn
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize
from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.nn.qat.composite import Composite
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.qat.stubs import DeQuantStub
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import current_forward
from horizon_plugin_pytorch.runtime.results import own_tensors
from horizon_plugin_pytorch.statistics.metrics import Metric, RelativeError
from horizon_plugin_pytorch.watch import HeldRun, ModuleWatch, OperatorCall

_WORSE = 1.1  # a candidate whose error on the first batches is so many times the best is not tried on the others
_HORIZON = 16  # so many operators after the changed one run; where more follow, what these give is compared
_LAST = 4  # of them, the results that count
_KEPT_BYTES = 2**30  # results of earlier operators that are kept for the next ones; beyond, they are computed again


class BatchObserver(Protocol):
    """Is told where a batch begins and where it is over."""

    def hold(self) -> None:
        """A batch begins."""

    def release(self) -> None:
        """It is over."""


class Judge:
    """Runs the model and compares its outputs with those of the float model.

    While candidates for an operator are tried on a batch, the operators that run before it give the same every time:
    they run once. A run of a traced model begins behind them; one that keeps its own forward runs through them, and is
    handed out their results again. Where many operators follow, the run ends after a few, and what these give is
    compared: so a try costs the same in a network of any depth, but for handing out.

    Args:
        batches: what to run it on.

    Attributes:
        batch: the number of the batch that runs.
        ended: operators that have ended since it began.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self.batches = batches
        self.batch = 0
        self.ended = 0
        self._model = model
        self._wanted: list[list[Tensor]] = []
        self._lengths: list[int] = []  # by batch, how many operators run
        self._given: list[Any] = []
        # By batch, of the operators before the one that is tried, with the bytes of all up to it.
        self._results: dict[int, list[tuple[Any, int]]] = {}
        self._kept = 0  # operators whose results are kept
        self._end: int | None = None  # where the run ends, if not with the model
        self._window: dict[int, list[Tensor]] = {}  # what operators gave since the one that is tried
        self._floats: _FloatWindows | None = None
        self._stubs: set[str] = set()
        self._graph = ResumableGraph.of(model)
        self._starts: dict[int, _Start] = {}  # by batch, where runs of a traced model begin

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Operators hand out their results again, and what DeQuantStubs give is kept."""
        paths = {module: path for path, module in self._model.named_modules()}
        operators = {paths[module]: module for module in operators_of(self._model)}
        stubs = {path: module for module, path in paths.items() if isinstance(module, DeQuantStub)}
        self._stubs = set(stubs)
        with ModuleWatch(stubs, after=self._keep_output), ModuleWatch(operators, around=self._replayed):
            yield

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """As `watching`, with a float copy of the model if it is a deep one."""
        with ExitStack() as stack:
            if max(self._lengths) > _HORIZON:
                self._floats = _FloatWindows(self._model, self.batches)
                stack.callback(self._floats.stop)
            stack.enter_context(self.watching())
            try:
                yield
            finally:
                self._results.clear()
                self._starts.clear()

    def _keep_output(self, call: OperatorCall) -> None:
        self._given.append(_copied(call.output))

    def _replayed(self, call: OperatorCall, run: Callable[[], Any]) -> Any:
        """The result of an operator, kept or new."""
        position, results = self.ended, self._results.get(self.batch, [])
        if position < min(self._kept, len(results)):
            out = _copied(results[position][0])
            for x in tensors_of(out):
                if isinstance(x, QTensor):
                    x._belong(current_forward())  # an earlier forward made it, on the same batch
        else:
            out = run()
            if position < self._kept and self._graph is None:
                before = results[-1][1] if results else 0
                results.append((_copied(out), before + sum(x.numel() * 4 for x in tensors_of(out))))
            elif position >= self._kept and self._end is not None and self._counts(call.path, position):
                self._window[position] = _real_numbers(out)
        self.ended += 1
        if self.ended == self._end:
            raise _FarEnough
        return out

    def _counts(self, path: str, position: int) -> bool:
        """Is what an operator gives compared? Of the changed one it is only if nothing later tells candidates apart."""
        assert self._end is not None
        return path in self._stubs or position == self._kept or position >= self._end - _LAST

    def _outputs(self, index: int) -> list[Tensor]:
        start = self._starts.get(index, _Start())
        self.batch, self.ended, self._given, self._window = index, start.ended, list(start.given), {}
        begun: AbstractContextManager = nullcontext()
        if self._graph is not None and start.snapshot is not None:
            begun = self._graph.run_from(start.snapshot)
        out = None
        with suppress(_FarEnough), begun:
            out = run_batch(self._model, own_tensors(self.batches[index]))
        return _real_numbers(self._given or out)

    def _move_start(self, graph: ResumableGraph, index: int) -> None:
        """Let the runs of a batch begin behind the operators that stay as they are."""
        start = self._starts.pop(index, _Start())
        if start.ended > self._kept:
            start = _Start()
        self.batch, self.ended, self._given = index, start.ended, list(start.given)

        def stand(take: Callable[[], Snapshot]) -> None:
            nonlocal start
            if start.ended < self.ended <= self._kept:
                start = _Start(self.ended, list(self._given), take())
            if self.ended >= self._kept:
                raise _FarEnough

        with suppress(_FarEnough), graph.run_from(start.snapshot, stand):
            run_batch(self._model, own_tensors(self.batches[index]))
        self._starts[index] = start

    def run_float(self, observers: Sequence[BatchObserver]) -> None:
        """Keep the outputs of the model as it is, while something observes: calibration computes in float."""
        for index in range(len(self.batches)):
            for observer in observers:
                observer.hold()
            self._wanted.append(self._outputs(index))
            self._lengths.append(self.ended)
            for observer in observers:
                observer.release()
        if not all(self._wanted):
            raise CalibrationError("auto_calibrate: the model gives no float tensor; put a DeQuantStub at its outputs.")
        finite = [[bool(x.isfinite().all()) for x in wanted] for wanted in self._wanted]
        if not any(bool(x.isfinite().any()) for wanted in self._wanted for x in wanted):
            raise CalibrationError(
                "auto_calibrate: no output of the float model is finite, so nothing can be compared. Look for NaN or "
                "infinity in the data and in the weights."
            )
        if not all(map(all, finite)):
            batches = ", ".join(str(index) for index, of_batch in enumerate(finite) if not all(of_batch))
            warn(
                f"auto_calibrate: outputs of the float model have values that are NaN or infinite, in batch {batches}; "
                "only the others are compared.",
                CalibrationWarning,
            )

    def errors(
        self, tries: Sequence[Callable[[], None]], among: Sequence[int], positions: dict[int, int] | None = None
    ) -> list[list[float]]:
        """The errors of the outputs after each of the tries: on the first batch, on the first two, and so on.

        Args:
            tries: change the model.
            among: which batches.
            positions: by batch, how many operators run before what the tries change. If given, only the best one is
                wanted: what is much worse is not tried on further batches. Then the outputs are those of the operators
                that follow, if the model's own are far.
        """
        errors, own = [_Errors() for _ in tries], [_Errors() for _ in tries]
        left = list(range(len(tries)))
        for index in among:
            self._begin(index, positions)
            for number in left:
                tries[number]()
                outputs = self._outputs(index)
                if self._end is None:
                    errors[number].add(outputs, self._wanted[index])
                else:
                    self._add_window(index, errors[number], own[number])
            self._finish(index)
            if positions is not None:
                best = min(errors[number].found[-1] for number in left)
                left = [number for number in left if errors[number].found[-1] <= best * _WORSE]
                if len(left) == 1:
                    break
        is_untold = len(left) > 1 and len({errors[number].found[-1] for number in left}) == 1
        return [one.found for one in (own if is_untold and all(own[number].found for number in left) else errors)]

    def _begin(self, index: int, positions: dict[int, int] | None) -> None:
        """What is kept of a batch, and where its runs end."""
        self._kept, self._end = 0, None
        if positions is None:
            self._results.clear()
            self._starts.clear()
            return
        self._kept = positions.get(index, 0)
        if self._graph is not None:
            self._move_start(self._graph, index)
        del self._results.setdefault(index, [])[self._kept :]
        if self._kept + _HORIZON < self._lengths[index]:
            self._end = self._kept + _HORIZON

    def _finish(self, index: int) -> None:
        """Results stay for the next operator as long as they are not too many."""
        if sum(results[-1][1] for results in self._results.values() if results) > _KEPT_BYTES:
            self._results.pop(index, None)

    def _add_window(self, index: int, errors: _Errors, own: _Errors) -> None:
        """Compare what the operators of this run gave: the last ones, and outputs of the model among them."""
        assert self._floats is not None and self._end is not None
        wanted = self._floats.results(index, self._kept, self._end)
        here = wanted.keys() & self._window.keys()
        far = sorted(p for p in here if p != self._kept and len(wanted[p]) == len(self._window[p]))
        errors.add([x for p in far for x in self._window[p]], [x for p in far for x in wanted[p]])
        own.add(self._window.get(self._kept, []), wanted.get(self._kept, []))


@dataclass(frozen=True)
class _Start:
    """Where the runs of a batch begin.

    Args:
        ended: operators before it.
        given: what DeQuantStubs among them gave.
        snapshot: of the graph; None is its beginning.
    """

    ended: int = 0
    given: list[Any] = field(default_factory=list)
    snapshot: Snapshot | None = None


class _FarEnough(BaseException):
    """The rest of the model need not run."""


class _Errors:
    """Errors of several outputs over batches; outputs count alike.

    Attributes:
        found: the error over one batch, over two, and so on.
    """

    def __init__(self) -> None:
        self.found: list[float] = []
        self._metrics: list[Metric] = []

    def add(self, outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        """One more batch."""
        self._metrics += [RelativeError() for _ in range(len(wanted) - len(self._metrics))]
        for metric, found, x in zip(self._metrics, [*outputs, *[None] * len(wanted)], wanted, strict=False):
            _compare(metric, found, x)
        errors = [0.0 if metric.is_empty else metric.result() for metric in self._metrics]
        self.found.append(math.sqrt(sum(error**2 for error in errors) / max(len(errors), 1)))


class _FloatWindows:
    """What operators give in the float model: a run for each batch, which goes on as far as it is asked to.

    Args:
        model: is copied.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self._model, self._batches = copy.deepcopy(model), batches
        set_fake_quantize(self._model, FakeQuantState._FLOAT)
        paths = {module: path for path, module in self._model.named_modules()}
        self._operators = {paths[module]: module for module in operators_of(self._model)}
        self._runs: dict[int, tuple[HeldRun, dict[int, list[Tensor]]]] = {}
        self._first: dict[int, int] = {}
        self._end = 0

    def results(self, index: int, start: int, end: int) -> dict[int, list[Tensor]]:
        """By position, what the operators from `start` to `end` give on a batch."""
        if start < self._first.get(index, 0):
            self._runs.pop(index)[0].stop()
        if index not in self._runs:
            self._begin(index)
        self._first[index], self._end = start, end
        run, found = self._runs[index]
        for position in [p for p in found if p < start]:
            del found[position]
        if max(found, default=-1) < end - 1:
            run.go_on()
        return found

    def _begin(self, index: int) -> None:
        found: dict[int, list[Tensor]] = {}
        ended = 0

        def keep(call: OperatorCall) -> None:
            nonlocal ended
            if ended >= self._first[index]:
                found[ended] = [x.clone() for x in _real_numbers(call.output)]
            ended += 1
            if ended == self._end:
                del call
                run.pause()

        def work() -> None:
            with ModuleWatch(self._operators, after=keep):
                run_batch(self._model, own_tensors(self._batches[index]))

        run = HeldRun(work)
        self._runs[index] = run, found

    def stop(self) -> None:
        """End all runs."""
        for run, _ in self._runs.values():
            run.stop()
        self._runs.clear()


def operators_of(model: nn.Module) -> Iterator[nn.Module]:
    """Operators that are not a part of another; each once.

    >>> list(operators_of(nn.ReLU()))
    []
    """
    parts: set[int] = set()
    for module in model.modules():
        if isinstance(module, (QATModule, Composite)) and id(module) not in parts:
            parts.update(map(id, module.modules()))
            yield module


def _real_numbers(tree: Any) -> list[Tensor]:
    """The float tensors of a structure, as real values."""
    found = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
    plain = [x.as_real() if isinstance(x, QTensor) else x for x in found]
    return [x for x in plain if x.is_floating_point()]


def _copied(tree: Any) -> Any:
    """Tensors that a write in place to the given ones does not reach: such a write makes a QTensor another one."""

    def one(x: Any) -> Any:
        return x.alias() if isinstance(x, QTensor) else x.clone() if isinstance(x, Tensor) else x

    return one(tree) if isinstance(tree, Tensor) else pytree.tree_map(one, tree)


def _compare(metric: Metric, found: Tensor | None, wanted: Tensor) -> None:
    """Count an output where the float model is finite; one that is missing or of another shape is infinitely far."""
    if found is None or found.shape != wanted.shape:
        found = torch.full_like(wanted, math.inf)
    counts = wanted.isfinite()
    metric.update(*((found, wanted) if bool(counts.all()) else (found[counts], wanted[counts])))
