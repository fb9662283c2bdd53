"""Which modules are one node of a graph."""

from __future__ import annotations

import torch
from torch import nn

from horizon_plugin_pytorch.operators.table import row_of_module

_LEAF_CLASSES: set[type] = set()


def add_leaf_class(cls: type) -> None:
    """Treat modules of this class as one node."""
    _LEAF_CLASSES.add(cls)


def is_marked(module: nn.Module) -> bool:
    """Is it of a class that the user marked as a leaf?"""
    return type(module) in _LEAF_CLASSES and row_of_module(type(module)) is None


def is_leaf(module: nn.Module) -> bool:
    """Is the module one node of a graph? torch's and our own are, and those that the user marked."""
    cls = type(module)  # and not `isinstance`, which a prepared module answers by who asks
    if cls in _LEAF_CLASSES or row_of_module(cls) is not None or issubclass(cls, torch.jit.ScriptModule):
        return True
    if getattr(cls, "is_traced_through", False) or issubclass(cls, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    return cls.__module__.startswith(("horizon_plugin_pytorch.nn.", "torch.nn", "torch.ao.nn"))


def runs_as_one(module: nn.Module) -> bool:
    """Is the module one node of the graph of a run? A run goes through those that the user marked for tracing."""
    return is_leaf(module) and not is_marked(module)


def is_functional(cls: type) -> bool:
    """Is it a FloatFunctional, ours or torch's?"""
    row = row_of_module(cls)
    return row is not None and row.is_functional
