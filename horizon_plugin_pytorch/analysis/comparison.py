"""Two models that run in step on the same inputs: each pair of calls with the numbers that tell them apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from horizon_plugin_pytorch.analysis.same_input import NotComparable, real_of, same_input_error
from horizon_plugin_pytorch.analysis.similarity_function import largest_difference
from horizon_plugin_pytorch.analysis.watched_run import WatchedRun, undisturbed_evaluation, unfolded
from horizon_plugin_pytorch.errors import CheckError, QuantizationWarning, listed, require_module, warn
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.watch.call_log import CallLog
from horizon_plugin_pytorch.watch.in_step import OtherCalls, run_alike, run_in_step
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.pairing import Pairing, Unpaired, pair_calls
from horizon_plugin_pytorch.watch.watch import Consumer, both

Devices = torch.device | str | Sequence[torch.device | str] | None
# When a model makes other calls than before, and what to do.
_IN_SECOND_RUN = (
    "when it runs once more on the same inputs",
    "Does the forward draw random numbers, count its calls, or keep something of the run before? It must do the same "
    "each time.",
)
_ON_FURTHER_BATCH = (
    "on this batch than on the first one",
    "The numbers of all batches are put together, so the forward must take the same branches for each: leave this "
    "batch out, or give it in a call of its own.",
)


@dataclass(eq=False)
class ComparedCall:
    """An operator's call in both models, with its tensors.

    Args:
        name: as the tables show it.
        one, other: the calls in the two models.
        first, second: the real numbers that they gave, on one device; all results of an operator in a row.
        scale: of the result in the second model, else in the first; None without one, and for one scale per channel.
        atol: the largest difference of the results.
        error: the same in steps of the scale; None where there is no scale and the results differ.
        same_input_error: the largest difference, in steps, of the operator's two forms on the same inputs.
    """

    name: str
    one: OperatorCall
    other: OperatorCall
    first: Tensor
    second: Tensor
    scale: float | None
    atol: float
    error: float | None
    same_input_error: float | None

    @property
    def type(self) -> str:
        """The class of the module, or the function, as tables show it."""
        call = self.one if self.one.module is not None else self.other
        return f"<function '{call.operator}'>" if call.module is None else str(type(call.module))


class Comparison:
    """Two models, whose calls are paired once, and which run in step as often as there are batches.

    Calls are paired when somebody asks for `logs` or `pairing`, or `run` finds that they must be.

    Args:
        model1, model2: of any stages; they are not changed.
        inputs: the arguments of both models, as `prepare` takes them.
        devices: one for both models, or a pair; None leaves models and inputs where they are.
        who: the tool that was asked, for messages.
        also: is told of each call of either model, in the runs by which they are paired.

    Attributes:
        models: as they run: perhaps copies on other devices, or such that show what transformer layers do.
        first_inputs: of the first model, on its device.
        logs: the calls of both models.
        pairing: which of them belong together.

    Raises:
        CheckError: both are one model, they have nothing in common, or one of them fails on these inputs.
    """

    def __init__(
        self,
        model1: nn.Module,
        model2: nn.Module,
        inputs: Any,
        devices: Devices,
        who: str,
        also: tuple[Consumer, Consumer] | None = None,
    ) -> None:
        self._also = also or (None, None)
        for model in (model1, model2):
            require_module(model, who)
        self._who, self._devices = who, pair_of(devices, who)
        if model1 is model2 and self._devices[0] != self._devices[1]:
            model2 = copy.deepcopy(model1)
        require_two_models(model1, model2, who)
        self._runs = self._runs_on((model1, model2), inputs)
        self.models = self._runs[0].model, self._runs[1].model
        self.first_inputs = self._runs[0].inputs
        self._parts: tuple[dict[str, list[OperatorCall]], ...] = ({}, {})
        self._not_comparable: dict[str, list[str]] = {}

    @cached_property
    def logs(self) -> tuple[CallLog, CallLog]:
        return _log(self._runs[0], self._also[0]), _log(self._runs[1], self._also[1])

    @cached_property
    def pairing(self) -> Pairing:
        pairing = pair_calls(*self.logs)
        tell_unpaired(*self.models, pairing, self._who)
        self._parts = parts_of(pairing.first_only), parts_of(pairing.second_only)
        return pairing

    def _runs_on(self, models: tuple[nn.Module, nn.Module], inputs: Any) -> tuple[WatchedRun, WatchedRun]:
        one, other = (WatchedRun(unfolded(m), inputs, d, self._who) for m, d in zip(models, self._devices, strict=True))
        return one, other

    def run(self, consumer: Callable[[ComparedCall], Any], restart: Callable[[], Any] | None = None) -> None:
        """Run both models in step on the inputs that were given, and tell of each pair of calls, in the second's order.

        Args:
            restart: forgets all that the consumer was told. With it, the calls of models that should be alike are taken
                as they come, and paired afterwards: if they are found to belong together in another way, all is told
                again.
        """
        if restart is None or not _may_be_alike(*self.models) or not self._run_alike(consumer, restart):
            self._run(self._runs, consumer, _IN_SECOND_RUN)

    def run_on(self, inputs: Any, consumer: Callable[[ComparedCall], Any]) -> None:
        """The same on other inputs.

        Raises:
            CheckError: a model makes other calls on them.
        """
        self._run(self._runs_on(self.models, inputs), consumer, _ON_FURTHER_BATCH)

    def _run(
        self, runs: tuple[WatchedRun, WatchedRun], consumer: Callable[[ComparedCall], Any], if_other: tuple[str, str]
    ) -> None:
        pairing = self.pairing
        try:
            with self._running(runs, consumer, len(pairing.pairs)) as (compare, run):
                run_in_step(*self.models, pairing, compare, run)
        except OtherCalls as error:
            when, remedy = if_other
            raise CheckError(f"{self._who}: a model makes other calls {when}: {error.difference}. {remedy}") from error

    def _run_alike(self, consumer: Callable[[ComparedCall], Any], restart: Callable[[], Any]) -> bool:
        try:
            with self._running(self._runs, consumer, None) as (compare, run):
                logs = run_alike(*self.models, compare, run)
        except Exception:  # the other way says what is wrong, if it is not only that calls are others
            restart()
            self._not_comparable.clear()
            return False
        self.logs = logs
        if all(one.index == other.index for one, other in self.pairing.pairs) and _are_all(self.pairing, logs):
            return True
        restart()
        self._not_comparable.clear()
        return False

    @contextmanager
    def _running(
        self, runs: tuple[WatchedRun, WatchedRun], consumer: Callable[[ComparedCall], Any], count: int | None
    ) -> Iterator[tuple[Callable[[OperatorCall, OperatorCall], None], Callable[[nn.Module], Any]]]:
        by_model = {id(run.model): run for run in runs}
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(undisturbed_evaluation(model))
            bar = stack.enter_context(tqdm(total=count, desc=self._who, disable=None))

            def compare(one: OperatorCall, other: OperatorCall) -> None:
                bar.update()
                consumer(self._compared(one, other))

            yield compare, lambda model: by_model[id(model)]()

    def tell_not_comparable(self) -> None:
        """Say of which operators the error with the same input is not known."""
        for reason, names in self._not_comparable.items():
            warn(
                f"{self._who}: the error with the same input is not known for {listed(dict.fromkeys(names))}: "
                f"{reason}. Its cell is empty.",
                QuantizationWarning,
            )

    def name_of(self, one: OperatorCall, other: OperatorCall) -> str:
        """A pair of calls as the tables show it."""
        call = one if one.module is not None or other.module is None else other
        if call.module is None:
            return call.name
        are_same = [_is_identity(model, call.path) for model in self.models]
        suffix = "(I vs I)" if all(are_same) else "(I)" if any(are_same) else ""
        return f"{call.path}{f'({call.repetition})' if call.repetition else ''}{suffix}"

    def _compared(self, one: OperatorCall, other: OperatorCall) -> ComparedCall:
        name = self.name_of(one, other)
        shapes = [tuple(x.shape) for x in one.outputs], [tuple(x.shape) for x in other.outputs]
        if shapes[0] != shapes[1]:
            raise CheckError(
                f"{self._who}: `{name}` gives {listed(map(str, shapes[0]))} in the first model and "
                f"{listed(map(str, shapes[1]))} in the second. Give two models that were made of one float model."
            )
        unit = _only_scale(other.outputs, one.outputs, other.inputs, one.inputs)  # of what becomes float, the input's
        scale = _only_scale(other.outputs, one.outputs)
        error = self._same_input(name, one, other, unit)  # before there are real numbers of both, to save memory
        first, second = _joined(one.outputs), _joined(other.outputs)
        second = second.to(first.device)
        atol = largest_difference(first, second)
        return ComparedCall(name, one, other, first, second, scale, atol, _steps(atol, unit), error)

    def _same_input(self, name: str, one: OperatorCall, other: OperatorCall, scale: float | None) -> float | None:
        parts = self._parts[0].get(other.name, []), self._parts[1].get(one.name, [])
        try:
            return _steps(same_input_error(one, other, parts), scale)
        except NotComparable as reason:
            self._not_comparable.setdefault(str(reason), []).append(name)
        except Exception as error:  # an operator refuses what it never gets in its own model
            self._not_comparable.setdefault(f"{type(error).__name__}: {error}".rstrip("."), []).append(name)
        return None


def pair_of(devices: Devices, who: str) -> tuple[Any, Any]:
    """The devices of two models."""
    if devices is None or isinstance(devices, (str, torch.device)):
        return devices, devices
    if len(devices) != 2:
        raise TypeError(f"{who}: devices is a device for both models, or a pair of devices; got {devices!r}.")
    return devices[0], devices[1]


def require_two_models(model1: nn.Module, model2: nn.Module, who: str) -> None:
    """Insist on models that can differ: preparation and conversion may work in place."""
    mine = {id(m) for m in model1.modules()}
    leaves = [m for m in model2.modules() if not m._modules and not isinstance(m, nn.Identity)]
    if model1 is model2 or (leaves and all(id(m) in mine for m in leaves)):
        raise CheckError(
            f"{who}: both models are one, or hold the same modules, so all results would be equal. Preparation and "
            "conversion may change the model that they are given: keep `copy.deepcopy(model)` from before, and compare "
            "with that."
        )


def _may_be_alike(model1: nn.Module, model2: nn.Module) -> bool:
    """Can it be that two models make the same calls: have they the same operators, both with scales?"""
    kinds = QATModule, QuantizedModule
    one, other = ({path for path, m in model.named_modules() if isinstance(m, kinds)} for model in (model1, model2))
    return bool(one & other) and all("." in path for path in one ^ other)  # an operator may be made of others


def _are_all(pairing: Pairing, logs: tuple[CallLog, CallLog]) -> bool:
    return len(pairing.pairs) == len(logs[0].calls) == len(logs[1].calls)


def _log(run: WatchedRun, also: Consumer | None) -> CallLog:
    log = CallLog(run.model)
    log.end(run.watch(log if also is None else both(log, also)))
    return log


def tell_unpaired(model1: nn.Module, model2: nn.Module, pairing: Pairing, who: str) -> None:
    """Warn of calls that have no partner in the other model.

    Raises:
        CheckError: none has one.
    """
    if not pairing.pairs:
        raise CheckError(
            f"{who}: `{type(model1).__name__}` and `{type(model2).__name__}` have no operator in common. Give two "
            "models that were made of one float model."
        )
    if unpaired := unexpected(pairing):
        warn(
            f"{who}: calls without a partner in the other model are not compared: {listed(map(str, unpaired))}. "
            "If there are many, the models were not made of one float model.",
            QuantizationWarning,
        )


_EXPECTED = ("a part of ", "the stub of a constant")


def unexpected(pairing: Pairing) -> list[Unpaired]:
    """Calls without a partner that models of one float model do not have."""
    return [u for u in (*pairing.first_only, *pairing.second_only) if not u.reason.startswith(_EXPECTED)]


def parts_of(unpaired: Sequence[Unpaired]) -> dict[str, list[OperatorCall]]:
    """Members of fused operators, by the name of the operator in the other model."""
    found: dict[str, list[OperatorCall]] = {}
    for one in unpaired:
        if one.reason.startswith("a part of `"):
            found.setdefault(one.reason.split("`")[1], []).append(one.call)
    return found


def _is_identity(model: nn.Module, path: str) -> bool:
    try:
        return isinstance(model.get_submodule(path), nn.Identity)
    except AttributeError:
        return False


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The real numbers of all results of an operator."""
    if len(tensors) == 1:
        return real_of(tensors[0])
    return torch.cat([real_of(x).flatten().double() for x in tensors])


def _only_scale(*results: Sequence[Tensor]) -> float | None:
    """The scale of the first result that has one scale."""
    for outputs in results:
        for x in outputs:
            if isinstance(x, QTensor) and x.scale.numel() == 1:
                return float(x.scale)
    return None


def _steps(atol: float, scale: float | None) -> float | None:
    """A difference in steps of a scale: whole steps where both lie on one grid."""
    if atol == 0:
        return 0
    if scale is None or not math.isfinite(atol):
        return None if scale is None else math.inf
    steps = atol / scale
    return round(steps) if abs(steps - round(steps)) < 1e-3 else round(steps, 3)
