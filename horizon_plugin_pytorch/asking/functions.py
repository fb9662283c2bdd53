"""What a function is made of: who wrote it and where, the names in it, the classes that it compares."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from horizon_plugin_pytorch.asking.owners import USER, is_package_code, is_user_code, line_of, owner_of


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
    return code is not None and owner_of(code.co_filename) != USER


def is_package_function(function: Any) -> bool:
    """Is it code of this package, and not only of its name, which `functools.wraps` gives to others?

    >>> is_package_function(is_package_function), is_package_function(print)
    (True, False)
    """
    code = getattr(function, "__code__", None)
    return code is not None and is_package_code(code.co_filename)


def definition_line(function: Any) -> str:
    """The line at which a function is defined, as ``model.py:41``; empty for what has no code."""
    code = getattr(getattr(function, "func", function), "__code__", None)  # of a functools.partial
    return "" if code is None else line_of(code.co_filename, code.co_firstlineno)


def code_of(function: Any) -> CodeType:
    """What is the same for all runs of a function: `Running.code` has it."""
    return function.__code__


def code_behind(function: Any) -> CodeType | None:
    """The code of a function, of a method, or of what a `functools.partial` calls; None for what has none."""
    function = getattr(function, "func", function)
    return getattr(getattr(function, "__func__", function), "__code__", None)


def code_text(function: Any) -> str:
    """What a function does, as text that is the same in every run of Python: to tell whether it is another one.

    Its code with the constants and names in it, the plain values (numbers, strings, tuples of these) that it has as
    defaults, in its closure and among the globals that it names, and the same of the user's functions that it calls.
    Where the code stands does not count, nor what the function itself gives new values, such as a counter.

    >>> code_text(lambda x: x + 1) == code_text(lambda x: x + 1) != code_text(lambda x: x + 2)
    True
    >>> from functools import partial
    >>> code_text(partial(max, 1)) == code_text(partial(max, 2))
    False
    """
    return "\n".join(_text_of(function, set()))


def _text_of(value: Any, met: set[int]) -> Iterator[str]:
    """A value as lines: plain ones as they are written, functions and what is called as their code, others by class."""
    if isinstance(value, (tuple, frozenset)):
        parts = [" ".join(_text_of(item, met)) for item in value]
        yield f"({', '.join(parts if isinstance(value, tuple) else sorted(parts))})"
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None), type(...))):
        yield repr(value)
    elif isinstance(value, CodeType):
        yield from _text_of((value.co_code.hex(), value.co_names, value.co_varnames, value.co_freevars), met)
        yield from _text_of(value.co_consts, met)
    elif isinstance(value, (type, ModuleType)) or not callable(value):
        yield getattr(value, "__qualname__", None) or type(value).__qualname__
    elif id(value) in met:
        return
    else:
        met.add(id(value))
        yield from _text_of_function(value, met)


def _text_of_function(function: Any, met: set[int]) -> Iterator[str]:
    yield getattr(function, "__qualname__", type(function).__qualname__)
    if isinstance(function, partial):
        yield from _text_of(function.func, met)
        yield from _text_of((*function.args, *sorted(function.keywords.items())), met)
        return
    if hasattr(function, "__self__") and hasattr(function, "__func__"):
        yield from _text_of_state(function.__self__, met)
        function = function.__func__
    if not isinstance(function, FunctionType):
        called = type(function).__call__
        if isinstance(called, FunctionType) and is_user_function(called):  # an object with a `__call__` of the user's
            yield from _text_of_state(function, met)
            yield from _text_of(called, met)
        return
    written, _ = stores(function)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from _text_of(function.__code__, met)
    yield from _text_of((function.__defaults__, *sorted((function.__kwdefaults__ or {}).items())), met)
    held = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    named = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    for name, value in sorted({**named, **held}.items()):
        if name not in written and (not callable(value) or is_user_function(value)):
            yield from _text_of((name, value), met)


def _text_of_state(owner: Any, met: set[int]) -> Iterator[str]:
    """The plain attributes of an object."""
    yield type(owner).__qualname__
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        if not callable(value):
            yield from _text_of((name, value), met)


def file_and_name(code: CodeType) -> tuple[str, str]:
    """Where the function with this code is written, and what it is called."""
    return code.co_filename, code.co_name


def held_by(function: FunctionType) -> Iterator[Any]:
    """What a function has in its closure and as defaults.

    >>> x = [1]
    >>> list(held_by(lambda y=x: y))
    [[1]]
    """
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def twin(function: FunctionType) -> FunctionType:
    """The same function, which holds nothing yet: see `hold`."""
    cells = tuple(CellType() for _ in function.__closure__ or ())
    new = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
    new.__dict__.update(function.__dict__)
    new.__qualname__, new.__doc__, new.__module__ = function.__qualname__, function.__doc__, function.__module__
    return new


def hold(function: FunctionType, like: FunctionType, current: Callable[[Any], Any]) -> None:
    """Let a function have in its closure and as defaults what another one has.

    Args:
        like: the other one; it may be the same.
        current: what to put in the place of something.

    >>> x = 1
    >>> old = lambda y=x: y
    >>> hold(new := twin(old), old, lambda value: value + 1)
    >>> old(), new()
    (1, 2)
    """
    if like.__defaults__ is not None:
        function.__defaults__ = tuple(map(current, like.__defaults__))
    if like.__kwdefaults__ is not None:
        function.__kwdefaults__ = {name: current(value) for name, value in like.__kwdefaults__.items()}
    for cell, old in zip(function.__closure__ or (), like.__closure__ or (), strict=True):
        if _is_filled(old):
            cell.cell_contents = current(old.cell_contents)


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - a name that has no value yet raises
    except ValueError:
        return False
    return True


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
    >>> [found[1:] for found in compared_classes(lambda x: issubclass(type(x), dict))]
    [(<class 'dict'>, True)]
    """
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        if "type" not in code.co_names and "__class__" not in code.co_names:
            continue
        steps = [step for step in dis.get_instructions(code) if step.positions and step.positions.lineno]
        for comparison in steps:
            if comparison.opname in ("IS_OP", "COMPARE_OP", "CONTAINS_OP", "CALL"):
                inside = [step for step in steps if is_inside(step, comparison)]
                if comparison.opname == "CALL" and inside[0].argval != "issubclass":
                    continue
                if any(_reads_class(step) for step in inside):
                    line = line_of(code.co_filename, comparison.positions.lineno or 0)  # type: ignore[union-attr]
                    is_type = any(step.argval == "type" for step in inside)
                    yield from ((line, value, is_type) for value in _named_values(function, inside))


def attribute_writes(function: FunctionType, name: str) -> Iterator[str]:
    """Lines of a function that write to an attribute of that name: ``x.data = y``.

    >>> def keep(self, y): self.state.data = y
    >>> len(list(attribute_writes(keep, "data"))), len(list(attribute_writes(keep, "state")))
    (1, 0)
    """
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for step in dis.get_instructions(code) if name in code.co_names else ():
            if step.opname == "STORE_ATTR" and step.argval == name and step.positions:
                yield line_of(code.co_filename, step.positions.lineno or 0)


_WRITERS = frozenset(
    "append appendleft extend insert update setdefault add setattr __setitem__ __setattr__ put".split()
)


def stores(function: FunctionType) -> tuple[set[str], bool]:
    """The attributes and globals that a function writes by name; and may it write to anything that outlives it?

    >>> def keep(self, y): self.state, self.seen[0] = y, y
    >>> stores(keep)
    ({'state'}, True)
    >>> stores(lambda x: x.mean())
    (set(), False)
    """
    found: set[str] = set()
    is_writing = bool(names_in(function) & _WRITERS)
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        written = _writes(code)
        found |= {name for operation, name in written if operation != "STORE_SUBSCR"}
        is_writing |= bool(written)
    return found, is_writing


_LASTING = frozenset(("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR"))


@functools.lru_cache(4096)
def _writes(code: CodeType) -> frozenset[tuple[str, Any]]:
    """The instructions of some code that write to what outlives it, with names: asked of all functions at each trace.

    >>> def keep(self, y): self.state = y
    >>> _writes(keep.__code__)
    frozenset({('STORE_ATTR', 'state')})
    """
    return frozenset((step.opname, step.argval) for step in dis.get_instructions(code) if step.opname in _LASTING)


def stored_globals(function: FunctionType) -> set[str]:
    """The globals that a function gives new values.

    >>> def count():
    ...     global COUNT
    ...     COUNT = 1
    >>> stored_globals(count)
    {'COUNT'}
    """
    return {name for operation, name in _writes(function.__code__) if operation == "STORE_GLOBAL"}


def _reads_class(step: dis.Instruction) -> bool:
    is_global = step.opname == "LOAD_GLOBAL" and step.argval == "type"
    return is_global or (step.opname == "LOAD_ATTR" and step.argval == "__class__")


def is_inside(step: dis.Instruction, whole: dis.Instruction) -> bool:
    """Is an instruction of an expression that is inside that of another one?"""
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
