"""Where a function is called: the module whose forward is running, and the line and instruction within it.

Recording a model and running the prepared one name call sites the same way, so a call finds the module that was made
for it however often, and in whatever order, the lines around it run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn
from torch.compiler import is_dynamo_compiling

from horizon_plugin_pytorch.asking.call_sites import Place, calls_to_here, calls_to_module
from horizon_plugin_pytorch.asking.stack import CallInProgress
from horizon_plugin_pytorch.errors import UnknownCallError, at
from horizon_plugin_pytorch.operators.table import Call
from horizon_plugin_pytorch.running import Run, current, innermost
from horizon_plugin_pytorch.runtime.compiled import refuse_compiled
from horizon_plugin_pytorch.runtime.hooks import keep
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.runtime.real_tensor import outputs
from horizon_plugin_pytorch.sharing import shows_the_same


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
    return Computed() if notes(value).is_weight else Attribute(str(value.target))


def _is_same(known: Any, value: Any, read: Callable[[str], Any]) -> bool:
    if isinstance(known, Computed):
        return isinstance(value, (Computed, Tensor))
    if isinstance(known, Attribute):
        return known == value or shows_the_same(read(known.path), value)
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
    calls, line = calls_to_here(has_line)
    return CallSite(innermost().scope, calls, name, line=line)


def caller(scope: str) -> CallSite:
    """The call site of the module that is being called now, in the forward of the module at `scope`."""
    calls, line = calls_to_module()
    return CallSite(scope, calls, "", line=line)


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
            self.handler.start(Run(self.handler, module, self.path, call=CallInProgress()))
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
