"""Telling whether two models, or two batches of data, are the same, without keeping them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.asking.functions import code_text, is_library_function
from horizon_plugin_pytorch.capture.graph_text import graph_text
from horizon_plugin_pytorch.fake_quant.dynamic import DynamicFakeQuantize
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.march import get_march
from horizon_plugin_pytorch.notes import note_of
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase

Description = dict[str, str]


def describe(model: nn.Module) -> Description:
    """What a calibration depends on, by name, in the model's order: the chip, modules, formats, weights, the graph.

    Ranges and scales that observers find are left out.

    >>> list(describe(nn.Linear(1, 1)))
    ['the march', 'the top module', 'the weights `weight`', 'the weights `bias`']
    """
    found = {"the march": str(note_of(model, "march") or get_march())}
    observed: set[int] = set()  # their tensors
    for path, module in model.named_modules():
        if isinstance(module, FakeQuantize):
            observed.update(map(id, (*module.parameters(), *module.buffers())))
            given = f" of scale {module.scale.tolist()}" if module.is_fixed else ""
            found[f"the quantizer `{path}`"] = f"{module.dtype} by {module.activation_post_process.settings()}{given}"
        elif isinstance(module, DynamicFakeQuantize):
            found[f"the quantizer `{path}`"] = f"{module}"
        elif not isinstance(module, ObserverBase):
            found[f"the module `{path}`" if path else "the top module"] = f"{type(module).__name__}{_settings(module)}"
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, tensor in tensors.items():
        if id(tensor) not in observed:
            found[f"the weights `{path}`"] = f"{digest(tensor):016x}"
    graph = note_of(model, "graph") or getattr(model, "_graph", None)
    if isinstance(graph, fx.Graph):
        found["the graph"] = f"{digest(graph_text(graph)):016x}"
    return found


def _settings(module: nn.Module) -> str:
    """What a module of a library computes with beside its tensors: a stride, a slope. Of others the graph tells."""
    is_told = is_library_function(type(module).extra_repr) and not isinstance(module, FakeCast)
    return f"({module.extra_repr()})" if is_told else ""


def first_difference(one: Description, other: Description) -> str | None:
    """The name of what is in one of the two only, or not the same; None if there is nothing."""
    if one == other:
        return None
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return mine if mine not in other else theirs
        if one[mine] != other[mine]:
            return mine
    shorter, longer = sorted((one, other), key=len)
    return next(name for name in longer if name not in shorter)


def digest(value: Any) -> int:
    """A positive number of 63 bits for what a data loader gives; tensors count by their values.

    Objects count by their attributes, functions by their code, and what has neither, such as a file, by its class.

    >>> digest([torch.ones(2), "a"]) == digest([torch.ones(2), "a"]) != digest([torch.zeros(2), "a"])
    True
    """
    state = hashlib.blake2b(digest_size=8)
    _feed(state, value, set())
    return (int.from_bytes(state.digest(), "big") >> 1) or 1


def _feed(state: Any, value: Any, around: set[int]) -> None:
    state.update(f"{type(value).__name__}:".encode())
    if id(value) in around:  # inside itself
        return
    around = {*around, id(value)}
    if isinstance(value, Tensor):
        _feed_tensor(state, value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        state.update(f"{value.dtype}{value.shape}".encode())
        state.update(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"")
    elif isinstance(value, (str, int, float, complex, bool, np.generic)) or value is None:
        state.update(repr(value).encode())
    elif isinstance(value, (bytes, bytearray)):
        state.update(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _feed(state, key, around)
            _feed(state, item, around)
    elif isinstance(value, (list, tuple, np.ndarray)):
        for item in value:
            _feed(state, item, around)
    elif is_dataclass(value):
        for field in fields(value):
            _feed(state, getattr(value, field.name, None), around)
    elif callable(value):
        state.update(code_text(value).encode())
    elif hasattr(value, "__dict__"):
        _feed(state, vars(value), around)
    state.update(b";")


def _feed_tensor(state: Any, x: Tensor) -> None:
    state.update(f"{x.dtype}{tuple(x.shape)}".encode())
    x = x.detach()
    x = (x if x.layout is torch.strided else x.to_dense()).as_subclass(Tensor)
    if x.is_meta or not x.numel():
        return
    if x.is_quantized:
        x = x.int_repr()
    state.update(x.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data)
