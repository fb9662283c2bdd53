"""What is analysed: a model, or the integer graph that was made of one. Both run and tell of their operators."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from horizon_plugin_pytorch.analysis.profile.stages import stage_of
from horizon_plugin_pytorch.analysis.quant_analysis.op_infos import OpInfoManager
from horizon_plugin_pytorch.analysis.watched_run import WatchedRun, undisturbed_evaluation, unfolded
from horizon_plugin_pytorch.asking.functions import code_text
from horizon_plugin_pytorch.calibration.fingerprint import describe, digest
from horizon_plugin_pytorch.errors import CheckError, QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize
from horizon_plugin_pytorch.nested import map_tensors
from horizon_plugin_pytorch.program import Program
from horizon_plugin_pytorch.program.note import note_of, value_of
from horizon_plugin_pytorch.program.program import watching
from horizon_plugin_pytorch.runtime.arguments import data_arguments
from horizon_plugin_pytorch.watch.call_log import CallLog
from horizon_plugin_pytorch.watch.operator_call import OperatorCall


class Subject(ABC):
    """A model in the sense of the analysis."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For messages."""

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Runs in here leave no trace in a model."""
        yield

    @abstractmethod
    def run(self, batch: Any) -> Any:
        """What it gives; the batch stays as it is."""


class ModelSubject(Subject):
    """A model of any stage; transformer layers of torch's show what they do.

    Args:
        device: where to run; None leaves model and inputs where they are.
        who: the tool that was asked, for messages.
        infer: runs a model on a batch, ``infer(model, batch)``; None calls it with the batch's arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None,
        who: str,
        infer: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.model, self._device, self._who, self._infer = unfolded(model), device, who, infer
        if stage_of(model) == "calibration":
            warn(
                f"{who}: `{type(model).__name__}` is in the CALIBRATION state, in which nothing is rounded; a copy of "
                "it in the VALIDATION state is analysed. `set_fake_quantize(model, FakeQuantState.VALIDATION)` says "
                "so yourself.",
                QuantizationWarning,
            )
            self.model = copy.deepcopy(model).eval()
            set_fake_quantize(self.model, FakeQuantState.VALIDATION)
        if device is not None:
            self.model = WatchedRun(self.model, None, device, who).model

    @property
    def name(self) -> str:
        return f"`{type(self.model).__name__}`"

    @contextmanager
    def quiet(self) -> Iterator[None]:
        with undisturbed_evaluation(self.model):
            yield

    def run(self, batch: Any) -> Any:
        return self._run_on(batch)()

    def fingerprint(self) -> int:
        """A number for all that its outputs depend on."""
        infer = None if self._infer is None else code_text(self._infer)
        return digest([describe(self.model), dict(self.model.state_dict()), infer])

    def inputs(self, batch: Any) -> Any:
        """What the model is called with, as `prepare` takes example inputs."""
        if self._infer is None:
            return batch
        given: list[tuple[tuple, dict[str, Any]]] = []

        def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            given.append(map_tensors(lambda x: x.detach().clone(), (args, kwargs)))

        hook = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with self.quiet():
                self.run(batch)
        finally:
            hook.remove()
        if not given:
            raise CheckError(f"{self._who}: infer_func does not call {self.name}.")
        args, kwargs = given[0]
        signature = inspect.signature(self.model.forward)
        return dict(signature.bind(*args, **kwargs).arguments) if kwargs else args

    def _run_on(self, batch: Any) -> WatchedRun:
        return WatchedRun(self.model, batch, self._device, self._who, self._infer)

    def watch(self, batch: Any, consumer: Callable[[OperatorCall], Any]) -> CallLog:
        """Run it once and tell of each call; the log has no tensors."""
        log = CallLog(self.model)

        def tell(call: OperatorCall) -> None:
            log(call)
            consumer(call)

        self._run_on(batch).watch(tell)
        return log


class ProgramSubject(Subject):
    """An integer graph.

    Args:
        like: the model whose arguments it takes.
        infer: runs it on a batch; None calls it with the batch's arguments.
    """

    def __init__(self, program: Program, like: nn.Module, who: str, infer: Callable[[Any], Any] | None = None) -> None:
        self.program, self._like, self._who, self._infer = program, like, who, infer

    @property
    def name(self) -> str:
        return f"the integer graph of `{self.program.name}`"

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """The arguments that the graph takes, in their order."""
        return map_tensors(lambda x: x.detach().cpu(), data_arguments(self._like, batch))

    def run(self, batch: Any) -> Any:
        if self._infer is not None:
            return self._infer(map_tensors(lambda x: x.clone(), batch))
        return self.program(*self.arguments(batch))

    def write(self, batch: Any, calls: Sequence[OperatorCall], manager: OpInfoManager) -> dict[int, int]:
        """Run it and write down what it gives at the operators of a model.

        Args:
            calls: of the model that it was made of, or of its QAT form.

        Returns:
            For each call that has nodes in the graph, by its index, the index of what was written.
        """
        times = Counter(call.path for call in calls if call.module is not None)
        nodes: dict[str, list[Any]] = {path: [] for path in times}
        values = [node for node in self.program.graph.nodes if node.op == "call_function" and note_of(node).value]
        for node in values:
            path = note_of(node).path
            while path and path not in nodes:
                path = path.rpartition(".")[0]
            if path in nodes:
                nodes[path].append(node)
        wanted: dict[Any, OperatorCall] = {}
        for call in calls:
            group = nodes.get(call.path, []) if call.module is not None else []
            if not group or len(group) % times[call.path]:
                continue  # as many nodes for each call, or it is not known which are whose
            wanted[group[len(group) // times[call.path] * (call.repetition + 1) - 1]] = call
        found: dict[int, int] = {}

        def keep(node: fx.Node, value: Any) -> None:
            if node in wanted:
                asked = wanted[node]
                given = value_of(node).wrap(value)
                out = OperatorCall(len(found), asked.path, asked.repetition, line=note_of(node).line, output=given)
                manager.add(out, f"{self.program.classes.get(asked.path, '')} {node.target}".strip(), dict)
                found[asked.index] = out.index

        with watching(self.program, keep):
            self.run(batch)
        return found


class FunctionSubject(Subject):
    """Whatever gives outputs of a batch, such as a session of an inference engine: it has no operators to look at."""

    def __init__(self, function: Callable[[Any], Any], name: str) -> None:
        self._function, self._name = function, name

    @property
    def name(self) -> str:
        return self._name

    def run(self, batch: Any) -> Any:
        return self._function(map_tensors(lambda x: x.clone(), batch))


def subject_of(
    model: Any, like: nn.Module | None, device: Any, who: str, infer: Callable[[Any, Any], Any] | None = None
) -> Subject:
    """What there is to analyse.

    Args:
        model: a model; a `Program`, or what holds one as `program`; a function of a batch.
        like: the model whose arguments an integer graph takes.
        infer: runs a model, or an integer graph, on a batch.
    """
    if isinstance(model, Subject):
        return model
    program = model if isinstance(model, Program) else getattr(model, "program", None)
    if isinstance(program, Program) and like is not None:
        return ProgramSubject(program, like, who, None if infer is None else lambda batch: infer(model, batch))
    if isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        return ModelSubject(model, device, who, infer)
    if callable(model):
        return FunctionSubject(model, f"`{getattr(model, '__name__', type(model).__name__)}`")
    raise CheckError(
        f"{who} takes a model, the integer graph that `hbdk4.export` gives, or a function of a batch; got a "
        f"{type(model).__name__}."
    )
