"""What a model keeps in plain Python from one forward to the next: counters, lists of tensors, arrays, objects."""

from __future__ import annotations

import collections
import inspect
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.asking.functions import is_user_function, names_in
from horizon_plugin_pytorch.asking.owners import is_standard_library, is_user_code

_OF_TORCH = frozenset(vars(nn.Module())) | {"qconfig"}
_LARGE = 1 << 20  # numbers of a tensor that are not copied: a write to it counts as a change
_DEEP = 4  # containers in containers
_STATES = (int, float, Tensor, np.ndarray, list, dict, collections.deque)  # what classes and globals may hold


class PlainState:
    """The numbers, tensors and arrays that the modules of a model hold in plain attributes, as they are now.

    Buffers are among them, attributes of the user's classes, and globals that the code of the modules names. What is
    not there yet, is None or is an empty list counts as made once, and not as changed.

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
    >>> before.restore(before.changes())
    >>> net.steps
    [0, tensor([0., 0.])]
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = _walk(model)
        self._values = {one.path: (one.value, _kept(one.value)) for one in self._places if not one.is_empty}
        self._contents = {id(one.stored): list(one.stored) for one in self._places if one.is_length}

    @property
    def is_old(self) -> bool:
        """Is anything another now, or there that was not?"""
        return bool(self.changes()) or any(
            one.path not in self._values for one in _walk(self._model) if not one.is_empty
        )

    def has(self, x: Tensor, paths: Iterable[str]) -> bool:
        """Was a tensor at one of these paths?"""
        return any(self._values[path][0] is x for path in paths if path in self._values)

    def restore(self, paths: Iterable[str]) -> None:
        """Put back what was at these paths; tensors and arrays get the numbers back that were kept of them.

        Globals stay as they are, and lists of a class, which all its objects share: they are not the model's, and may
        be where somebody looks what has run.
        """
        wanted, known = set(paths), {place.path for place in self._places}
        self._put_back(wanted, () if wanted <= known else _walk(self._model, has_globals=False))

    def _put_back(self, wanted: set[str], now: Iterable[_Place]) -> None:
        """Put back what was at some paths; what is at others of them now is taken away."""
        known = {place.path for place in self._places}
        for place in [one for one in now if one.path in wanted - known]:
            if isinstance(place.holder, MutableMapping):
                place.holder.pop(place.key, None)
        for place in self._places:
            if place.path not in wanted or place.is_global:
                continue
            kept = None if place.is_empty else self._values[place.path][1]
            if isinstance(kept, (Tensor, np.ndarray)):
                with torch.no_grad():
                    place.value[...] = kept
            place.holder[place.key] = place.stored
            if place.is_length and type(place.stored) in (list, collections.deque):
                place.stored.clear()
                place.stored.extend(self._contents[id(place.stored)])

    def undo(self) -> None:
        """Put everything back, also what was made since."""
        own, of_globals = _places_of(self._model)
        now = {one.path: one.value for one in own}
        filled = [one.path for one in self._places if one.is_empty and now.get(one.path)]
        made = now.keys() - {one.path for one in self._places}
        changed = self._changed(now | {one.path: one.value for one in of_globals})
        self._put_back({*changed, *filled, *made}, own)

    def changes(self) -> list[str]:
        """The paths of what is another now."""
        return self._changed({one.path: one.value for one in _walk(self._model)})

    def _changed(self, now: Mapping[str, Any]) -> list[str]:
        return [
            path for path, (old, kept) in self._values.items() if path in now and not _is_same(old, kept, now[path])
        ]


class _Place(NamedTuple):
    """Where a value is.

    Args:
        value: a number, a tensor, an array; or how long a list is.
        holder, key: where it is, or the tuple that it is in.
        stored: what is there.
        is_global: is it a global, a list of a class, or in one?
    """

    path: str
    value: Any
    holder: Any
    key: Any
    stored: Any
    is_global: bool = False

    @property
    def is_length(self) -> bool:
        return self.path.startswith("len(")

    @property
    def is_empty(self) -> bool:
        return self.is_length and not self.value


class _ClassAttributes(MutableMapping):
    """The attributes of a class, which can be written."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __getitem__(self, name: str) -> Any:
        return vars(self._cls)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._cls, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._cls, name)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._cls))

    def __len__(self) -> int:
        return len(vars(self._cls))


def is_of_users(cls: type) -> bool:
    """Is it a class that the user wrote?"""
    module = sys.modules.get(cls.__module__)
    return cls is not object and is_user_code(getattr(module, "__file__", None) or "")


def classes_of_users(modules: Iterable[nn.Module]) -> set[type]:
    """The classes of modules, and those that they inherit from, that the user wrote."""
    met = {cls for of_module in {type(module) for module in modules} for cls in of_module.__mro__}
    return {cls for cls in met if is_of_users(cls)}


def _walk(model: nn.Module, has_globals: bool = True) -> list[_Place]:
    own, of_globals = _places_of(model, has_globals)
    return own + of_globals


def _places_of(model: nn.Module, has_globals: bool = True) -> tuple[list[_Place], list[_Place]]:
    """Where values are: in the model and its classes, and in globals that its code names."""
    own: list[_Place] = []
    of_globals: list[_Place] = []
    seen: set[int] = set()
    classes: set[type] = set()
    given: list[Any] = []  # code that is kept as an attribute
    for path, module in model.named_modules():
        if type(module).__module__.startswith(("torch.nn.", "horizon_plugin_pytorch.")):
            continue  # their numbers are settings
        prefix = f"{path}." if path else ""
        for holder in (vars(module), module._buffers):
            for name, value in list(holder.items()):
                if name not in _OF_TORCH and value is not None:
                    own += _values(_Place(f"{prefix}{name}", value, holder, name, value), seen, 0)
        classes.update(type(module).__mro__)
        given += vars(module).values()
    for cls in sorted(filter(is_of_users, classes), key=lambda cls: cls.__qualname__):
        for name, value in list(vars(cls).items()):
            if not name.startswith("__") and isinstance(value, _STATES):
                is_log = isinstance(value, (list, dict, collections.deque))
                place = _Place(f"{cls.__name__}.{name}", value, _ClassAttributes(cls), name, value, is_log)
                own += _values(place, seen, 1)
    for function in _functions(classes, given) if has_globals else ():
        for name in names_in(function) & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, _STATES):
                of_globals += _values(_Place(name, value, function.__globals__, name, value, True), seen, 1)
    return own, of_globals


def _functions(classes: set[type], given: list[Any]) -> Iterator[FunctionType]:
    """The functions that the user wrote."""
    methods = (value for cls in classes for value in vars(cls).values())
    for value in itertools.chain(methods, given):
        found = getattr(value, "__func__", value)
        if type(found) is not FunctionType:
            continue
        if "__wrapped__" in found.__dict__:  # few are, and of each module all of torch's methods come by
            found = inspect.unwrap(found)
        if is_user_function(found):
            yield found


def _values(place: _Place, seen: set[int], depth: int) -> Iterator[_Place]:
    path, value = place.path, place.value
    if isinstance(value, (bool, nn.Module, type, FunctionType)):
        return
    if isinstance(value, (int, float, Tensor, np.ndarray, np.number)):
        yield place
        return
    if depth >= _DEEP or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple, collections.deque)):
        yield place._replace(path=f"len({path})", value=len(value))
        for index, item in enumerate(value):
            inside = place._replace(path=f"{path}[{index}]", value=item)
            if type(value) in (list, collections.deque):  # others cannot be written to
                inside = inside._replace(holder=value, key=index, stored=item)
            yield from _values(inside, seen, depth + 1)
    elif isinstance(value, dict) or _is_plain_object(value):
        own = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for key, item in list(own.items()):
            name = f"[{key!r}]" if own is value else f".{key}"
            yield from _values(_Place(f"{path}{name}", item, own, key, item, place.is_global), seen, depth + 1)


def _is_plain_object(value: Any) -> bool:
    """Is it an object of a class that the user wrote, a namespace, or an object of Python's that holds others?"""
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or "<builtin>"
    return isinstance(value, SimpleNamespace) or is_user_code(file) or is_standard_library(file)


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
        return kept.shape == now.shape and kept.dtype == now.dtype and _is_equal(kept, now.detach())
    if isinstance(old, Tensor):
        return now is old and _count(old) == kept
    if isinstance(kept, np.ndarray):
        return isinstance(now, np.ndarray) and np.array_equal(kept, now, equal_nan=kept.dtype.kind == "f")
    if isinstance(old, np.ndarray):
        return now is old
    is_nan = isinstance(old, float) and math.isnan(old)
    return is_nan or (type(now) is type(old) and bool(now == kept))


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Are the numbers the same? NaN, as `torch.empty` may hold, is the same as NaN."""
    is_same = one == other
    return bool((is_same | ((one != one) & (other != other))).all())
