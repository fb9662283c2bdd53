"""Code that cannot tell eval mode from training mode: one run of it shows both."""

from __future__ import annotations

import functools
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.asking.functions import is_user_function, names_in
from horizon_plugin_pytorch.capture.leaves import is_functional, runs_as_one

# What tells the modes apart: the flag, what `train()` sets, and gradients, which are on in training alone.
_TELLING = frozenset(
    "training train eval is_grad_enabled is_inference_mode_enabled is_inference requires_grad grad_fn is_leaf grad "
    "set_grad_enabled enable_grad inference_mode exec".split()
)
_MANY = 4000  # values; code that names more than these is taken to tell the modes apart
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("hooks"))


def is_mode_blind(model: nn.Module) -> bool:
    """True if nothing that a forward may run names the mode, or gradients.

    Read is the code of all modules that are not one node, and whatever this names: functions, classes, objects in
    attributes, hooks. Modules that are one node (`nn.Dropout`, `nn.BatchNorm2d`) are so in both modes, but for a
    dropout in place, which writes in training alone.

    >>> is_mode_blind(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    True
    >>> class Net(nn.Module):
    ...     __module__ = "my_models"
    ...     def forward(self, x):
    ...         return x + 1 if self.training else x
    >>> Net.forward.__code__ = Net.forward.__code__.replace(co_filename="my_models.py")
    >>> is_mode_blind(Net())
    False
    """
    pending: list[Any] = []
    for module in model.modules():
        is_writing = isinstance(module, nn.modules.dropout._DropoutNd) and module.inplace  # in training alone
        if is_writing or isinstance(module, torch.jit.ScriptModule):
            return False
        pending += [hook for name in _HOOKS for hook in vars(module).get(name, {}).values()]
        if "forward" in vars(module) or not (is_functional(type(module)) or runs_as_one(module)):
            pending.append(module)
    seen: dict[int, Any] = {}
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen[id(value)] = value
        found = _named_by(value)
        if found is None or len(seen) > _MANY:
            return False
        pending += found
    return True


_ATOMS = (bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, type(None))


def _named_by(value: Any) -> list[Any] | None:
    """What a value leads to; None if it tells the modes apart."""
    if isinstance(value, FunctionType):
        return _named_by_function(value)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, CellType):
        try:
            kept = value.cell_contents
        except ValueError:  # not set yet
            return []
        return None if isinstance(kept, (list, dict, set)) else [kept]  # which a forward may fill, and ask
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, type):
        return _named_by_class(value)
    is_known = isinstance(value, nn.Module) and "forward" not in vars(value) and runs_as_one(value)
    if is_known or isinstance(value, ModuleType) or not _is_written_in_python(type(value)):
        return []
    return [type(value), *getattr(value, "__dict__", {}).values()]


def _named_by_class(cls: type) -> list[Any] | None:
    if not _is_written_in_python(cls):
        return []
    own = vars(cls)
    if cls.__module__.startswith("torch."):  # in which somebody replaced a function
        return [value for value in own.values() if is_user_function(_plain(value))]
    return None if own.keys() & _TELLING else [*own.values(), *cls.__bases__]


def _is_written_in_python(cls: type) -> bool:
    """True for a class of the user's: one that defines a function of the user's, or derives from such a class."""
    return any(is_user_function(_plain(value)) for base in cls.__mro__ for value in vars(base).values())


def _plain(value: Any) -> Any:
    value = value.fget if isinstance(value, property) else value
    return getattr(value, "__func__", value)


def _named_by_function(function: FunctionType) -> list[Any] | None:
    found = [vars(function).get("__wrapped__")]
    if not is_user_function(function):
        return found
    names = names_in(function)
    if names & _TELLING:
        return None
    found += [function.__closure__, function.__defaults__, function.__kwdefaults__]
    places, seen = [function.__globals__], set()
    while places:  # `utils.layers.act`: modules are read, not asked, as some import what they are asked for
        for value in [v for v in map(places.pop().get, names) if v is not None]:
            if not isinstance(value, ModuleType):
                found.append(value)
            elif id(value) not in seen and not value.__name__.startswith(("torch.", "numpy.")):
                seen.add(id(value))
                places.append(vars(value))
    return found
