"""Models that are named on the command line: ``module:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from horizon_plugin_profiler.command_line.outcomes import UsageError, UserCodeError

_FORM = "give it as module:function, for example my_project.models:make, or as a file, nets/resnet.py:make"


def find(target: str) -> Any:
    """What a name stands for, without calling it.

    Args:
        target: ``package.module:name``, ``folder/file.py:name``; the name may have dots.

    Raises:
        UsageError: there is no such module, file or name.
        UserCodeError: the module cannot be imported.

    >>> find("torch.nn:Linear")
    <class 'torch.nn.modules.linear.Linear'>
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UsageError(f"`{target}` names no model: {_FORM}.")
    found: Any = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            names = sorted(n for n, v in vars(found).items() if callable(v) and not n.startswith("_"))
            raise UsageError(f"`{place}` has no `{name}`; it has {', '.join(names) or 'nothing that can be called'}.")
        found = getattr(found, part)
    return found


def models_of(target: str) -> tuple[nn.Module, ...]:
    """The model that a name stands for, or the pair: a module, or what a class or function gives.

    Raises:
        UsageError: there is no such name, or it gives something else.
        UserCodeError: the function fails.

    >>> [type(model).__name__ for model in models_of("torch.nn:Identity")]
    ['Identity']
    """
    found = find(target)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise UsageError(f"`{target}` is a {type(found).__name__}: give a model, or a function that makes one.")
        found = call(target, found)
    given = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    if not given or len(given) > 2 or not all(isinstance(model, nn.Module) for model in given):
        kinds = ", ".join(type(model).__name__ for model in given)
        raise UsageError(f"`{target}` gives ({kinds}): it must give a model, or a pair (float model, quantized model).")
    return given


def call(target: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's.

    Raises:
        UserCodeError: it fails.
    """
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"`{target}` raised {type(error).__name__}: {error}") from error


def load_checkpoint(model: nn.Module, path: str) -> None:
    """Load the state dict of a file: the whole of it, or what is under ``state_dict`` or ``model``.

    Raises:
        UsageError: it cannot be read, or does not fit.
    """
    state = load_tensors(path)
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping):
        raise UsageError(f"{path} holds a {type(state).__name__}: give a file of a state dict.")
    try:
        model.load_state_dict(state)
    except Exception as error:
        raise UsageError(f"{path} does not fit the model: {error}") from error


def load_tensors(path: str) -> Any:
    """What a file of `torch.save` holds; nothing in it is executed.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{path} cannot be read as tensors: {reason} Files that hold other classes are not loaded, as they could "
            "run code: save tensors, in tuples, lists and dictionaries."
        ) from error


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _file(place)
    if not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"`{place}` is no module: {_FORM}.")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise UsageError(f"There is no module `{place}` here: {_FORM}.") from None
        raise UserCodeError(f"`{place}` cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"`{place}` cannot be imported: {type(error).__name__}: {error}") from error


def _file(path: str) -> ModuleType:
    """A module from a file, whose folder can be imported from, as if Python had been started with it."""
    full = os.path.realpath(path)
    if not os.path.isfile(full):
        raise UsageError(f"There is no file `{path}`: {_FORM}.")
    name = f"{os.path.basename(full)[:-3]}_{hashlib.blake2b(full.encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if os.path.dirname(full) not in sys.path:
        sys.path.insert(0, os.path.dirname(full))
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserCodeError(f"`{path}` cannot be imported: {type(error).__name__}: {error}") from error
    return module
