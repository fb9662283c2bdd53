"""Where a function is called: the module whose forward is running, and the line and instruction within it.

Recording a model and running the prepared one name call sites the same way, so a call finds the module that was made
for it however often, and in whatever order, the lines around it run.
"""

from __future__ import annotations

import dis
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from torch import Tensor, fx, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as torch_module

from horizon_plugin_pytorch.errors import UnknownCallError, at, is_package_code, is_user_code
from horizon_plugin_pytorch.operators.table import Call
from horizon_plugin_pytorch.running import Run, current, innermost
from horizon_plugin_pytorch.runtime.compiled import refuse_compiled
from horizon_plugin_pytorch.runtime.hooks import keep
from horizon_plugin_pytorch.runtime.real_tensor import outputs

_MODULE_FILE = torch_module.__file__


Place = tuple[str, int, int]


@dataclass(frozen=True)
class CallSite:
    """A place in the user's code.

    Args:
        scope: path of the module whose forward is running; a dynamic block adds its name.
        calls: the chain of user code from that forward to the call: function, instruction, and a checksum of the
            function's code. No file is named, so that the model can be loaded where the source is elsewhere.
        name: the operator that is called there; empty for a module.
        occurrence: how often it was called there before, since the model began to run; 0 where that does not matter.
        line: ``file.py:41`` of the innermost user code, for messages; it is not part of the identity.
    """

    scope: str
    calls: tuple[Place, ...]
    name: str
    occurrence: int = 0
    line: str = field(default="", compare=False)


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module.

    Args:
        path: the module.
        index: how often it was called before, since the model began to run.
    """

    path: str
    index: int


@dataclass(frozen=True)
class Attribute:
    """A parameter or buffer of the model, among the settings of a module."""

    path: str


@dataclass(frozen=True)
class Computed:
    """A weight that the model computes of its parameters, among the settings of a layer; it is given at each call."""


@dataclass(frozen=True)
class Variant:
    """A module that was made for a call site, with the settings it was made for.

    A line that runs again with other settings, such as another axis, has another module; a line that runs again with
    the same ones has the same.

    Args:
        path: where the module is.
        factory: what made it.
        settings: the factory's arguments.
        numbers: the arguments of the call, by position, that are tensors of one number, which it takes as numbers.
    """

    path: str
    factory: str
    settings: dict[str, Any]
    numbers: tuple[int, ...] = ()

    @staticmethod
    def of(path: str, call: Call, numbers: tuple[int, ...] = ()) -> Variant:
        """The variant that a module at that path is."""
        return Variant(path, call.factory.__qualname__, {k: _plain(v) for k, v in call.settings.items()}, numbers)

    def differences(self, call: Call, read: Callable[[str], Any]) -> dict[str, tuple[Any, Any]]:
        """Settings that a call wants otherwise, and that the module cannot follow: what it has, and what is wanted.

        Args:
            read: gives the parameter or buffer at a path.
        """
        if self.factory != call.factory.__qualname__:
            return {"form": (self.factory, call.factory.__qualname__)}
        wanted = {k: _plain(v) for k, v in call.settings.items() if k not in call.follows}
        return {
            name: (self.settings.get(name), value)
            for name, value in wanted.items()
            if not _is_same(self.settings.get(name), value, read)
        }

    def followed(self, call: Call) -> dict[str, Any]:
        """Settings that differ and that the module's forward takes."""
        wanted = {name: call.settings[name] for name in call.follows if call.settings.get(name) is not None}
        return {name: value for name, value in wanted.items() if self.settings.get(name) != _plain(value)}

    def computed(self, call: Call) -> dict[str, Any]:
        """Weights that the model computed for this call."""
        return {name: call.settings[name] for name, known in self.settings.items() if isinstance(known, Computed)}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if not isinstance(value, fx.Node):
        return value
    return Computed() if value.meta.get("is_weight") else Attribute(str(value.target))


def _is_same(known: Any, value: Any, read: Callable[[str], Any]) -> bool:
    if isinstance(known, Computed):
        return isinstance(value, (Computed, Tensor))
    if isinstance(known, Attribute):
        return known == value or read(known.path) is value
    return not isinstance(value, (Tensor, Attribute)) and bool(known == value)


def is_recording() -> bool:
    """Is a model being recorded in this thread?"""
    run = current()
    return run is not None and run.recorder is not None


def current_scope() -> str:
    """Path of the module whose forward is running."""
    run = current()
    return run.scope if run is not None else ""


def calling_scope(path: str) -> str | None:
    """Path of the module that calls the one at `path`, which may run already; None if none of the model does."""
    run = current()
    scopes = [] if run is None else run.scopes
    scopes = scopes[:-1] if scopes[-1:] == [path] else scopes
    return scopes[-1] if scopes else None


def counted(site: CallSite, what: str = "") -> CallSite:
    """A call site with its occurrence, and count it.

    Args:
        what: the module that is called there.
    """
    run = current()
    assert run is not None
    occurrence = run.counts[site, what]
    run.counts[site, what] += 1
    return replace(site, occurrence=occurrence)


@contextmanager
def entered(scope: str) -> Iterator[None]:
    """Run code of the running model in a scope."""
    run = current()
    assert run is not None
    run.scopes.append(scope)
    try:
        yield
    finally:
        run.scopes.pop()


@contextmanager
def block(name: str) -> Iterator[None]:
    """Run a dynamic block of that name in the current scope."""
    run = current()
    if run is None:  # a float model
        yield
        return
    scope = f"{run.scope}.{name}" if run.scope else name
    recorded = nullcontext() if run.recorder is None else run.recorder.block(here(scope))
    with recorded, entered(scope):
        yield


def here(name: str, has_line: bool = True) -> CallSite:
    """The call site of the code that is running now, from the innermost user code up to the running forward.

    Args:
        has_line: is its line wanted? To find it takes longer than all the rest.
    """
    return _site(sys._getframe(1), innermost().scope, name, has_line)


def caller(scope: str) -> CallSite:
    """The call site of the module that is being called now, in the forward of the module at `scope`."""
    frame: Any = sys._getframe(1)
    while frame is not None and is_package_code(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename == _MODULE_FILE:  # the call itself
        frame = frame.f_back
    return _site(frame, scope, "")


def is_called() -> bool:
    """Is the forward that runs the code which asks called by nn.Module's call, as in ``self.conv(x)``?

    ``self.conv.forward(x)`` runs none of a module's hooks.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and is_package_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _MODULE_FILE


_CACHE, _EXTENDED_ARG = dis.opmap.get("CACHE", -1), dis.opmap["EXTENDED_ARG"]
_PRECALL, _CALL = dis.opmap.get("PRECALL", -1), dis.opmap.get("CALL", -1)


class _Code:
    """What call sites tell of a function.

    An instruction is where it begins, however the interpreter specialises it while it is warm: a call that is inlined
    stands at the end of its instruction's cache (Python 3.11 and 3.12), and one of a builtin moves from CALL to the
    PRECALL before it (3.11).
    """

    def __init__(self, frame: FrameType) -> None:
        self.code = frame.f_code
        file = self.code.co_filename
        self.is_module_call = file == _MODULE_FILE
        self.is_user, self.is_package = is_user_code(file), is_package_code(file)
        self.is_mode = self.code.co_name == "__torch_function__"
        self.file = file.rpartition("/")[2]
        self.name = f"{frame.f_globals.get('__name__')}.{getattr(self.code, 'co_qualname', self.code.co_name)}"
        code = self.code.co_code  # not specialised
        self.checksum = zlib.crc32(code)
        self._beginnings = _beginnings(code)

    def place(self, frame: FrameType) -> Place:
        """The instruction that runs."""
        return self.name, self._beginnings[frame.f_lasti // 2], self.checksum


_CODES: dict[int, _Code] = {}  # by id: Python's own hash of code reads all of it


def _code(frame: FrameType) -> _Code:
    known = _CODES.get(id(frame.f_code))
    if known is None:
        known = _CODES[id(frame.f_code)] = _Code(frame)
    return known


def _beginnings(code: bytes) -> list[int]:
    """For each pair of bytes, the offset at which its instruction begins; PRECALL and CALL are one."""
    found, beginning, last = [], 0, -1
    for offset in range(0, len(code), 2):
        operation = code[offset]
        if operation not in (_CACHE, _EXTENDED_ARG):
            if (last, operation) != (_PRECALL, _CALL):
                beginning = offset
            last = operation
        found.append(beginning)
    return found


def _site(frame: Any, scope: str, name: str, has_line: bool = True) -> CallSite:
    calls: list[Place] = []
    line = ""
    outermost: Place | None = None
    while frame is not None:
        code = _code(frame)
        if code.is_module_call:  # above it is another scope
            break
        if code.is_mode:  # it passes on a call that was made above it
            calls, line, outermost = [], "", None
        elif code.is_user:
            if has_line and not line:
                line = f"{code.file}:{frame.f_lineno}"
            outermost = code.place(frame)
            calls.append(outermost)
        elif not code.is_package:
            outermost = code.place(frame)
        frame = frame.f_back
    if outermost is not None and (not calls or calls[-1] != outermost):
        calls.append(outermost)  # a forward that torch wrote: its lines are as different as anybody's
    return CallSite(scope, tuple(calls), name, line=line)


def check_source(site: CallSite, known: Iterable[CallSite]) -> None:
    """See that a call site, which is not among the known ones, is not one of them before its source was changed.

    Raises:
        UnknownCallError: when it is.
    """
    checksums = {name: checksum for other in known for name, _, checksum in other.calls}
    for name, _, checksum in site.calls:
        if checksums.get(name, checksum) != checksum:
            raise UnknownCallError(
                f"the source of `{name}` {at(site.scope, site.line)} changed since the model was prepared, or it was "
                "prepared with another version of Python: which module is for which call is not known any more. "
                "Prepare the model again and load the `state_dict`."
            )


class Scope:
    """Forward hooks of a module that keep the running scope: functions in its forward are at its path.

    Args:
        path: the module's path.
        handler: the model's dispatcher.
    """

    def __init__(self, path: str, handler: Any) -> None:
        self.path, self.handler = path, handler

    def own_run(self) -> Run | None:
        """The run of this model, if it is the innermost."""
        run = current()
        return run if run is not None and run.handler is self.handler else None

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the forward."""
        run = self.own_run()
        if run is not None:
            run.enter(self.path, module)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """After the forward, also after an error in it; without `enter` where another hook failed before."""
        run = self.own_run()
        if run is not None and self.path in run.scopes:
            run.leave(self.path)

    def attach(self, module: nn.Module) -> None:
        """Register the hooks."""
        keep(module.register_forward_pre_hook, self.enter, with_kwargs=True, prepend=True)
        keep(module.register_forward_hook, self.leave, with_kwargs=True, always_call=True)


class ScopeHooks(Scope):
    """The hooks of a model that keeps its forward: the outermost module also starts and stops `handler`."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            refuse_compiled(type(module).__name__, at(self.path))
        if self.own_run() is None:
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != _MODULE_FILE:
                frame = frame.f_back
            self.handler.start(Run(self.handler, module, self.path, frame=frame))
        super().enter(module, args, kwargs)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        run = self.own_run()
        if run is None or self.path not in run.scopes:
            return None
        super().leave(module, args, kwargs, out)
        if run.scopes:
            return None
        self.handler.stop(run, out)
        return outputs(out)


def unmet_module() -> tuple[nn.Module | None, str]:
    """The innermost module that runs now, and the line of user code that calls it."""
    module, frame = None, sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if module is None and code.co_filename == _MODULE_FILE:
            module = frame.f_locals.get("self")
        elif module is not None and is_user_code(code.co_filename):
            return module, f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return module, ""


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
