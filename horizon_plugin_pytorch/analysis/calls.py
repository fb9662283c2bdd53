"""The operators that a model calls, recorded by running it once, without a trace left in it."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.analysis.float_run import FloatComparison
from horizon_plugin_pytorch.asking.stack import error_line
from horizon_plugin_pytorch.capture.leaves import is_leaf
from horizon_plugin_pytorch.config.choice import reason_of
from horizon_plugin_pytorch.errors import CheckError, at
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState
from horizon_plugin_pytorch.fake_quant.states import set_fake_quantize
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nested import fresh, tensors_of
from horizon_plugin_pytorch.nn.qat.composite import hidden_parts
from horizon_plugin_pytorch.notes import note_of
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.runtime.located import FusedAway
from horizon_plugin_pytorch.watch.flow import TensorNotes, state_of
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.undisturbed import undisturbed
from horizon_plugin_pytorch.watch.watch import Consumer, Watch, both


@dataclass(frozen=True)
class SeenTensor:
    """A tensor that went into an operator, or came out of it.

    Args:
        dtype: ``qint8``, ``torch.float32``, ...; ``torch.float16`` also where a `FakeCast` stands for it.
        low, high: its smallest and largest real value; None for tensors without any.
        producer: index of the call that gave this very tensor.
        origin: index of the last call before it: functions that are no operators of their own may lie between.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    producer: int | None = None
    origin: int | None = None

    @property
    def is_quantized(self) -> bool:
        """Does it have a scale?"""
        return self.dtype.startswith("q")

    @property
    def is_integer(self) -> bool:
        """Is it a number on an integer grid? Booleans are not."""
        return self.dtype.startswith("qint")

    @property
    def is_float(self) -> bool:
        """Does it hold real numbers without a scale?"""
        return self.dtype.startswith(("torch.float", "torch.bfloat"))

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low or 0.0), abs(self.high or 0.0))


@dataclass(frozen=True, eq=False)
class CallRow:
    """One call of an operator.

    Args:
        index: its position among all calls.
        path: the module's first path in the model.
        method: the method, for a FloatFunctional.
        repetition: how often this module was called before.
    """

    index: int
    path: str
    module: nn.Module
    method: str
    repetition: int
    inputs: tuple[SeenTensor, ...]
    outputs: tuple[SeenTensor, ...]

    @property
    def name(self) -> str:
        """As tables show it: ``conv``, ``conv(1)`` for a second call, ``sub[sub]`` for a FloatFunctional's method."""
        method = f"[{self.method}]" if self.method else ""
        return f"{self.path}{method}" + (f"({self.repetition})" if self.repetition else "")

    @property
    def quantizer(self) -> Any:
        """The fake quantizer of the output: a `FakeQuantize`, a `FakeCast`, or None."""
        found = getattr(self.module, "activation_post_process", None)
        return found if isinstance(found, (FakeQuantize, FakeCast)) else None


@dataclass(frozen=True, eq=False)
class Failure:
    """An error that ended the run.

    Args:
        path: the innermost module that was running.
        line: ``file.py:41`` of the user's code; empty if none was running.
        last_call: the last operator that gave a result; empty if none did.
    """

    error: Exception
    path: str
    line: str
    last_call: str

    def __str__(self) -> str:
        after = f"after `{self.last_call}`" if self.last_call else "before any operator ran"
        text = str(self.error).strip().rstrip(".")
        return f"the model failed {at(self.path, self.line)}, {after}: {type(self.error).__name__}: {text}."


@dataclass(frozen=True, eq=False)
class Recording:
    """All calls of one run.

    Args:
        operators: every operator of the model, called or not, in the order of definition.
        uses: how often each call's results are used by other calls, by functions and as outputs of the model.
        functions: names of the functions that take each call's results, or what comes of them by functions, but for
            those that a deployed model has nothing for.
        results: the calls whose results the model hands out as they are.
        training_only: operators that run in training mode and not in eval mode.
        training_failure: the error that ended the run in training mode, if there was one.
        failure: the error that ended the run early, or None.
        march: the chip that the model was prepared for; None if it is not known.
        reasons: the rules that gave operators their formats.
    """

    calls: tuple[CallRow, ...]
    operators: dict[str, nn.Module]
    uses: dict[int, int]
    functions: dict[int, tuple[str, ...]]
    results: frozenset[int] = frozenset()
    training_only: frozenset[str] = frozenset()
    training_failure: Failure | None = None
    failure: Failure | None = None
    march: March | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How often each operator of the model was called."""
        called = Counter(call.path for call in self.calls)
        return {path: called[path] for path in self.operators}

    @cached_property
    def _by_origin(self) -> dict[int, list[CallRow]]:
        found: dict[int, list[CallRow]] = defaultdict(list)
        for call in self.calls:
            for origin in {x.origin for x in call.inputs if x.origin is not None}:
                found[origin].append(call)
        return found

    def consumers(self, call: CallRow) -> list[CallRow]:
        """The calls that take results of `call`, functions between them or not."""
        return self._by_origin.get(call.index, [])

    def require_end(self, who: str) -> None:
        """Insist on a run that came to its end.

        Args:
            who: the tool that was asked, for the message.
        """
        if self.failure is not None:
            raise CheckError(f"{who}: {self.failure}") from self.failure.error

    def next_call(self, call: CallRow) -> CallRow | None:
        """The call that takes a result of `call` as it is, the first if there are several."""
        return next((c for c in self.consumers(call) if any(x.producer == call.index for x in c.inputs)), None)


def operators_of(model: nn.Module) -> dict[str, nn.Module]:
    """The operators of a model by path; what is inside an operator, and what fusion left behind, is not listed."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            if id(child) in seen or isinstance(child, (nn.Identity, FusedAway)):
                continue
            if getattr(child, "is_before_cpu", False) and not isinstance(model, fx.GraphModule):
                continue  # in a model's own forward it runs inside the operator of the CPU
            seen.add(id(child))
            if isinstance(child, (nn.ParameterList, nn.ParameterDict)):  # which nobody calls
                continue
            if type(child) is not nn.Module and is_leaf(child):  # a bare Module only holds others
                found[prefix + name] = child
            else:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return found


@dataclass(frozen=True)
class _Mark:
    """What is known of a tensor of this run.

    Args:
        seen: what it was as a result, and its `state_of` then.
    """

    dtype: str
    producer: int | None
    origin: int | None
    seen: tuple[SeenTensor, Any] | None = None


class _Recorder:
    """Makes rows of the calls of a model that is watched, and forgets their tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.operators = operators_of(model)
        self.calls: list[CallRow] = []
        self.uses: Counter[int] = Counter()
        self.functions: dict[int, dict[str, None]] = defaultdict(dict)
        self._modules = set(self.operators.values())
        self._marks = TensorNotes()

    def __call__(self, call: OperatorCall) -> None:
        if call.module is None:
            self._follow(call)
        elif call.module in self._modules:
            self._add(call, call.module)

    def _dtype(self, x: Tensor) -> str:
        mark = self._marks.get(x)
        return mark.dtype if mark is not None and str(x.dtype) == "torch.float32" else str(x.dtype)

    def _seen(self, x: Tensor, dtype: str, producer: int | None, origin: int | None) -> SeenTensor:
        values = x.as_real() if isinstance(x, QTensor) else x
        low = high = None
        if values.is_floating_point() and values.numel():
            low, high = (float(v) for v in torch.aminmax(values.detach()))
        return SeenTensor(dtype, tuple(values.shape), low, high, producer, origin)

    def _input(self, x: Tensor) -> SeenTensor:
        mark = self._marks.get(x)
        if mark is None:
            return self._seen(x, self._dtype(x), None, None)
        if mark.producer is not None:
            self.uses[mark.producer] += 1
        if mark.seen is not None and mark.seen[1] == state_of(x):
            return mark.seen[0]
        return self._seen(x, self._dtype(x), mark.producer, mark.origin)

    def _add(self, call: OperatorCall, module: nn.Module) -> None:
        """An operator was called."""
        index = len(self.calls)
        inputs = tuple(map(self._input, call.inputs))
        cast = getattr(module, "activation_post_process", None)
        is_half = isinstance(cast, FakeCast) and cast.dtype == torch.float16
        outputs = []
        for x in call.outputs:
            dtype = "torch.float16" if is_half and str(x.dtype) == "torch.float32" else str(x.dtype)
            outputs.append(self._seen(x, dtype, index, index))
            self._marks[x] = _Mark(dtype, index, index, (outputs[-1], state_of(x)))
        # A traced `x * n` learns that n is a number when it runs.
        method = call.method.removesuffix("_scalar") if call.is_generated else call.method
        self.calls.append(CallRow(index, call.path, module, method, call.repetition, inputs, tuple(outputs)))

    def _follow(self, call: OperatorCall) -> None:
        """A function was called: what it gives still comes from the operator before it."""
        marks = [mark for mark in map(self._marks.get, call.inputs) if mark is not None]
        for mark in marks:
            if mark.producer is not None:
                self.uses[mark.producer] += 1
            if mark.origin is not None and not (call.row is not None and call.row.does_nothing):
                self.functions[mark.origin][getattr(call.function, "__name__", str(call.function))] = None
        for x in call.outputs if marks else ():
            if x not in self._marks:
                is_half = marks[0].dtype == "torch.float16" and str(x.dtype) == "torch.float32"
                self._marks[x] = _Mark(marks[0].dtype if is_half else str(x.dtype), None, marks[0].origin)

    def outputs(self, out: Any) -> frozenset[int]:
        """The calls whose results are results of the model."""
        marks = [mark for mark in map(self._marks.get, tensors_of(out)) if mark is not None]
        producers = [mark.producer for mark in marks if mark.producer is not None]
        self.uses.update(producers)
        return frozenset(producers)

    def failure(self, error: Exception, path: str | None) -> Failure:
        """Where an error came from."""
        last = self.calls[-1].name if self.calls else ""
        return Failure(error, path or "", error_line(error), last)


def _run_in_training(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[set[str], Failure | None]:
    """The operators that run in training mode; those up to an error, if there is one: losses may want targets."""
    recorder = _Recorder(model)
    model.train()
    with Watch(model, recorder) as watch:
        try:
            model(*fresh(args), **fresh(kwargs))
        except Exception as error:
            return {call.path for call in recorder.calls}, recorder.failure(error, watch.failed_in)
    return {call.path for call in recorder.calls}, None


@torch.no_grad()
def record_calls(
    model: nn.Module,
    example_inputs: Any,
    kwargs: dict[str, Any] | None = None,
    comparison: FloatComparison | None = None,
    also: Consumer | None = None,
) -> Recording:
    """Run a model once in eval mode and give the calls of its operators; values are those of the float model.

    An error of the model ends the recording and is part of it. A model with operators that did not run is run once
    more, in training mode, to see which of them it has for training.

    Args:
        example_inputs: the model's arguments, as `prepare` takes them.
        kwargs: keyword arguments of the model.
        comparison: is told of the run.
        also: is told of each call in eval mode.
    """
    args, kwargs = arguments_of(model, example_inputs, kwargs)
    recorder = _Recorder(model)
    results: frozenset[int] = frozenset()
    out = failure = None
    training_only: set[str] = set()
    training_failure = None
    with undisturbed(model), hidden_parts():
        model.eval()
        set_fake_quantize(model, FakeQuantState._FLOAT)
        with Watch(model, recorder if also is None else both(recorder, also)) as watch:
            try:
                with comparison or nullcontext():
                    out = model(*fresh(args), **fresh(kwargs))
                results = recorder.outputs(out)
            except Exception as error:
                failure = recorder.failure(error, watch.failed_in)
        if comparison is not None:
            comparison.conclude(out)
        unused = recorder.operators.keys() - {call.path for call in recorder.calls}
        if unused and failure is None:
            called, training_failure = _run_in_training(model, args, kwargs)
            training_only = unused & called
    return Recording(
        tuple(recorder.calls),
        recorder.operators,
        dict(recorder.uses),
        {index: tuple(names) for index, names in recorder.functions.items()},
        results,
        frozenset(training_only),
        training_failure,
        failure,
        note_of(model, "march"),
        {path: reason_of(model, path) for path in recorder.operators},
    )
