"""What the user's code asks at the instruction that runs, or of what it gets there: a class, None, a truth."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from horizon_plugin_pytorch.asking.functions import is_inside
from horizon_plugin_pytorch.asking.owners import USER, is_standard_library, owner_of
from horizon_plugin_pytorch.asking.stack import user_frame


def user_asks_class() -> bool:
    """True if code of the user asks for the class of what calls this function: ``isinstance(x, Tensor)``.

    Functions of torch written in C ask in the same way, from the user's frame; for them a class is a promise about
    memory, and they must have the true answer.
    """
    frame = _asking_frame(sys._getframe(2))
    return owner_of(_for_whom(frame)) == USER and _asks_class(frame.f_code, frame.f_lasti)


def _for_whom(frame: FrameType) -> str:
    """The file whose code asks, or has the standard library ask: ``dataclasses.is_dataclass(x)``."""
    asking: FrameType | None = frame
    while asking is not None and is_standard_library(asking.f_code.co_filename):
        asking = asking.f_back
    return (asking or frame).f_code.co_filename


def _asking_frame(frame: FrameType) -> FrameType:
    """The frame that asks for a class, rather than that of a metaclass which passes the question on."""
    while frame.f_code.co_name == "__instancecheck__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def asked_classes() -> list[Any]:
    """What the names stand for in the ``isinstance(x, ...)`` that asks for the class of what calls this function."""
    frame = _asking_frame(sys._getframe(2))
    steps = list(dis.get_instructions(frame.f_code))
    now = next((step for step in steps if step.offset == frame.f_lasti), None)
    found: list[Any] = []
    value: Any = None
    for step in steps if now is not None else ():
        if step is now or not is_inside(step, now):  # type: ignore[arg-type]
            continue
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            value = inspect.getattr_static(value, step.argval, None)
        elif step.opname.startswith("LOAD_") and isinstance(step.argval, str):
            value = frame.f_locals.get(step.argval, frame.f_globals.get(step.argval))
        else:
            continue
        found += value if isinstance(value, tuple) else [value]
    return found


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
    is_user = owner_of(frame.f_code.co_filename) == USER
    return _asks_attribute(frame.f_code, frame.f_lasti) if is_user else None


@functools.lru_cache(maxsize=4096)
def _asks_attribute(code: CodeType, instruction: int) -> bool | None:
    steps = list(dis.get_instructions(code))
    now = next((step for step in steps if step.offset == instruction), None)
    if now is None or not now.opname.startswith(("CALL", "PRECALL")):
        return None if now is None else False
    name = _called_name(steps, now, ("hasattr", "getattr"))
    return None if name is None else name == "hasattr" or now.arg == 3  # with a default


def user_tests_none() -> bool:
    """True if the innermost function of the user that runs asks whether something is None."""
    frame = user_frame()
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


def names_tested_for_none(code: CodeType) -> set[str]:
    """The local names that a function itself compares with None.

    >>> def forward(x, mask, size): return x if mask is None else size
    >>> names_tested_for_none(forward.__code__)
    {'mask'}
    """
    steps = list(dis.get_instructions(code))
    tested = (steps[i - 1] for i in range(1, len(steps)) if _asks_none(steps, i))
    return {step.argval for step in tested if step.opname.startswith("LOAD_FAST")}


def user_tests_identity() -> bool:
    """True if the innermost function of the user compares the attribute that it reads now by ``is``."""
    frame = user_frame()
    return frame is not None and _tests_identity(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _tests_identity(code: CodeType, instruction: int) -> bool:
    after = (step for step in dis.get_instructions(code) if step.offset > instruction)
    following = next((step for step in after if not step.opname.startswith("LOAD_")), None)
    return following is not None and following.opname == "IS_OP"


def user_compares_truth(is_later: bool = False) -> bool:
    """True if the user's code compares what it gets now with a constant: ``x.equal(y) is True``.

    Args:
        is_later: also if it puts the answer into a variable first, or gives it to the function that called it.
    """
    frame = user_frame()
    while frame is not None:
        is_compared, is_returned = _compares_truth(frame.f_code, frame.f_lasti, is_later)
        if is_compared or not is_returned:
            return is_compared
        frame = frame.f_back
        if frame is not None and owner_of(frame.f_code.co_filename) != USER:
            break
    return False


@functools.lru_cache(maxsize=4096)
def _compares_truth(code: CodeType, instruction: int, is_later: bool) -> tuple[bool, bool]:
    """Does a function compare what an instruction gives with a constant? Does it return it?"""
    steps = list(dis.get_instructions(code))
    after = [step for step in steps if step.offset > instruction and step.opname not in ("CALL", "CACHE")]
    if _asks_truth(after, 0) or not is_later:
        return _asks_truth(after, 0), False
    stored: dict[str, set[str]] = {"STORE_ATTR": set(), "": set()}
    for step, following in itertools.pairwise(after):
        is_owner = step.opname.startswith("LOAD_") and following.opname == "STORE_ATTR"  # `self.is_same = ...`
        if step.opname.startswith("STORE_"):
            stored["STORE_ATTR" if step.opname == "STORE_ATTR" else ""].add(step.argval)
        elif not is_owner and not step.opname.startswith(("COPY", "NOP")):
            break
    loads = [
        i + 1
        for i, step in enumerate(steps)
        if step.opname.startswith("LOAD_") and step.argval in stored["STORE_ATTR" if step.opname == "LOAD_ATTR" else ""]
    ]
    is_returned = any(_opname(steps, i) == "RETURN_VALUE" for i in loads) or _opname(after, 0) == "RETURN_VALUE"
    return any(_asks_truth(steps, i) for i in loads), is_returned


def _opname(steps: Sequence[dis.Instruction], i: int) -> str:
    return steps[i].opname if i < len(steps) else ""


def _asks_truth(steps: Sequence[dis.Instruction], i: int) -> bool:
    """True if the instruction at `i` compares what was loaded before it with True, False or a number."""
    is_constant = _opname(steps, i) == "LOAD_CONST" and isinstance(steps[i].argval, int)
    return is_constant and _opname(steps, i + 1) == "IS_OP"


def user_looks_up() -> bool:
    """True if the user's code itself wants the hash of what calls this function: a key of a dictionary or set."""
    return owner_of(sys._getframe(2).f_code.co_filename) == USER


def user_spells() -> bool:
    """True if the user's code itself calls ``str`` or ``repr`` of what calls this function."""
    frame = sys._getframe(2)
    return owner_of(frame.f_code.co_filename) == USER and _spells(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _spells(code: CodeType, instruction: int) -> bool:
    steps = list(dis.get_instructions(code))
    now = next((step for step in steps if step.offset == instruction), None)
    return now is not None and _called_name(steps, now, ("str", "repr")) is not None


def asserted_answer() -> bool | None:
    """What the innermost function of the user, which asks for a truth value, must hear to pass its ``assert``.

    None if no ``assert`` asks, or one that goes on asking (``assert a or b``).
    """
    frame = user_frame()
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
    frame = user_frame()
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
