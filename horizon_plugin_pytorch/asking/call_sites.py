"""Where a function is called: the chain of functions, each with the instruction that runs."""

from __future__ import annotations

import dis
import sys
import zlib
from types import FrameType

from horizon_plugin_pytorch.asking.owners import MODULE_FILE, is_package_code, is_user_code, line_of
from horizon_plugin_pytorch.asking.stack import outside_package

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
        self.is_module_call = file == MODULE_FILE
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
    frame = outside_package(sys._getframe(1))
    while frame is not None and frame.f_code.co_filename == MODULE_FILE:  # the call itself
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
                line = line_of(code.code.co_filename, frame.f_lineno)
            outermost = code.place(frame)
            calls.append(outermost)
        elif not code.is_package:
            outermost = code.place(frame)
        frame = frame.f_back
    if outermost is not None and (not calls or calls[-1] != outermost):
        calls.append(outermost)  # a forward that torch wrote: its lines are as different as anybody's
    return tuple(calls), line
