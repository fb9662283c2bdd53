"""The models that run in this thread, each of them called by the one before.

A prepared model runs its own forward and needs to know where in it a function is called. That is the state of one run:
a prepared model that another one calls, such as a teacher, has a run of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch.overrides import TorchFunctionMode

from horizon_plugin_pytorch.asking.stack import CallInProgress
from horizon_plugin_pytorch.asking.who import model_asks, package_asks, user_asks


class EmptyIsZero(TorchFunctionMode):
    """``torch.empty`` gives zeros: what happens to be in memory is in the range of no tensor.

    >>> import torch
    >>> with EmptyIsZero():
    ...     torch.empty(2)
    tensor([0., 0.])
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **kwargs or {})
        return out.zero_() if func is torch.empty else out


class Run:
    """A call of a model, or of one of its modules by itself, that has not returned.

    Args:
        handler: answers ``handler(function, args, kwargs)`` for functions on quantized tensors, with NotImplemented
            where it leaves them alone; None while a float model is recorded.
        root: the module that was called.
        path: its path in the model.
        recorder: who records the model.
        call: that of `root`; it tells when it is over.
    """

    def __init__(
        self,
        handler: Any = None,
        root: nn.Module | None = None,
        path: str = "",
        recorder: Any = None,
        call: CallInProgress | None = None,
    ) -> None:
        self.handler, self.root, self.recorder, self._call = handler, root, recorder, call
        self.prefix = f"{path}." if path else ""
        self.scopes: list[str] = []  # paths of the modules whose forward is running
        self._children: list[tuple[str, nn.Module, dict[str, nn.Module | None]]] = []  # what they had before
        self.counts: Counter[Any] = Counter()  # how often each call site was met
        self.fused: dict[str, tuple[Any, Any]] = {}  # the last step of each fused module, and what it gave
        self.mode: TorchFunctionMode | None = None  # sees calls on ordinary tensors

    @property
    def scope(self) -> str:
        """Path of the module whose forward is running."""
        return self.scopes[-1] if self.scopes else ""

    def enter(self, path: str, module: nn.Module) -> None:
        """The forward of a module begins."""
        self.scopes.append(path)
        # What was made for a call may be replaced by its QAT form in another thread, which meets it at the same time.
        own = {name: child for name, child in module._modules.items() if not name.startswith("_generated_")}
        self._children.append((path, module, own))

    def leave(self, path: str) -> None:
        """It has ended, and with it what an error left behind."""
        while self.scopes.pop() != path:
            pass
        while self._restore() != path:
            pass

    def _restore(self) -> str:
        """A forward that puts a new module into `self` would lose the prepared one."""
        path, module, children = self._children.pop()
        module._modules.update(children)
        return path

    def is_over(self) -> bool:
        """True if the call ended with an exception that torch's hooks did not see."""
        return self._call is not None and self._call.is_over()

    def begin(self) -> None:
        """The model begins to run."""
        _THREAD.runs.append(self)
        if self.mode is not None:
            _push_on_torch_function_stack(self.mode)

    def end(self) -> None:
        """It has run, and with it those that it called."""
        while self._children:
            self._restore()
        above = []
        while self.mode is not None and _len_torch_function_stack():
            mode = _pop_torch_function_stack()
            if mode is self.mode:
                break
            above.append(mode)  # the user's, who interrupted the model and began something else
        for mode in reversed(above):
            _push_on_torch_function_stack(mode)
        del _THREAD.runs[_THREAD.runs.index(self) :]

    def resolve(self, path: str) -> nn.Module:
        """The module at a path of the model."""
        module: Any = self.root
        if f"{path}." != self.prefix and path:
            for name in path.removeprefix(self.prefix).split("."):
                module = module._modules[name]
        return module


class _Forward(NamedTuple):
    """A forward of a model whose code nobody saw before."""

    number: int
    model: nn.Module
    call: CallInProgress


class _Thread(threading.local):
    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.forwards: list[_Forward] = []


_THREAD = _Thread()


_NUMBERS = itertools.count(1)


def _forwards() -> list[_Forward]:
    """The forwards that run; those that ended where torch calls no hooks, as after a KeyboardInterrupt, do no more."""
    forwards = _THREAD.forwards
    while forwards and forwards[-1].call.is_over():
        forwards.pop()
    return forwards


def current_forward() -> int:
    """The number of the forward that runs, of a model whose code nobody saw before; 0 if there is none."""
    forwards = _forwards()
    return forwards[-1].number if forwards else 0


def begin_forward(model: nn.Module) -> int:
    """A forward of such a model begins: its number is greater than all before."""
    number = next(_NUMBERS)
    _forwards().append(_Forward(number, model, CallInProgress()))
    return number


def end_forward() -> None:
    """It has ended, and the one that called it goes on; one that raised may be forgotten already."""
    forwards = _forwards()
    if forwards and forwards[-1].call.is_this():
        forwards.pop()


HYBRID = "_runs_functions_in_float"  # an attribute of such a model: functions without a quantized form run in float


def is_hybrid() -> bool:
    """May functions that know no scales take quantized tensors, as real values?"""
    forwards = _forwards()
    return bool(forwards) and HYBRID in forwards[-1].model.__dict__


def is_of_model(x: Any) -> bool:
    """Is something a parameter or buffer of the model whose forward is numbered?"""
    forwards = _forwards()
    model = forwards[-1].model if forwards else None
    return model is not None and any(x is own for own in itertools.chain(model.parameters(), model.buffers()))


def current() -> Run | None:
    """What runs now: the innermost run that is not over."""
    runs = _THREAD.runs
    while runs and runs[-1].is_over():
        runs[-1].end()
    return runs[-1] if runs else None


def innermost() -> Run:
    """What runs now, asked by code that it calls."""
    return _THREAD.runs[-1]


def interceptor() -> Any:
    """What functions on quantized tensors are sent to, or None."""
    run = current()
    return None if run is None else run.handler


def is_any_running() -> bool:
    """Is a model at work in this thread that runs its own forward?"""
    return bool(_forwards()) or (bool(_THREAD.runs) and current() is not None)


def is_in_forward() -> bool:
    """Does code of a prepared model run that was not seen before it ran?"""
    return bool(_forwards()) or interceptor() is not None


def runs_unseen_code() -> bool:
    """Does code of a prepared model run that nobody saw when the model was prepared: in eager mode, or wrapped code?"""
    model = interceptor()
    return bool(_forwards()) if model is None else not model.was_seen


def asked_by_model() -> bool:
    """True if the function that calls this one must answer as in float: code of a model that runs asks it.

    The model was prepared by running it, or is code that tracing did not enter. Torch's functions ask for the code that
    called them. This package and tools (`asking.as_tool`) get the real answer.
    """
    return interceptor() is not None and not package_asks(2) and model_asks(2)


def asked_while_running() -> bool:
    """As `asked_by_model`, and also true for the forward of a model that was prepared in eager mode."""
    if package_asks(2):
        return False
    is_seen = interceptor() is not None
    return (is_seen or bool(_forwards())) and model_asks(2, has_call=not is_seen)


def asked_by_forward() -> bool:
    """As `asked_by_model`, but torch, which has to know what it deals with, gets the real answer as well."""
    return user_asks(2) and interceptor() is not None and model_asks(2)


def asked_in_forward() -> bool:
    """True if user code that a module runs asks, as a forward in eager mode does, rather than a script or a tool."""
    return user_asks(2) and model_asks(2, has_call=True)


@contextmanager
def running(run: Run) -> Iterator[None]:
    """A model runs in here."""
    run.begin()
    try:
        yield
    finally:
        run.end()
