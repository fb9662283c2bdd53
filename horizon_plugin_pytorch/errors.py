"""Every exception and warning that the package raises on purpose.

A message says what happened, to which module at which line of the user's model, what was expected, and
what to do next.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.asking.owners import is_user_code
from horizon_plugin_pytorch.asking.stack import levels_to_user

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


class HorizonError(Exception):
    """Base of the package's errors."""


class MarchNotSetError(HorizonError, RuntimeError):
    """A march-dependent call was made before `set_march`."""


class UnsupportedOperatorError(HorizonError, NotImplementedError):
    """An operator of the model has no quantized form on the chosen march."""


class UnknownCallError(HorizonError, RuntimeError):
    """A prepared model met code that did not run when it was prepared."""


class TraceError(HorizonError, RuntimeError):
    """Symbolic trace cannot follow the model's Python code, or `torch.compile` a model that computes with scales."""


class QuantizationConfigError(HorizonError, ValueError):
    """A qconfig, an observer argument or a fixed scale makes no sense."""


class FusionError(HorizonError, ValueError):
    """The modules to fuse do not form a pattern that the BPU fuses."""


class CheckpointError(HorizonError, RuntimeError, ValueError):
    """A state dict cannot be loaded into a prepared or converted model. A RuntimeError, as of torch, too."""


class CheckError(HorizonError, RuntimeError):
    """A prepared model cannot run on the inputs it is checked with."""


class ConversionError(HorizonError, RuntimeError):
    """A QAT module cannot become a quantized module."""


class OperatorInputError(HorizonError, RuntimeError):
    """An operator of a prepared or converted model cannot run on the tensors that reached it."""

    complaint = ""  # of a function: what it takes and what it got, for the module that runs it


class ExportError(HorizonError, RuntimeError):
    """A quantized model cannot be written as ONNX."""


class CalibrationError(HorizonError, RuntimeError):
    """Calibration could not go on, or a scale is not a number."""


class QuantizationWarning(UserWarning):
    """Something in the prepared model deserves a look."""


class CalibrationWarning(QuantizationWarning):
    """Statistics were missing or unusable; the message names the module and the scale that is used."""


class AccumulatorWarning(UserWarning):
    """An accumulator may leave int32 in the worst case."""


class TableWarning(UserWarning):
    """A look-up table is further from its function than two steps of the output."""


def warn(message: str, category: type[Warning]) -> None:
    """Warn, and point to the line of the user's code that called the package, however deep the warning comes from."""
    warnings.warn(message, category, stacklevel=levels_to_user())


_TOLD: set[tuple[str, type[Warning]]] = set()


def warn_once(message: str, category: type[Warning]) -> None:
    """Warn of what is so each time that a model is prepared, for calibration and for training: it is shown once.

    Filters of the user's that say "always" or "error" get it each time, as from Python: this is for those that show a
    warning once for each place, which is another line here though it is the same model.
    """
    action = _action_on(message, category)
    if action in ("default", "module", "once"):
        if (message, category) in _TOLD:
            return
        _TOLD.add((message, category))
    warn(message, category)


def _action_on(message: str, category: type[Warning]) -> str:
    """What the user's filters do with a warning."""
    for action, text, kind, module, line in warnings.filters:
        if issubclass(category, kind) and (text is None or text.match(message)) and module is None and not line:
            return action
    return "default"


def source_line(stack_trace: str | None) -> str:
    """The innermost line of user code in a stack trace, as ``model.py:41``; empty if unknown.

    >>> source_line('File "/a/model.py", line 41, in forward')
    'model.py:41'
    """
    if not stack_trace:
        return ""
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(stack_trace) if is_user_code(m["file"])]
    if not frames:
        return ""
    file, line = frames[-1]
    return f"{os.path.basename(file)}:{line}"


def at(path: str, line: str = "") -> str:
    """``at `path` (file:line)`` for use inside a message.

    >>> at("backbone.conv", "model.py:41")
    'at `backbone.conv` (model.py:41)'
    """
    place = f"at `{path}`" if path else "in the top module"
    return f"{place} ({line})" if line else place


def require_module(model: Any, who: str, wanted: str = "a model") -> None:
    """Insist on a module, where users give files, classes and state dicts.

    >>> require_module({}, "calibrate")
    Traceback (most recent call last):
    TypeError: calibrate takes a model (an `nn.Module`), got a dict: load a state dict into a model, and give that.
    """
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        given = f"the class `{model.__name__}`: make a model of it, `{model.__name__}(...)`, and give that"
    elif isinstance(model, (str, os.PathLike)):
        given = f"{os.fspath(model)!r}: load the file, and give the model"
    elif isinstance(model, Mapping):
        given = f"a {type(model).__name__}: load a state dict into a model, and give that"
    elif isinstance(model, torch.export.ExportedProgram):
        given = "an ExportedProgram: give the model that it was exported of"
    elif callable(model):
        given = f"the function `{getattr(model, '__name__', type(model).__name__)}`: give the module that it belongs to"
    else:
        given = f"{'None' if model is None else f'a {type(model).__name__}'}"
    raise TypeError(f"{who} takes {wanted} (an `nn.Module`), got {given}.")


def require_whole(who: str, name: str, value: Any, least: int, most: float = math.inf) -> None:
    """Refuse what is no whole number within the limits."""
    if not (isinstance(value, Integral) and least <= int(value) <= most):
        limits = f"in [{least}, {most}]" if most < math.inf else f"from {least} on"
        raise QuantizationConfigError(f"{who}: {name} must be a whole number {limits}, got {value!r}.")


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names as messages list them: the first few, and how many more there are.

    >>> listed(["conv1", "conv2", "conv3"], most=2)
    'conv1, conv2 and 1 more'
    """
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
