"""The functions that have not returned yet, and the lines that they are at."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from horizon_plugin_pytorch.asking.owners import (
    CHECKPOINT_FILE,
    MODULE_FILE,
    QCONFIG_FILE,
    QUANTIZATION_FOLDER,
    TRACE_FILE,
    is_library,
    is_package_code,
    is_torch_code,
    is_user_code,
    line_of,
)


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

    def is_of(self, function: Any) -> bool:
        """Is it a call of this Python function, or of a method by this name of a class?"""
        return self._frame.f_code is function.__code__

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
        return line_of(self._frame.f_code.co_filename, self._frame.f_lineno)

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

    def around(self, passed: set[int]) -> Running | None:
        """The innermost function around this one, but for those whose code, by its `id`, is passed over."""
        frame = self._frame.f_back
        while frame is not None and id(frame.f_code) in passed:
            frame = frame.f_back
        return None if frame is None else Running(frame)


def running_functions() -> Iterator[Running]:
    """The functions that have not returned yet, from the one that asks outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield Running(frame)
        frame = frame.f_back


def innermost_running(passed: set[int], skipped: int = 0) -> Running | None:
    """The innermost function that has not returned yet, but for those whose code, by its `id`, is passed over.

    Args:
        skipped: so many functions, from the one that asks outwards, are passed over without a look.
    """
    frame: FrameType | None = sys._getframe(1 + skipped)
    while frame is not None and id(frame.f_code) in passed:
        frame = frame.f_back
    return None if frame is None else Running(frame)


def running_handler() -> Running | None:
    """The innermost ``__torch_function__`` that has not returned yet."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    return None if frame is None else Running(frame)


def running_module() -> tuple[Any, str]:
    """The innermost module that runs now, and the line of user code that calls it."""
    module = None
    for running in running_functions():
        if module is None and running.file == MODULE_FILE:
            module = running.owner
        elif module is not None and is_user_code(running.file):
            return module, running.line
    return module, ""


def user_line() -> str:
    """The innermost line of user code that runs, as ``model.py:41``; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return line_of(frame.f_code.co_filename, frame.f_lineno)
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


def error_line(error: BaseException) -> str:
    """The innermost line of user code in the traceback of an error, as ``model.py:41``; empty if there is none."""
    line, at = "", error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        line = line_of(file, at.tb_lineno) if is_user_code(file) else line
        at = at.tb_next
    return line


def user_traceback(error: BaseException) -> str:
    """The lines of the user's own code that an error came through, as Python prints them; empty if there are none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if is_user_code(frame.filename) and not frame.filename.startswith("<") and not is_library(frame.filename)
    ]
    return "".join(traceback.format_list(frames))


def levels_to_user() -> int:
    """How many calls are between the function that asks and the user's code: the `stacklevel` of a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_user_code(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def caller_globals() -> dict[str, Any]:
    """The global names of the code that called the function which calls this one."""
    return sys._getframe(2).f_globals


def is_torch_quantizing() -> bool:
    """True if the function that asks was called by torch's own `prepare`, `convert` or the like."""
    file = sys._getframe(2).f_code.co_filename
    return file.startswith(QUANTIZATION_FOLDER) and file != QCONFIG_FILE


def is_recomputing() -> bool:
    """True inside `torch.utils.checkpoint`, which runs a part of the forward again in the backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != CHECKPOINT_FILE:
        frame = frame.f_back
    return frame is not None


def is_module_call() -> bool:
    """True if nn.Module's call, as in ``self.conv(x)``, runs the forward of this package that asks.

    ``self.conv.forward(x)`` runs none of a module's hooks.
    """
    frame = outside_package(sys._getframe(1))
    return frame is not None and frame.f_code.co_filename == MODULE_FILE


def is_trace_check() -> bool:
    """True if `torch.jit.trace`, which compares what a traced model gives with the model's, calls this package."""
    frame = outside_package(sys._getframe(1))
    return frame is not None and frame.f_code.co_filename == TRACE_FILE


def is_called_by_model() -> bool:
    """True if user code, rather than an operator of this package, called the function which calls this one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_torch_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and not is_package_code(frame.f_code.co_filename)


def _calling_frame() -> FrameType | None:
    """The innermost function of torch's that calls a module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != MODULE_FILE:
        frame = frame.f_back
    return frame


class CallInProgress:
    """The call of a module whose hooks run now.

    Torch calls no hooks after a KeyboardInterrupt: the frame of the call tells that it is over.
    """

    def __init__(self) -> None:
        self._frame = _calling_frame()

    def is_this(self) -> bool:
        """Is it still the call whose hooks run now?"""
        return self._frame is _calling_frame()

    def is_over(self) -> bool:
        """True if the call ended, by whatever way."""
        if self._frame is None:
            return False
        try:
            self._frame.clear()  # refused while it is executing
        except RuntimeError:
            return False
        return True


def user_frame() -> FrameType | None:
    """The innermost function of the user that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def outside_package(frame: FrameType | None) -> FrameType | None:
    """The innermost function around a frame, itself included, that is not this package's."""
    while frame is not None and is_package_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
