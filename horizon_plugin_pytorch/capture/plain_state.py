"""What a model keeps in plain Python from one forward to the next: counters, lists of tensors, arrays, objects."""

from __future__ import annotations

import collections
import inspect
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.asking.functions import is_user_function, names_in
from horizon_plugin_pytorch.asking.owners import is_user_code

_OF_TORCH = frozenset(vars(nn.Module())) | {"qconfig"}
_LARGE = 1 << 20  # numbers of a tensor that are not copied: a write to it counts as a change
_DEEP = 4  # containers in containers


class PlainState:
    """The numbers, tensors and arrays that the modules of a model hold in plain attributes, as they are now.

    Buffers are among them, and globals that the code of the modules names. What is not there yet, is None or is an
    empty list counts as made once, and not as changed.

    >>> class Net(nn.Module):
    ...     __module__ = "my_models"  # modules of this package hold settings only
    ...
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.steps, self.seen = [0, torch.zeros(2)], None
    >>> net = Net()
    >>> before = PlainState(net)
    >>> net.steps[0] += 1; net.steps[1] += 1; net.seen = 1
    >>> before.changes()
    ['steps[0]', 'steps[1]']
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values = {path: (value, _kept(value)) for path, value in _walk(model)}

    @property
    def is_old(self) -> bool:
        """Is anything another now, or there that was not?"""
        return bool(self.changes()) or any(path not in self._values for path, _ in _walk(self._model))

    def has(self, x: Tensor, paths: Iterable[str]) -> bool:
        """Was a tensor at one of these paths?"""
        return any(self._values[path][0] is x for path in paths if path in self._values)

    def changes(self) -> list[str]:
        """The paths of what is another now."""
        now = dict(_walk(self._model))
        return [
            path for path, (old, kept) in self._values.items() if path in now and not _is_same(old, kept, now[path])
        ]


def _walk(model: nn.Module) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    classes: set[type] = set()
    given: list[Any] = []  # code that is kept as an attribute
    for path, module in model.named_modules():
        if type(module).__module__.startswith(("torch.nn.", "horizon_plugin_pytorch.")):
            continue  # their numbers are settings
        prefix = f"{path}." if path else ""
        for name, value in (*vars(module).items(), *module._buffers.items()):
            if name not in _OF_TORCH and value is not None:
                yield from _values(f"{prefix}{name}", value, seen, 0)
        classes.update(type(module).__mro__)
        given += vars(module).values()
    for function in _functions(classes, given):
        for name in names_in(function) & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, (int, float, Tensor, np.ndarray, list, dict, collections.deque)):
                yield from _values(name, value, seen, 1)


def _functions(classes: set[type], given: list[Any]) -> Iterator[FunctionType]:
    """The functions that the user wrote."""
    methods = (value for cls in classes for value in vars(cls).values())
    for value in itertools.chain(methods, given):
        found = getattr(value, "__func__", value)
        found = inspect.unwrap(found) if isinstance(found, FunctionType) else found
        if isinstance(found, FunctionType) and is_user_function(found):
            yield found


def _values(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (bool, nn.Module, type, FunctionType)):
        return
    if isinstance(value, (int, float, Tensor, np.ndarray, np.number)):
        yield path, value
        return
    if depth >= _DEEP or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple, collections.deque)):
        if len(value):
            yield f"len({path})", len(value)
        for index, item in enumerate(value):
            yield from _values(f"{path}[{index}]", item, seen, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _values(f"{path}[{key!r}]", item, seen, depth + 1)
    elif _is_plain_object(value):
        for name, item in getattr(value, "__dict__", {}).items():
            yield from _values(f"{path}.{name}", item, seen, depth + 1)


def _is_plain_object(value: Any) -> bool:
    """Is it an object of a class that the user wrote, or a namespace?"""
    module = sys.modules.get(type(value).__module__)
    return isinstance(value, SimpleNamespace) or is_user_code(getattr(module, "__file__", None) or "<builtin>")


def _kept(value: Any) -> Any:
    """What tells a later value from this one."""
    if isinstance(value, Tensor):
        is_small = value.numel() <= _LARGE and value.layout is torch.strided and not value.is_meta
        return value.detach().clone() if is_small and type(value) is Tensor else _count(value)
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= _LARGE else None
    return value


def _count(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _is_same(old: Any, kept: Any, now: Any) -> bool:
    if isinstance(kept, Tensor):
        if not isinstance(now, Tensor) or now.is_meta or type(now) is not Tensor:
            return now is old
        return kept.shape == now.shape and kept.dtype == now.dtype and torch.equal(kept, now.detach())
    if isinstance(old, Tensor):
        return now is old and _count(old) == kept
    if isinstance(kept, np.ndarray):
        return isinstance(now, np.ndarray) and np.array_equal(kept, now, equal_nan=kept.dtype.kind == "f")
    if isinstance(old, np.ndarray):
        return now is old
    is_nan = isinstance(old, float) and math.isnan(old)
    return is_nan or (type(now) is type(old) and bool(now == kept))
