"""Where a function is called: the module whose forward is running, and the line and instruction within it.

Recording a model and running the prepared one name call sites the same way, so a call finds the module that was made
for it however often, and in whatever order, the lines around it run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from horizon_plugin_pytorch.errors import is_user_code

_MODULE_FILE = torch_module.__file__


@dataclass(frozen=True)
class CallSite:
    """A place in the user's code.

    Args:
        scope: path of the module whose forward is running; a dynamic block adds its name.
        calls: the chain of user code from that forward to the call: file, function's first line, and instruction.
        name: the operator that is called there.
        line: ``file.py:41`` of the innermost user code, for messages; it is not part of the identity.
    """

    scope: str
    calls: tuple[tuple[str, int, int], ...]
    name: str
    line: str = field(default="", compare=False)


class _State(threading.local):
    """What runs in this thread."""

    def __init__(self) -> None:
        self.scopes: list[str] = []
        self.is_recording = False


_STATE = _State()


def is_recording() -> bool:
    """Is a model being recorded in this thread?"""
    return _STATE.is_recording


@contextmanager
def recording() -> Iterator[None]:
    """A model is recorded in here."""
    _STATE.is_recording = True
    try:
        yield
    finally:
        _STATE.is_recording = False


def current_scope() -> str:
    """Path of the module whose forward is running."""
    return _STATE.scopes[-1] if _STATE.scopes else ""


@contextmanager
def entered(scope: str) -> Iterator[None]:
    """Run code in a scope."""
    _STATE.scopes.append(scope)
    try:
        yield
    finally:
        _STATE.scopes.pop()


def here(name: str) -> CallSite:
    """The call site of the code that is running now, from the innermost user code up to the running forward."""
    calls = []
    line = ""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _MODULE_FILE:  # nn.Module's call: above it is another scope
            break
        if is_user_code(code.co_filename):
            if not line:
                line = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
            calls.append((code.co_filename, code.co_firstlineno, frame.f_lasti))
        frame = frame.f_back
    return CallSite(current_scope(), tuple(calls), name, line)


class ScopeHooks:
    """Forward hooks of a module that keep the running scope; the outermost one also starts and stops `handler`.

    Args:
        path: the module's path.
        handler: what QTensors ask while the module runs; see `qtensor.intercepted`.
    """

    def __init__(self, path: str, handler: Any) -> None:
        self.path, self.handler = path, handler

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the forward."""
        if not _STATE.scopes:
            self.handler.start(module, self.path)
        _STATE.scopes.append(self.path)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """After the forward, also after an error in it."""
        while _STATE.scopes and _STATE.scopes.pop() != self.path:
            pass  # scopes that an error left behind
        if not _STATE.scopes:
            self.handler.stop()

    def attach(self, module: nn.Module) -> None:
        """Register the hooks."""
        module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(self.leave, with_kwargs=True, always_call=True)  # type: ignore[arg-type]


def scoped_modules(model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose forward is the user's code, with their paths; leaves and what is inside them are left out."""
    if is_leaf(model):
        return
    yield "", model
    pending = [("", model)]
    seen = {id(model)}
    while pending:
        prefix, parent = pending.pop(0)
        for name, child in parent.named_children():
            if id(child) in seen or is_leaf(child):
                continue
            seen.add(id(child))
            path = f"{prefix}.{name}" if prefix else name
            yield path, child
            pending.append((path, child))
