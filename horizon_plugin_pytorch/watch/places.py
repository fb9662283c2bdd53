"""Where the running model makes a call: the path of the module whose code it is, and the line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from enum import Enum
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import fx, nn

from horizon_plugin_pytorch import nn as nn_folder
from horizon_plugin_pytorch.asking.functions import code_of, file_and_name
from horizon_plugin_pytorch.asking.owners import is_package_code, is_user_code
from horizon_plugin_pytorch.asking.stack import (
    CallInProgress,
    Running,
    innermost_running,
    running_functions,
    running_handler,
)
from horizon_plugin_pytorch.capture.graph_lines import places_of_lines
from horizon_plugin_pytorch.runtime import leaf

_FUNCTIONS = os.path.dirname(nn_folder.__file__)  # such as `window_partition`, which is made of torch's functions


class _Owner(Enum):
    """Whose code a function is."""

    USER = "the user's"
    PACKAGE = "of this package"
    PASSING = "of torch, or what passes calls of the user's on"
    GRAPH = "generated for a graph"


class Place(NamedTuple):
    """A line of the user's model.

    Args:
        line: ``model.py:41``.
        scope: the module whose forward it is, where a graph knows it; None where the running modules tell.
        method: the method of a FloatFunctional that makes the call, and is nothing else.
    """

    line: str
    scope: str | None = None
    method: Running | None = None


NOWHERE = Place("")
_NO_LINE = None, ""


class Places:
    """Finds the places of calls in a model.

    Args:
        modules: of the model. Its graphs, if it has any, know the lines that they were traced from.
        operators: functions that are operators themselves: what they call is not the model's.
        methods: methods that call one function, which is the operator.
        handlers: functions of this package that modes hand calls to, and that make them: of another watch, too.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        operators: Iterable[Callable] = (),
        methods: Iterable[Callable] = (),
        handlers: Iterable[Callable] = (),
    ) -> None:
        # Code is known by its id: to Python, the same lines in two files are equal, and its hash reads all of them.
        self._operators = {id(code_of(f)) for f in operators}
        self._methods = {id(code_of(f)) for f in methods}
        self._handlers = {id(code_of(f)) for f in handlers}
        graphs: list[Any] = [m for m in modules if issubclass(type(m), fx.GraphModule)]
        self._lines: dict[int, dict[int, tuple[str, str]]] = {}  # of the code of graphs
        self._graphs = {id(code_of(type(m).forward)): m for m in graphs}
        self._owners: dict[int, tuple[CodeType, _Owner]] = {}
        self._passed: set[int] = set()  # ids of code that is not the model's
        self._passing: set[int] = set()  # of these, code that passes on calls of functions
        self._call: CallInProgress | None = None  # of the model
        self._outermost: Running | None = None  # what called it

    def begin(self) -> None:
        """The model begins to run: a hook of the module that is called asks. What is above is not the model's code."""
        self._call = CallInProgress()
        passing = (_Owner.PASSING, _Owner.PACKAGE)
        self._outermost = next((f for f in running_functions() if self._owner(f.code) not in passing), None)

    def end(self) -> None:
        """The model has run."""
        self._call = self._outermost = None

    def is_over(self) -> bool:
        """True if the call of the model has ended, by whatever way."""
        return self._call is None or self._call.is_over()

    def of_module(self) -> str:
        """The innermost line of the model's code that runs; empty if there is none."""
        while True:
            running = innermost_running(self._passed, skipped=3)  # this function, and the two of the watch around it
            if running is None or running == self._outermost:
                return ""
            code = running.code
            lines = self._lines.get(id(code))
            if lines is not None:  # of a graph, as most calls are
                return lines.get(running.number, _NO_LINE)[1]
            owner = self._owner(code)
            if owner is _Owner.USER:
                return running.line
            if owner is _Owner.GRAPH:
                return self._place(running, owner).line

    def of_function(self) -> Place | None:
        """The line of the model that calls the function which a mode sees; None if other code calls it."""
        running, method = running_handler(), None  # the watch itself
        while running is not None:
            running = running.around(self._passing)
            if running is None or running == self._outermost:
                break
            owner = self._owner(running.code)
            if id(running.code) in self._methods:
                method = running
            elif owner is _Owner.PACKAGE:
                return None
            elif owner is not _Owner.PASSING:
                place = self._place(running, owner)
                return place if method is None else place._replace(method=method)
        return NOWHERE  # of a forward that torch wrote, such as that of nn.Sequential

    def _owner(self, code: CodeType) -> _Owner:
        known = self._owners.get(id(code))
        if known is None:
            known = self._owners[id(code)] = (code, self._find_owner(code))
            if known[1] in (_Owner.PASSING, _Owner.PACKAGE):
                self._passed.add(id(code))
            if known[1] is _Owner.PASSING and id(code) not in self._methods:
                self._passing.add(id(code))
        return known[1]

    def _find_owner(self, code: CodeType) -> _Owner:
        if id(code) in self._graphs:
            return _Owner.GRAPH
        if id(code) in self._operators:
            return _Owner.PACKAGE
        file, name = file_and_name(code)
        # It passes on a call that was made above it.
        is_mode = name == "__torch_function__" or id(code) in self._handlers
        is_ours = is_package_code(file) and os.path.dirname(file) != _FUNCTIONS and file != leaf.__file__
        is_passing = is_mode or not (is_ours or is_user_code(file))
        if is_passing:
            return _Owner.PASSING
        return _Owner.PACKAGE if is_ours else _Owner.USER

    def _place(self, running: Running, owner: _Owner) -> Place:
        if owner is _Owner.USER:
            return Place(running.line)
        code = running.code
        lines = self._lines.get(id(code))
        if lines is None:
            lines = self._lines[id(code)] = _lines_of(self._graphs[id(code)], code)
        scope, line = lines.get(running.number, _NO_LINE)
        return Place(line, scope)


_LINES: WeakKeyDictionary[nn.Module, tuple[CodeType, dict[int, tuple[str, str]]]] = WeakKeyDictionary()


def _lines_of(graph: fx.GraphModule, code: CodeType) -> dict[int, tuple[str, str]]:
    """`places_of_lines`, read once while the graph has the same code."""
    known = _LINES.get(graph)
    if known is None or known[0] is not code:
        known = _LINES[graph] = (code, places_of_lines(graph))
    return known[1]
