"""Who asks: everything that the package reads from Python's frames and bytecode.

A prepared model answers its own forward as the float model did (``x.dtype`` is ``torch.float32``, ``self.conv`` is an
`nn.Conv2d`), and everybody else as things are. So whoever answers has to know whose code asks: the model's, a tool's,
torch's or this package's. Call sites and lines in messages are read from the same frames.

Nothing here needs torch, so that a bare interpreter can test it.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import itertools
import os
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ContextDecorator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

__all__ = ["as_tool"]  # for users; all else is for this package


def _folder(package: str) -> str | None:
    """Where a package lives, with a slash at the end; it is found, not imported."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else os.path.dirname(spec.origin) + os.sep


_HERE = os.path.dirname(__file__) + os.sep
_OWN = (_HERE, os.path.join(os.path.dirname(os.path.dirname(__file__)), "horizon_plugin_profiler") + os.sep)
_TORCH, _NUMPY = _folder("torch") or os.devnull, _folder("numpy") or os.devnull
_MODULE_FILE = os.path.join(_TORCH, "nn", "modules", "module.py")
_CHECKPOINT_FILE = os.path.join(_TORCH, "utils", "checkpoint.py")
_TRACE_FILE = os.path.join(_TORCH, "jit", "_trace.py")

OWN_HOOKS = "_own_hooks"  # attribute of a module: the numbers of hooks that belong to the model, not to a tool


# Whose file it is.


def is_user_code(file: str) -> bool:
    """True if a source file belongs to the user, rather than to torch, numpy, this package, or to generated code.

    >>> is_user_code("/home/me/torch/model.py"), is_user_code(__file__), is_user_code("<eval_with_key>.0")
    (True, False, False)
    """
    return _owner_of(file) == _USER


def is_torch_code(file: str) -> bool:
    """True if a source file belongs to torch."""
    return _owner_of(file) == _IN_TORCH


def is_package_code(file: str) -> bool:
    """True if a source file belongs to this package, its profiler included."""
    return _owner_of(file) == _PACKAGE


_USER, _PACKAGE, _IN_TORCH, _OTHER = range(4)
_OWNERS: dict[str, int] = {}  # of the files that were met


def _owner_of(file: str) -> int:
    owner = _OWNERS.get(file)
    if owner is None:
        if file.startswith(_OWN):
            owner = _PACKAGE
        elif file.startswith(_TORCH):
            owner = _IN_TORCH
        else:
            owner = _OTHER if file.startswith(("<eval_with_key>", _NUMPY)) else _USER
        if not file.startswith("<"):  # generated code has a new name each time
            _OWNERS[file] = owner
    return owner


# Who asks.

_CALLING = frozenset({"_call_impl", "inner", "_slow_forward"})  # functions of torch that call forwards and hooks


class _Thread(threading.local):
    def __init__(self) -> None:
        self.tools: list[FrameType | None] = []  # for each tool, the call of a module in which it began to ask


_THREAD = _Thread()


class as_tool(ContextDecorator):  # noqa: N801  # read as a verb, like torch.no_grad
    """In here, the code that asks is a tool, and learns what a prepared model really holds.

    While a prepared model runs, its own code is told what it was told in float: ``x.dtype`` is ``torch.float32``,
    ``isinstance(self.conv, nn.Conv2d)``, ``self.conv.weight`` holds real numbers. A tool that looks at the model
    during the run, from a forward hook that the float model had already or from a `TorchFunctionMode`, wants the truth.
    Hooks that are registered after `prepare` need not say so: they are tools anyway.

    It counts for this thread. If the tool calls a module in here, then the forward of that module is told what it
    was told in float. Use it as a context, or as a decorator of the tool's function.

    >>> with as_tool():
    ...     pass
    >>> @as_tool()
    ... def hook(module, args, out):
    ...     print(out.dtype)
    """

    def __enter__(self) -> as_tool:
        _THREAD.tools.append(_module_call(sys._getframe(1))[0])
        return self

    def __exit__(self, *error: object) -> None:
        _THREAD.tools.pop()

    def _recreate_cm(self) -> as_tool:
        return as_tool()


def package_asks(depth: int = 1) -> bool:
    """True if code of this package called the function which calls this one.

    Args:
        depth: how many calls are between this function and the code in question.
    """
    return _owner_of(sys._getframe(depth + 1).f_code.co_filename) == _PACKAGE


def user_asks(depth: int = 1) -> bool:
    """True if code of the user, a tool or the model, called the function which calls this one.

    Args:
        depth: how many calls are between this function and the code in question.
    """
    return _owner_of(sys._getframe(depth + 1).f_code.co_filename) == _USER


def user_asks_class() -> bool:
    """True if code of the user asks for the class of what calls this function: ``isinstance(x, Tensor)``.

    Functions of torch written in C ask in the same way, from the user's frame; for them a class is a promise about
    memory, and they must have the true answer.
    """
    frame = sys._getframe(2)
    return _owner_of(frame.f_code.co_filename) == _USER and _asks_class(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _asks_class(code: CodeType, instruction: int) -> bool:
    steps = list(dis.get_instructions(code))
    now = next((step for step in steps if step.offset == instruction), None)
    if now is None or now.opname == "MATCH_CLASS" or now.argval == "__class__":
        return now is not None
    return _called_name(steps, now, ("isinstance",)) is not None


def _called_name(steps: Sequence[dis.Instruction], now: dis.Instruction, names: tuple[str, ...]) -> str | None:
    """The one of some functions that an instruction calls by its name."""
    start = now.positions and now.positions[::2][:2]  # a call begins where what is called does
    found = (
        step.argval
        for step in steps
        if step.positions and step.opname.startswith("LOAD_") and step.positions[::2][:2] == start
    )
    return next((name for name in found if name in names), None)


def user_asks_attribute() -> bool | None:
    """Does code of the user ask whether what calls this function has an attribute, ``hasattr(x, "mask")``?

    Returns:
        False if it reads the attribute, as ``x.mask``; None if it is not the user's code that does either.
    """
    frame = sys._getframe(2)
    is_user = _owner_of(frame.f_code.co_filename) == _USER
    return _asks_attribute(frame.f_code, frame.f_lasti) if is_user else None


@functools.lru_cache(maxsize=4096)
def _asks_attribute(code: CodeType, instruction: int) -> bool | None:
    steps = list(dis.get_instructions(code))
    now = next((step for step in steps if step.offset == instruction), None)
    if now is None or not now.opname.startswith(("CALL", "PRECALL")):
        return None if now is None else False
    name = _called_name(steps, now, ("hasattr", "getattr"))
    return None if name is None else name == "hasattr" or now.arg == 3  # with a default


def model_asks(depth: int = 1, has_call: bool = False) -> bool:
    """True if the code in question is the model's rather than a tool's.

    The model's are the forward of a module, the functions that it calls, and the hooks that the float model had.
    Other hooks are tools, and so is code inside `as_tool`.

    Args:
        depth: how many calls are between this function and the code in question.
        has_call: what is not called by a module at all is no model's code.
    """
    call, outermost = _module_call(sys._getframe(depth + 1))
    if _THREAD.tools and any(call is known for known in _THREAD.tools):
        return False
    if call is None:
        return not has_call
    if outermost is None or _owner_of(outermost.f_code.co_filename) != _USER:
        return True  # of torch, or of this package: they call the user's code for the model
    module = call.f_locals.get("self")
    own = itertools.chain([getattr(module, "forward", None)], _own_hooks(module))
    return _is_code_of(outermost, own)


def _module_call(frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
    """The innermost call of a module around a frame, and the outermost frame in it that is not torch's."""
    outermost = None
    while frame is not None:
        code = frame.f_code
        if code.co_name in _CALLING and code.co_filename == _MODULE_FILE:
            return frame, outermost
        if _owner_of(code.co_filename) != _IN_TORCH:
            outermost = frame
        frame = frame.f_back
    return None, outermost


def hooked_module() -> tuple[Any, bool]:
    """The module whose hook runs the code that asks, and whether the model owns that hook; None if no hook runs it.

    A hook that was registered after `prepare` is a tool's.
    """
    call, outermost = _module_call(sys._getframe(1))
    if call is None or outermost is None:
        return None, False
    module: Any = call.f_locals.get("self")
    hooks = itertools.chain(module._forward_pre_hooks.values(), module._forward_hooks.values())
    if not _is_code_of(outermost, hooks):
        return None, False
    return module, _is_code_of(outermost, _own_hooks(module))


def _is_code_of(frame: FrameType, functions: Iterable[Any]) -> bool:
    return any(frame.f_code is code for function in functions for code in _codes(function))


def _own_hooks(module: Any) -> Iterator[Any]:
    numbers = getattr(module, "__dict__", {}).get(OWN_HOOKS, ())
    for kind in ("_forward_pre_hooks", "_forward_hooks") if numbers else ():
        yield from (hook for number, hook in getattr(module, kind).items() if number in numbers)


def _codes(function: Any) -> list[CodeType]:
    """The code of a function, of a method or of an object that is called; with what its decorators wrap."""
    found = []
    while function is not None:
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        called = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
        found += [called.__code__] if hasattr(called, "__code__") else []
        function = getattr(function, "__wrapped__", None)
    return found


# Methods by which children and parameters of a module are listed; others, such as `train`, mean all of them.
_LISTING = frozenset({
    "children", "named_children", "modules", "named_modules", "forward", "keys", "values", "items",
    "__iter__", "__len__", "__getitem__", "parameters", "named_parameters",
})  # fmt: skip


def model_lists(depth: int = 1) -> bool:
    """True if code of the model lists what a module holds, itself or through a method of torch.

    Args:
        depth: how many calls are between this function and the code in question.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    method = ""
    while frame is not None and is_torch_code(frame.f_code.co_filename) and frame.f_code.co_name not in _CALLING:
        method, frame, depth = frame.f_code.co_name, frame.f_back, depth + 1
    if frame is None or is_package_code(frame.f_code.co_filename) or (method and method not in _LISTING):
        return False
    return model_asks(depth + 1)


# What runs.


class Running:
    """A function that has not returned yet, and the line that it is at."""

    __slots__ = ("_frame",)

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Running) and other._frame is self._frame

    def __hash__(self) -> int:
        return id(self._frame)

    @property
    def code(self) -> CodeType:
        """What tells functions apart: see `code_of`."""
        return self._frame.f_code

    @property
    def file(self) -> str:
        """Its source file."""
        return self._frame.f_code.co_filename

    @property
    def name(self) -> str:
        """Its name, without that of its class."""
        return self._frame.f_code.co_name

    @property
    def number(self) -> int:
        """The number of the line."""
        return self._frame.f_lineno

    @property
    def line(self) -> str:
        """``model.py:41``."""
        return _line(self._frame.f_code.co_filename, self._frame.f_lineno)

    @property
    def owner(self) -> Any:
        """Its `self`; None if it has none."""
        code = self._frame.f_code
        has_owner = "self" in code.co_varnames or "self" in code.co_freevars or "self" in code.co_cellvars
        return self._frame.f_locals.get("self") if has_owner else None  # all locals are copied for it

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a method's parameters are now, without `self`."""
        code, known = self._frame.f_code, self._frame.f_locals
        return tuple(known[name] for name in code.co_varnames[1 : code.co_argcount])


def running_functions() -> Iterator[Running]:
    """The functions that have not returned yet, from the one that asks outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield Running(frame)
        frame = frame.f_back


def innermost_running(passed: set[int]) -> Running | None:
    """The innermost function that has not returned yet, but for those whose code, by its `id`, is passed over."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_code) in passed:
        frame = frame.f_back
    return None if frame is None else Running(frame)


def running_module() -> tuple[Any, str]:
    """The innermost module that runs now, and the line of user code that calls it."""
    module = None
    for running in running_functions():
        if module is None and running.file == _MODULE_FILE:
            module = running.owner
        elif module is not None and is_user_code(running.file):
            return module, running.line
    return module, ""


def user_line() -> str:
    """The innermost line of user code that runs, as ``model.py:41``; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def user_frames() -> str:
    """The calling lines outside torch and this package, outermost first, as a traceback writes them.

    `record_stack_traces` of torch would do, but it imports the compiler, which takes two seconds.
    """
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file):
            lines.append(f'  File "{file}", line {frame.f_lineno}, in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(reversed(lines))


def levels_to_user() -> int:
    """How many calls are between the function that asks and the user's code: the `stacklevel` of a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_user_code(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def caller_globals() -> dict[str, Any]:
    """The global names of the code that called the function which calls this one."""
    return sys._getframe(2).f_globals


def is_recomputing() -> bool:
    """True inside `torch.utils.checkpoint`, which runs a part of the forward again in the backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT_FILE:
        frame = frame.f_back
    return frame is not None


def is_module_call() -> bool:
    """True if nn.Module's call, as in ``self.conv(x)``, runs the forward of this package that asks.

    ``self.conv.forward(x)`` runs none of a module's hooks.
    """
    frame = _outside_package(sys._getframe(1))
    return frame is not None and frame.f_code.co_filename == _MODULE_FILE


def is_trace_check() -> bool:
    """True if `torch.jit.trace`, which compares what a traced model gives with the model's, calls this package."""
    frame = _outside_package(sys._getframe(1))
    return frame is not None and frame.f_code.co_filename == _TRACE_FILE


def is_called_by_model() -> bool:
    """True if user code, rather than an operator of this package, called the function which calls this one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_torch_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and not is_package_code(frame.f_code.co_filename)


class CallInProgress:
    """The call of a module whose hooks run now.

    Torch calls no hooks after a KeyboardInterrupt: the frame of the call tells that it is over.
    """

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != _MODULE_FILE:
            frame = frame.f_back
        self._frame = frame

    def is_over(self) -> bool:
        """True if the call ended, by whatever way."""
        if self._frame is None:
            return False
        try:
            self._frame.clear()  # refused while it is executing
        except RuntimeError:
            return False
        return True


def _outside_package(frame: FrameType | None) -> FrameType | None:
    while frame is not None and is_package_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _line(file: str, line: int) -> str:
    return f"{file.rpartition(os.sep)[2]}:{line}"


# Where a function is called: the chain of functions, each with the instruction that runs.

Place = tuple[str, int, int]  # function, instruction, checksum of the function's code

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


def calls_to_here(has_line: bool = True) -> tuple[tuple[Place, ...], str]:
    """The user's calls from the running forward to the code that asks, innermost first, and the innermost line.

    Args:
        has_line: is the line wanted? To find it takes longer than all the rest.
    """
    return _calls(sys._getframe(1), has_line)


def calls_to_module() -> tuple[tuple[Place, ...], str]:
    """The user's calls from the running forward to the module that is being called now, and the innermost line."""
    frame = _outside_package(sys._getframe(1))
    while frame is not None and frame.f_code.co_filename == _MODULE_FILE:  # the call itself
        frame = frame.f_back
    return _calls(frame)


def _calls(frame: FrameType | None, has_line: bool = True) -> tuple[tuple[Place, ...], str]:
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
                line = _line(code.code.co_filename, frame.f_lineno)
            outermost = code.place(frame)
            calls.append(outermost)
        elif not code.is_package:
            outermost = code.place(frame)
        frame = frame.f_back
    if outermost is not None and (not calls or calls[-1] != outermost):
        calls.append(outermost)  # a forward that torch wrote: its lines are as different as anybody's
    return tuple(calls), line


# What functions are made of.


def is_user_function(function: Any) -> bool:
    """True for a function that the user wrote; builtins have no code.

    >>> is_user_function(len), is_user_function(is_user_function)
    (False, False)
    """
    code = getattr(function, "__code__", None)
    return code is not None and is_user_code(code.co_filename)


def is_library_function(function: Any) -> bool:
    """True for a function that torch, numpy or this package wrote in Python.

    >>> is_library_function(len), is_library_function(is_library_function)
    (False, True)
    """
    code = getattr(function, "__code__", None)
    return code is not None and not is_user_code(code.co_filename)


def definition_line(function: Any) -> str:
    """The line at which a function is defined, as ``model.py:41``; empty for what has no code."""
    code = getattr(function, "__code__", None)
    return "" if code is None else _line(code.co_filename, code.co_firstlineno)


def code_of(function: Any) -> CodeType:
    """What is the same for all runs of a function: `Running.code` has it."""
    return function.__code__


def file_and_name(code: CodeType) -> tuple[str, str]:
    """Where the function with this code is written, and what it is called."""
    return code.co_filename, code.co_name


def names_in(function: FunctionType) -> set[str]:
    """Attributes and globals that a function names, and strings that may be names of attributes.

    >>> sorted(names_in(lambda self: getattr(self.body, "conv")))
    ['body', 'conv', 'getattr']
    """
    return set(_names(function.__code__))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def compared_classes(function: FunctionType) -> Iterator[tuple[str, Any, bool]]:
    """Lines of a function that compare ``type(x)`` or ``x.__class__``, each with a class or its name.

    The last of each says whether it is ``type(x)``.

    >>> [found[1:] for found in compared_classes(lambda x: type(x) in (list, dict))]
    [(<class 'list'>, True), (<class 'dict'>, True)]
    >>> [found[1:] for found in compared_classes(lambda x: x.__class__.__name__ == "Tensor")]
    [('Tensor', False)]
    """
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        if "type" not in code.co_names and "__class__" not in code.co_names:
            continue
        steps = [step for step in dis.get_instructions(code) if step.positions and step.positions.lineno]
        for comparison in steps:
            if comparison.opname in ("IS_OP", "COMPARE_OP", "CONTAINS_OP"):
                inside = [step for step in steps if _is_inside(step, comparison)]
                if any(_reads_class(step) for step in inside):
                    line = _line(code.co_filename, comparison.positions.lineno or 0)  # type: ignore[union-attr]
                    is_type = any(step.argval == "type" for step in inside)
                    yield from ((line, value, is_type) for value in _named_values(function, inside))


def _reads_class(step: dis.Instruction) -> bool:
    is_global = step.opname == "LOAD_GLOBAL" and step.argval == "type"
    return is_global or (step.opname == "LOAD_ATTR" and step.argval == "__class__")


def _is_inside(step: dis.Instruction, whole: dis.Instruction) -> bool:
    a, b = tuple(step.positions or ()), tuple(whole.positions or ())
    return None not in (*a, *b) and (a[0], a[2]) >= (b[0], b[2]) and (a[1], a[3]) <= (b[1], b[3])


def _named_values(function: FunctionType, steps: Iterable[dis.Instruction]) -> Iterator[Any]:
    """What the names in an expression stand for, with attributes: ``nn.Conv2d``."""
    value: Any = None
    builtin = vars(sys.modules["builtins"])
    for step in [*steps, None]:
        if step is not None and step.opname == "LOAD_ATTR":
            value = getattr(value, step.argval, None) if isinstance(value, ModuleType) else None
            continue
        if isinstance(value, type) and value is not type:
            yield value
        if step is not None and step.opname == "LOAD_CONST" and isinstance(step.argval, str):
            yield step.argval
        value = None
        if step is not None and step.opname == "LOAD_GLOBAL":
            value = function.__globals__.get(step.argval, builtin.get(step.argval))


def _user_frame() -> FrameType | None:
    """The innermost function of the user that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_tests_none() -> bool:
    """True if the innermost function of the user that runs asks whether something is None."""
    frame = _user_frame()
    return frame is not None and _tests_none(frame.f_code)


@functools.lru_cache(maxsize=1024)
def _tests_none(code: CodeType) -> bool:
    steps = list(dis.get_instructions(code))
    return any(_asks_none(steps, i) for i in range(len(steps)))


def _asks_none(steps: Sequence[dis.Instruction], i: int) -> bool:
    """True if the instruction at `i` compares what was loaded before it with None."""
    if steps[i].opname.endswith("_NONE"):
        return True
    is_none = "CONST" in steps[i].opname and steps[i].argval is None
    return is_none and i + 1 < len(steps) and steps[i + 1].opname in ("IS_OP", "COMPARE_OP")


def user_tests_identity() -> bool:
    """True if the innermost function of the user compares the attribute that it reads now by ``is``."""
    frame = _user_frame()
    return frame is not None and _tests_identity(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _tests_identity(code: CodeType, instruction: int) -> bool:
    after = (step for step in dis.get_instructions(code) if step.offset > instruction)
    following = next((step for step in after if not step.opname.startswith("LOAD_")), None)
    return following is not None and following.opname == "IS_OP"


def user_compares_truth() -> bool:
    """True if the innermost function of the user compares what it gets now with a constant: ``x.equal(y) is True``."""
    frame = _user_frame()
    return frame is not None and _compares_truth(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _compares_truth(code: CodeType, instruction: int) -> bool:
    after = (step for step in dis.get_instructions(code) if step.offset > instruction and step.opname != "CALL")
    constant, comparison = next(after, None), next(after, None)
    is_truth = constant is not None and constant.opname == "LOAD_CONST" and isinstance(constant.argval, bool)
    return is_truth and comparison is not None and comparison.opname == "IS_OP"


def asserted_answer() -> bool | None:
    """What the innermost function of the user, which asks for a truth value, must hear to pass its ``assert``.

    None if no ``assert`` asks, or one that goes on asking (``assert a or b``).
    """
    frame = _user_frame()
    return None if frame is None else _asserts(frame.f_code).get(frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _asserts(code: CodeType) -> dict[int, bool]:
    """The jumps of ``assert`` statements, with the value that goes past the error."""
    steps = list(dis.get_instructions(code))
    raises = {step.offset for step in steps if step.opname == "LOAD_ASSERTION_ERROR"}
    answers = {}
    for step, after in itertools.pairwise(steps):
        if "JUMP" in step.opname and step.opname.endswith(("_IF_TRUE", "_IF_FALSE")):
            jumps_if = step.opname.endswith("_IF_TRUE")
            if after.offset in raises:
                answers[step.offset] = jumps_if
            elif step.argval in raises:
                answers[step.offset] = not jumps_if
    return answers


def user_tests_result() -> bool:
    """True if the innermost function of the user that runs asks whether what it calls now gives None.

    It may ask at once, or ask a variable that the result, or a part of it, goes into.
    """
    frame = _user_frame()
    return frame is not None and _tests_result(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _tests_result(code: CodeType, instruction: int) -> bool:
    steps = list(dis.get_instructions(code))
    after = [step for step in steps if step.offset > instruction]
    names: set[Any] = set()
    for i, (step, following) in enumerate(itertools.pairwise(after)):
        if step.opname.startswith("STORE_"):
            names.add(step.argval)
            continue
        is_owner = step.opname == "LOAD_FAST" and following.opname == "STORE_ATTR"  # `self.mask = ...`
        if not is_owner and not step.opname.startswith(("UNPACK_", "COPY", "NOP")):
            if _asks_none(after, i):
                return True
            break
    loads = (i + 1 for i, step in enumerate(steps) if step.opname.startswith("LOAD_") and step.argval in names)
    return any(_asks_none(steps, i) for i in loads)


def error_line(error: BaseException) -> str:
    """The innermost line of user code in the traceback of an error, as ``model.py:41``; empty if there is none."""
    line, traceback = "", error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        line = _line(file, traceback.tb_lineno) if is_user_code(file) else line
        traceback = traceback.tb_next
    return line
