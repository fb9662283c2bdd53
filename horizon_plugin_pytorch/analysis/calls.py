"""The operators that a model calls, recorded by running it once, without a trace left in it."""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from horizon_plugin_pytorch.capture.tracer import is_leaf
from horizon_plugin_pytorch.config.choice import reason_of
from horizon_plugin_pytorch.errors import at, is_package_code, is_torch_code, is_user_code
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize, FakeQuantState, set_fake_quantize
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nested import fresh, tensors_of
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.notes import note_of
from horizon_plugin_pytorch.operators.table import row_of_function, row_of_method
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.runtime.located import FusedAway, PlacedModule, listening


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
class ModuleCall:
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

    calls: tuple[ModuleCall, ...]
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
    def _by_origin(self) -> dict[int, list[ModuleCall]]:
        found: dict[int, list[ModuleCall]] = defaultdict(list)
        for call in self.calls:
            for origin in {x.origin for x in call.inputs if x.origin is not None}:
                found[origin].append(call)
        return found

    def consumers(self, call: ModuleCall) -> list[ModuleCall]:
        """The calls that take results of `call`, functions between them or not."""
        return self._by_origin.get(call.index, [])

    def next_call(self, call: ModuleCall) -> ModuleCall | None:
        """The call that takes a result of `call` as it is, the first if there are several."""
        return next((c for c in self.consumers(call) if any(x.producer == call.index for x in c.inputs)), None)


def is_generated(path: str) -> bool:
    """Was the module made for a function that the model calls?"""
    return path.rpartition(".")[2].startswith("_generated_")


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
    """What is known of a tensor of this run. It is kept on the tensor: no activation lives longer for it."""

    run: object
    dtype: str
    producer: int | None
    origin: int | None


def _is_called_by_model() -> bool:
    """Did the model's own code call the function, rather than an operator of this package?"""
    frame: Any = sys._getframe(2)
    while frame is not None and is_torch_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and not is_package_code(frame.f_code.co_filename)


def _does_nothing(func: Callable) -> bool:
    row = row_of_function(func) or row_of_method(getattr(func, "__name__", ""))
    return row is not None and row[0].does_nothing


class _Watch(TorchFunctionMode):
    """Collects the calls of operators while a model runs; what runs inside an operator is not seen."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.operators = operators_of(model)
        self.calls: list[ModuleCall] = []
        self.uses: Counter[int] = Counter()
        self.functions: dict[int, dict[str, None]] = defaultdict(dict)
        self._paths = {module: path for path, module in self.operators.items()}
        self._repetitions: Counter[str] = Counter()
        self._depth = 0
        self._run = object()
        self._scopes = {module: path for path, module in reversed(list(model.named_modules()))}
        self._failed_in: str | None = None

    # -- tensors

    def _mark(self, x: Tensor) -> _Mark | None:
        mark = getattr(x, "_inspection_mark", None)
        return mark if isinstance(mark, _Mark) and mark.run is self._run else None

    def _dtype(self, x: Tensor) -> str:
        mark = self._mark(x)
        return mark.dtype if mark is not None and str(x.dtype) == "torch.float32" else str(x.dtype)

    def _seen(self, x: Tensor, dtype: str, producer: int | None, origin: int | None) -> SeenTensor:
        values = x.dequantize() if isinstance(x, QTensor) else x
        low = high = None
        if values.is_floating_point() and values.numel():
            low, high = (float(v) for v in torch.aminmax(values.detach()))
        return SeenTensor(dtype, tuple(x.shape), low, high, producer, origin)

    def _input(self, x: Tensor) -> SeenTensor:
        mark = self._mark(x)
        producer, origin = (None, None) if mark is None else (mark.producer, mark.origin)
        if producer is not None:
            self.uses[producer] += 1
        return self._seen(x, self._dtype(x), producer, origin)

    # -- events

    def enter(self, module: nn.Module, args: Any) -> None:
        self._failed_in = None
        self._depth += module in self._paths

    def leave(self, module: nn.Module, args: Any, kwargs: Any = None, out: Any = None) -> None:
        """After a module ran. After an error in it torch gives neither a result nor keyword arguments."""
        if out is not None:
            self._failed_in = None
        elif self._failed_in is None:
            self._failed_in = self._scopes.get(module)
        if module in self._paths:
            self._depth -= 1
            if out is not None:
                self._add(module, "", (args, kwargs), out)

    def method(self, module: PlacedModule, name: str, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        if name == "_run":  # all methods of a QAT FloatFunctional go through it, with the name and the float route
            name, args = args[0], args[2:]
        path = self._paths.get(module)
        if path is not None:
            if is_generated(path):  # a traced `x * n` learns that n is a number when it runs
                name = name.removesuffix("_scalar")
            self._add(module, name, (args, kwargs), out)

    def _add(self, module: nn.Module, method: str, inputs: Any, out: Any) -> None:
        if self._depth:
            return
        path, index = self._paths[module], len(self.calls)
        seen_inputs = tuple(self._input(x) for x in tensors_of(inputs))
        cast = getattr(module, "activation_post_process", None)
        is_half = isinstance(cast, FakeCast) and cast.dtype == torch.float16
        outputs = []
        for x in tensors_of(out):
            dtype = "torch.float16" if is_half and str(x.dtype) == "torch.float32" else str(x.dtype)
            x._inspection_mark = _Mark(self._run, dtype, index, index)  # type: ignore[attr-defined]
            outputs.append(self._seen(x, dtype, index, index))
        repetition = self._repetitions[path]
        self._repetitions[path] += 1
        self.calls.append(ModuleCall(index, path, module, method, repetition, seen_inputs, tuple(outputs)))

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        count = len(self.calls)
        out = func(*args, **(kwargs or {}))
        results = tensors_of(out)
        # A function that became a module has been reported as that module's call.
        if self._depth or not results or len(self.calls) != count or not _is_called_by_model():
            return out
        marks = [mark for mark in map(self._mark, tensors_of((args, kwargs))) if mark is not None]
        for mark in marks:
            if mark.producer is not None:
                self.uses[mark.producer] += 1
            if mark.origin is not None and not _does_nothing(func):
                self.functions[mark.origin][getattr(func, "__name__", str(func))] = None
        if marks:
            for x in results:
                if self._mark(x) is None:
                    is_half = marks[0].dtype == "torch.float16" and str(x.dtype) == "torch.float32"
                    dtype = marks[0].dtype if is_half else str(x.dtype)
                    x._inspection_mark = _Mark(self._run, dtype, None, marks[0].origin)  # type: ignore[attr-defined]
        return out

    def outputs(self, out: Any) -> frozenset[int]:
        """The calls whose results are results of the model."""
        marks = [mark for mark in map(self._mark, tensors_of(out)) if mark is not None]
        producers = [mark.producer for mark in marks if mark.producer is not None]
        self.uses.update(producers)
        return frozenset(producers)

    def failure(self, error: Exception) -> Failure:
        """Where an error came from."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_code(f.filename)]
        line = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        last = self.calls[-1].name if self.calls else ""
        return Failure(error, self._failed_in or "", line, last)


# -- runs that leave no trace


_HOOKS = nn.Module().__dict__.keys() - {"training", "_parameters", "_buffers", "_modules"}


def _contents(value: Any) -> Any:
    """A copy of a container that a forward may fill; None for anything else."""
    return value.copy() if isinstance(value, (dict, list, set, deque)) else None


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, (list, deque)):
        container.clear()
        container.extend(contents)
    else:
        container.clear()
        container.update(contents)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever a run changes is as it was afterwards: buffers, modes, attributes of modules, random numbers."""
    attributes = [
        (m, {k: (v, _contents(v)) for k, v in m.__dict__.items() if k not in _HOOKS}) for m in model.modules()
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random_states = (random.getstate(), torch.get_rng_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(random_states[0])
        torch.set_rng_state(random_states[1])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for module, before in attributes:
            for name in module.__dict__.keys() - before.keys() - _HOOKS:
                del module.__dict__[name]
            for name, (value, contents) in before.items():
                module.__dict__[name] = value
                if contents is not None:
                    _refill(value, contents)
            if isinstance(module, Float16):
                module._float.training = module.training
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


@contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    before = register_module_forward_pre_hook(watch.enter)
    after = register_module_forward_hook(watch.leave, with_kwargs=True, always_call=True)  # type: ignore[call-arg]
    try:
        with watch, listening(watch.method):
            yield
    finally:
        before.remove()
        after.remove()


def _run_in_training(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[set[str], Failure | None]:
    """The operators that run in training mode; those up to an error, if there is one: losses may want targets."""
    watch = _Watch(model)
    model.train()
    with _watched(watch):
        try:
            model(*fresh(args), **fresh(kwargs))
        except Exception as error:
            return {call.path for call in watch.calls}, watch.failure(error)
    return {call.path for call in watch.calls}, None


@torch.no_grad()
def record_calls(model: nn.Module, example_inputs: Any, kwargs: dict[str, Any] | None = None) -> Recording:
    """Run a model once in eval mode and give the calls of its operators; values are those of the float model.

    An error of the model ends the recording and is part of it. A model with operators that did not run is run once
    more, in training mode, to see which of them it has for training.

    Args:
        example_inputs: the model's arguments, as `prepare` takes them.
        kwargs: keyword arguments of the model.
    """
    args, kwargs = arguments_of(model, example_inputs, kwargs)
    watch = _Watch(model)
    results: frozenset[int] = frozenset()
    failure = None
    training_only: set[str] = set()
    training_failure = None
    try:
        with undisturbed(model):
            model.eval()
            set_fake_quantize(model, FakeQuantState._FLOAT)
            with _watched(watch):
                try:
                    results = watch.outputs(model(*fresh(args), **fresh(kwargs)))
                except Exception as error:
                    failure = watch.failure(error)
            unused = watch.operators.keys() - {call.path for call in watch.calls}
            if unused and failure is None:
                called, training_failure = _run_in_training(model, args, kwargs)
                training_only = unused & called
    finally:
        for x in (*tensors_of((args, kwargs)), *model.parameters(), *model.buffers()):
            x.__dict__.pop("_inspection_mark", None)  # an operator may give back what it got
    return Recording(
        tuple(watch.calls),
        watch.operators,
        dict(watch.uses),
        {index: tuple(names) for index, names in watch.functions.items()},
        results,
        frozenset(training_only),
        training_failure,
        failure,
        note_of(model, "march"),
        {path: reason_of(model, path) for path in watch.operators},
    )
