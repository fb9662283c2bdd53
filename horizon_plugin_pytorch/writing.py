"""Which tensor a call of torch writes to."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

# What Python calls for `x += y` and the like, and what gives the same as a new value.
IN_PLACE_OPERATORS: dict[Callable, Callable] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv, operator.imod: operator.mod,
    operator.ipow: operator.pow, operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor,
    operator.ilshift: operator.lshift, operator.irshift: operator.rshift,
}  # fmt: skip
_NAMES = [function.__name__ for function in (*IN_PLACE_OPERATORS, operator.setitem)]
_IN_PLACE = frozenset({*_NAMES, *(f"__{name}__" for name in _NAMES)})  # as `operator` has them, and as tensors do
_NEVER, _ALWAYS = -1, -2


def writes_by_name(name: str) -> bool:
    """Does a function of that name write to its first argument: ``add_``, ``__iadd__``, ``__setitem__``?

    >>> writes_by_name("add_"), writes_by_name("add"), writes_by_name("__init__")
    (True, False, False)
    """
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


@functools.lru_cache(maxsize=4096)
def _when(function: Any) -> int:
    """When a function writes: always, never, or if the argument at this position (or its keyword `inplace`) says so."""
    if writes_by_name(getattr(function, "__name__", "")):
        return _ALWAYS
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins; those of torch have no such argument
        return _NEVER
    return names.index("inplace") if "inplace" in names else _NEVER


def writes(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Does a call write to its first argument: ``x.add_(y)``, ``x += y``, ``x[0] = y``, ``F.relu(x, inplace=True)``?

    >>> import torch.nn.functional as F
    >>> writes(F.hardtanh, (None, -1.0, 1.0, True), {}), writes(F.hardtanh, (None,), {})
    (True, False)
    """
    position = _when(function)
    if position < 0:
        return position == _ALWAYS
    return bool(args[position] if len(args) > position else kwargs.get("inplace"))


def written(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call writes to, None if it gives something new."""
    if not writes(function, args, kwargs):
        return None
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def module_writes(module: nn.Module) -> bool:
    """Does a module change its input, as one does that was made with ``inplace=True``?

    An attribute of that name on a module that takes no such argument is the user's own.
    """
    cls: Any = type(module)
    return bool(getattr(module, "inplace", False)) and _takes_inplace(cls)


@functools.cache
def _takes_inplace(cls: type) -> bool:
    """Does a class take `inplace`? A forward of torch's knows that of torch's classes alone."""
    owner = next((base for base in cls.__mro__ if "forward" in vars(base)), cls)
    for base in (owner if owner.__module__.startswith("torch.") else cls).__mro__:
        init = vars(base).get("__init__")
        if init is not None and base is not nn.Module and "inplace" in inspect.signature(init).parameters:
            return True
    return False
