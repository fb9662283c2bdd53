"""Two models that run at the same time, so that their calls can be compared one by one and nothing has to be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.watch.call_log import CallLog
from horizon_plugin_pytorch.watch.held_run import HeldRun
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.pairing import Pairing
from horizon_plugin_pytorch.watch.watch import Watch


def run_in_step(
    first: nn.Module,
    second: nn.Module,
    pairing: Pairing,
    consumer: Callable[[OperatorCall, OperatorCall], Any],
    run: Callable[[nn.Module], Any],
) -> tuple[Any, Any]:
    """Run two models in step and give each pair of calls to a consumer, as soon as both have been made.

    The first model runs until it has made the call that the second waits for. Only results whose partner comes later
    are held meanwhile, so that memory is that of two forwards and not of all features. Each model has the random
    numbers that it has when it runs alone; those of the second are used up.

    Args:
        pairing: of `pair_calls`, for runs like this one.
        consumer: is told of both calls of a pair, with their tensors.
        run: runs a model: ``lambda model: model(x)``. Give each model inputs of its own if it writes to them.

    Returns:
        What the two runs gave.

    Raises:
        OtherCalls: a model makes other calls than in the run that was paired.

    >>> import torch
    >>> from horizon_plugin_pytorch.watch import CallLog, pair_calls
    >>> one, other, x = nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()), torch.ones(2)
    >>> pairing = pair_calls(CallLog.of(one, x), CallLog.of(other, x))
    >>> def compare(a, b):
    ...     print(a.name, torch.equal(a.output, b.output))
    >>> _ = run_in_step(one, other, pairing, compare, lambda model: model(x))
    0 True
    """
    pairs = {other.index: (one, other) for one, other in pairing.pairs}
    known = pairs.keys() | {alone.call.index for alone in pairing.second_only}
    wanted = {one.index for one, _ in pairs.values()}
    waiting = dict(pairs)
    ahead = _Ahead(first, wanted.__contains__, run)

    def compare(call: OperatorCall) -> None:
        if call.index not in known:
            raise OtherCalls(f"`{call.name}` did not run when the calls were paired, and runs now")
        if call.index in pairs:
            one, other = pairs[call.index]
            waiting.pop(call.index, None)
            _require_same(call, other)
            with ahead.taking(one) as found:
                _require_same(found, one)
                consumer(found, call)

    try:
        with Watch(second, compare):
            out = run(second)
        if waiting:
            raise _NotThere(next(other for _, other in waiting.values()))
        return ahead.finish(), out
    finally:
        ahead.stop()


class OtherCalls(CheckError):
    """A model makes other calls than in the run that was paired.

    Args:
        difference: the first call that is another one.
    """

    def __init__(self, difference: str) -> None:
        self.difference = difference
        super().__init__(
            f"run_in_step: {difference}. Pair the calls again, on inputs for which the forward takes the same branches."
        )


class NotAlike(Exception):
    """Two models do not make the same calls, one by one."""


def run_alike(
    first: nn.Module,
    second: nn.Module,
    consumer: Callable[[OperatorCall, OperatorCall], Any],
    run: Callable[[nn.Module], Any],
) -> tuple[CallLog, CallLog]:
    """Run two models in step whose calls are the same, one by one, as those of a QAT model and its integers are.

    That saves the run of each model in which calls are written down to be paired.

    Args:
        consumer, run: as of `run_in_step`.

    Returns:
        The calls of both.

    Raises:
        NotAlike: at the first call that is another one; the consumer was told of those before.

    >>> import torch
    >>> one, other, x = nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()), torch.ones(2)
    >>> logs = run_alike(one, other, lambda a, b: print(a.name, b.name), lambda model: model(x))
    0 0
    """
    logs = CallLog(first), CallLog(second)
    ahead = _Ahead(first, lambda index: True, run, logs[0])

    def compare(call: OperatorCall) -> None:
        logs[1](call)
        try:
            with ahead.taking(call) as found:
                if _known_by(found) != _known_by(call):
                    raise NotAlike(f"{found.name} and {call.name}")
                consumer(found, call)
        except _NotThere:
            raise NotAlike(f"no call for {call.name}") from None

    try:
        with Watch(second, compare):
            run(second)
        ahead.finish()
    finally:
        ahead.stop()
    if len(logs[0].calls) != len(logs[1].calls):
        raise NotAlike(f"no call for {logs[0].calls[len(logs[1].calls)].name}")
    return logs


def _known_by(call: OperatorCall) -> tuple:
    return call.path, call.repetition, call.module is None, call.operator.removesuffix("_scalar")


def _require_same(found: OperatorCall, wanted: OperatorCall) -> None:
    if (found.path, found.operator) != (wanted.path, wanted.operator):
        raise OtherCalls(
            f"call {wanted.index} was `{wanted.name}` when the calls were paired and is `{found.name}` now"
        )


class _NotThere(OtherCalls):
    """A model has come to its end without a call that was expected."""

    def __init__(self, wanted: OperatorCall) -> None:
        super().__init__(f"`{wanted.name}` ran when the calls were paired, and does not run now")


class _Ahead:
    """A model that runs in a thread of its own, as far as it is asked to."""

    def __init__(
        self,
        model: nn.Module,
        is_wanted: Callable[[int], bool],
        run: Callable[[nn.Module], Any],
        log: CallLog | None = None,
    ) -> None:
        self._model, self._is_wanted, self._run, self._log = model, is_wanted, run, log
        self._held: dict[int, OperatorCall] = {}
        self._until = -1  # the call that is waited for
        self._work = HeldRun(self._watched)

    @contextmanager
    def taking(self, wanted: OperatorCall) -> Iterator[OperatorCall]:
        """A call that the model has made or is going to make; it is let go afterwards."""
        if wanted.index not in self._held:
            self._go_on(wanted.index)
        if wanted.index not in self._held:
            raise _NotThere(wanted)
        yield self._held.pop(wanted.index)

    def finish(self) -> Any:
        """Let the model run to its end, and give its result."""
        self._go_on(-1)
        return self._work.result

    def stop(self) -> None:
        """End the thread, wherever it is."""
        self._held.clear()
        self._work.stop()

    def _go_on(self, until: int) -> None:
        self._until = until
        self._work.go_on()

    def _watched(self) -> Any:
        with Watch(self._model, self._keep):
            return self._run(self._model)

    def _keep(self, call: OperatorCall) -> None:
        if self._log is not None:
            self._log(call)
        if self._is_wanted(call.index):
            self._held[call.index] = call
        if call.index == self._until:
            del call  # the consumer lets it go
            self._work.pause()
