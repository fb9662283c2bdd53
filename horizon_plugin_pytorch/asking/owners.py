"""Whose code a source file is: the user's, torch's, this package's."""

from __future__ import annotations

import functools
import importlib.util
import os
import sysconfig


def _folder(package: str) -> str | None:
    """Where a package lives, with a slash at the end; it is found, not imported."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else os.path.dirname(spec.origin) + os.sep


_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(__file__))
_OWN = (_PACKAGE_FOLDER + os.sep, os.path.join(os.path.dirname(_PACKAGE_FOLDER), "horizon_plugin_profiler") + os.sep)
_TORCH, _NUMPY = _folder("torch") or os.devnull, _folder("numpy") or os.devnull
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
MODULE_FILE = os.path.join(_TORCH, "nn", "modules", "module.py")
CHECKPOINT_FILE = os.path.join(_TORCH, "utils", "checkpoint.py")
TRACE_FILE = os.path.join(_TORCH, "jit", "_trace.py")
QUANTIZATION_FOLDER = os.path.join(_TORCH, "ao") + os.sep  # torch's own
QCONFIG_FILE = os.path.join(QUANTIZATION_FOLDER, "quantization", "qconfig.py")  # which tries qconfigs, and no more

USER, PACKAGE, TORCH, OTHER = range(4)
_OWNERS: dict[str, int] = {}  # of the files that were met


def is_user_code(file: str) -> bool:
    """True if a source file belongs to the user, rather than to Python, torch, numpy, this package, or generated code.

    >>> is_user_code("/home/me/torch/model.py"), is_user_code(__file__), is_user_code("<eval_with_key>.0")
    (True, False, False)
    >>> is_user_code(os.__file__)
    False
    """
    return owner_of(file) == USER and not is_standard_library(file)


def is_torch_code(file: str) -> bool:
    """True if a source file belongs to torch."""
    return owner_of(file) == TORCH


def is_package_code(file: str) -> bool:
    """True if a source file belongs to this package, its profiler included."""
    return owner_of(file) == PACKAGE


@functools.lru_cache(4096)
def is_standard_library(file: str) -> bool:
    """True if a source file came with Python itself.

    >>> import dataclasses
    >>> is_standard_library(dataclasses.__file__), is_standard_library("/home/me/model.py")
    (True, False)
    """
    return file.startswith(_STANDARD) and not any(folder in file for folder in _INSTALLED)


def is_library(file: str) -> bool:
    """True if a source file came with Python, or is of an installed package."""
    return file.startswith(_STANDARD) or any(folder in file for folder in _INSTALLED)


def owner_of(file: str) -> int:
    """USER, PACKAGE, TORCH or OTHER: numpy's and generated code. Python's own asks on behalf of the user."""
    owner = _OWNERS.get(file)
    if owner is None:
        if file.startswith(_OWN):
            owner = PACKAGE
        elif file.startswith(_TORCH):
            owner = TORCH
        else:
            owner = OTHER if file.startswith(("<eval_with_key>", _NUMPY)) else USER
        if not file.startswith("<"):  # generated code has a new name each time
            _OWNERS[file] = owner
    return owner


@functools.lru_cache(4096)
def line_of(file: str, line: int) -> str:
    """A line as messages name it: ``model.py:41``."""
    return f"{file.rpartition(os.sep)[2]}:{line}"
