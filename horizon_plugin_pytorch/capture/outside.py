"""What a model's code and its hooks reach beside their arguments: objects in attributes, closures and globals."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, fx, nn

from horizon_plugin_pytorch.asking.functions import (
    code_behind,
    held_by,
    is_user_function,
    names_in,
    stored_globals,
    stores,
)
from horizon_plugin_pytorch.asking.owners import is_user_code
from horizon_plugin_pytorch.capture.plain_state import classes_of_users, is_of_users
from horizon_plugin_pytorch.runtime.hooks import KeptHook, NamedHook

_CONTAINERS = (list, dict, set, collections.deque)
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, Tensor, nn.Parameter})  # nothing lies behind these
_MANY = 4000  # values; what lies behind more than these is not looked at
_OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def holds_proxy(value: Any) -> bool:
    """Is it a value of a traced forward, or a container that has one in it? Containers may contain themselves.

    >>> ring = [1]
    >>> ring.append(ring)
    >>> holds_proxy(ring)
    False
    """
    seen: dict[int, Any] = {}
    pending = [value]
    while pending and len(seen) < _MANY:
        one = pending.pop()
        if issubclass(type(one), fx.Proxy):  # isinstance would ask objects that load what they are asked for
            return True
        if issubclass(type(one), (*_CONTAINERS, tuple)) and id(one) not in seen:
            seen[id(one)] = one
            pending += list(one.values() if isinstance(one, dict) else one)
    return False


class OutsideState:
    """What the code of a model and its hooks can write to, as it is now, and which hooks share it with the model.

    Args:
        model: a float model.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._hooks = [hook for module in modules for kind in _HOOKS for hook in getattr(module, kind).values()]
        codes = {code_behind(hook) for hook in self._hooks} - {None}
        classes = classes_of_users(modules)
        methods = [getattr(v, "__func__", v) for cls in classes for k, v in vars(cls).items() if k != "__init__"]
        held = [v for module in modules for name, v in vars(module).items() if name not in _OF_TORCH]
        self._model = _Reached([*(v for v in methods if code_behind(v) not in codes), *held])
        self._model.objects |= {id(module): module for module in modules}
        self._of_hooks = {id(hook): _Reached([hook]) for hook in self._hooks}
        reached = [self._model, *self._of_hooks.values()]
        self._contents = {key: (x, _copied(x)) for one in reached for key, x in one.objects.items() if _is_filled(x)}
        self._globals = {key: (own, own.get(key[1])) for one in reached for key, own in one.rebound.items()}

    def is_shared(self, hook: Any) -> bool:
        """May a hook of the model write to what the model's code reads?"""
        reached = self._of_hooks.get(id(hook))
        if reached is None:  # the forward has registered it
            return True
        if not reached.is_writing:
            return False
        is_rebound = not reached.rebound.keys().isdisjoint(self._model.read)
        return is_rebound or not reached.objects.keys().isdisjoint(self._model.objects)

    def common_names(self, hook: Any) -> list[str]:
        """Names of what is kept in attributes and globals that are both in the code of a hook and in the model's."""
        reached = self._of_hooks.get(id(hook)) or _Reached([hook])
        kept = {name for x in self._model.objects.values() for name in getattr(x, "__dict__", ())}
        kept |= {name for _, name in self._model.read} | reached.stored
        return sorted(reached.names & self._model.names & kept - _OF_TORCH)

    def restore(self) -> list[str]:
        """Take values of a traced forward out again; the globals that had some, but for those that hooks write."""
        of_hooks = [one for key, one in self._of_hooks.items() if one.is_writing]
        hooked = {key for one in of_hooks for key in one.objects} | {key for one in of_hooks for key in one.rebound}
        found = []
        for key, name in sorted(self._model.read):
            value = self._model.globals[key].get(name)
            is_held = holds_proxy(value) or (_is_filled(value) and holds_proxy(_items(value)))
            if is_held and id(value) not in hooked and (key, name) not in hooked:
                found.append(name)
        for x, before in self._contents.values():
            if holds_proxy(_items(x)):
                _refill(x, before)
        for (_, name), (own, value) in self._globals.items():
            if isinstance(own.get(name), fx.Proxy):
                own[name] = value
        return found


class _Reached:
    """What some code can read or write.

    Args:
        values: functions, hooks, objects.

    Attributes:
        objects: modules, containers, classes and objects of the user's, by their ids.
        names, stored: names in the code; of attributes that it writes.
        read, rebound: globals that the code names; those that it gives new values, with the dictionary they are in.
        globals: the dictionaries that globals are in.
        is_writing: may it write to anything?
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.objects: dict[int, Any] = {}
        self.names: set[str] = set()
        self.stored: set[str] = set()
        self.read: set[tuple[int, str]] = set()
        self.rebound: dict[tuple[int, str], dict[str, Any]] = {}
        self.globals: dict[int, dict[str, Any]] = {}
        self.is_writing = False
        seen: dict[int, Any] = {}
        pending = list(values)
        while pending and len(seen) < _MANY:
            value = pending.pop()
            if type(value) not in _PLAIN and id(value) not in seen:
                seen[id(value)] = value
                pending += self._behind(value)

    def _behind(self, value: Any) -> Iterable[Any]:
        if isinstance(value, FunctionType):
            return self._behind_function(value) if is_user_function(value) else ()
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, functools.partial):
            return value.func, *value.args, *value.keywords.values()
        if isinstance(value, (KeptHook, NamedHook)):
            return (value.function,)
        if isinstance(value, tuple):
            return value
        if isinstance(value, type):
            if issubclass(value, nn.Module) or not is_of_users(value):
                return ()
            behind = [getattr(v, "__func__", v) for v in vars(value).values()]
        elif isinstance(value, nn.Module):
            behind = []
        elif isinstance(value, _CONTAINERS):
            behind = list(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, SimpleNamespace) or is_of_users(type(value)):
            behind = [type(value), *getattr(value, "__dict__", {}).values()]
        else:
            return ()
        self.objects[id(value)] = value
        return behind

    def _behind_function(self, function: FunctionType) -> Iterator[Any]:
        names, own = names_in(function), function.__globals__
        self.names |= names
        self.globals[id(own)] = own
        self.rebound |= {(id(own), name): own for name in stored_globals(function)}
        self.read |= {(id(own), name) for name in names & own.keys()}
        written, is_writing = stores(function)
        self.stored |= written
        self.is_writing |= is_writing
        yield from held_by(function)
        yield vars(function).get("__wrapped__")
        places, seen = [own], set()
        while places:  # `state.features`: of the user's files, what the code names
            for value in [v for v in map(places.pop().get, names) if v is not None]:
                if not isinstance(value, ModuleType):
                    yield value
                elif id(value) not in seen and is_user_code(getattr(value, "__file__", None) or ""):
                    seen.add(id(value))
                    places.append(vars(value))


def _is_filled(x: Any) -> bool:
    """Is it a container, or an object that holds others?"""
    if isinstance(x, (nn.Module, ModuleType, type, fx.Proxy)):
        return False
    return isinstance(x, _CONTAINERS) or hasattr(x, "__dict__")


def _own(x: Any) -> Any:
    return x if isinstance(x, _CONTAINERS) else x.__dict__


def _items(x: Any) -> list[Any]:
    own = _own(x)
    return list(own.values() if isinstance(own, dict) else own)


def _copied(x: Any) -> Any:
    return _own(x).copy()


def _refill(x: Any, before: Any) -> None:
    own = _own(x)
    own.clear()
    (own.extend if isinstance(own, (list, collections.deque)) else own.update)(before)
