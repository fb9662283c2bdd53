"""The model inside of what `torch.compile`, DataParallel and DistributedDataParallel put around it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from horizon_plugin_pytorch.capture.kept_functions import rebind_functions
from horizon_plugin_pytorch.errors import HorizonError, QuantizationConfigError, QuantizationWarning, at, warn
from horizon_plugin_pytorch.runtime.hooks import note_own_hooks

_COMPILED = "OptimizedModule"  # by name: to import the compiler takes seconds


def _inside(module: nn.Module) -> nn.Module | None:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module.module
    return module._modules.get("_orig_mod") if type(module).__name__ == _COMPILED else None


def is_compiled(module: nn.Module) -> bool:
    """Does `torch.compile` run the module, around it or in it?"""
    return type(module).__name__ == _COMPILED or getattr(module, "_compiled_call_impl", None) is not None


def unwrapped(model: nn.Module, what: str) -> nn.Module:
    """The model itself; what was around it is told.

    Args:
        what: the verb, for the message.

    >>> type(unwrapped(nn.Linear(1, 1), "prepare")).__name__
    'Linear'
    """
    around: list[str] = []
    inner = _inside(model)
    while inner is not None:
        around.append("torch.compile" if type(model).__name__ == _COMPILED else type(model).__name__)
        model, inner = inner, _inside(inner)
    if around:
        warn(
            f"{what} takes `{type(model).__name__}` out of {' and '.join(around)}: its paths and the keys of its "
            "state_dict have no prefix of these. Put the prepared model into DataParallel or DistributedDataParallel "
            "again; compiled code cannot compute with scales.",
            QuantizationWarning,
        )
    return model


def plain_modules(model: nn.Module) -> nn.Module:
    """Take parts of a model out of what compiles or distributes them, in the model itself; their hooks are its own."""
    for module in list(model.modules()):
        note_own_hooks(module)
        module._compiled_call_impl = None  # type: ignore[assignment]
        for name, child in module._modules.items():
            inner = None if child is None else _inside(child)
            while inner is not None:
                module._modules[name] = inner
                inner = _inside(inner)
    return model


def require_shapes(model: nn.Module, what: str) -> None:
    """Insist that all parameters and buffers are there.

    Raises:
        QuantizationConfigError: names one of a lazy module that has not run.
    """
    for path, tensor in _tensors(model):
        if is_lazy(tensor):
            raise QuantizationConfigError(
                f"{what}: the module {at(path.rpartition('.')[0])} is lazy and has no weights yet. Run the float model "
                "once on an input, then prepare it."
            )


def require_numbers(model: nn.Module, what: str) -> None:
    """Insist that all parameters and buffers have numbers, for a model that is to run.

    Raises:
        QuantizationConfigError: names one on the meta device.
    """
    for path, tensor in _tensors(model):
        if tensor.is_meta:
            raise QuantizationConfigError(
                f"{what}: the module {at(path.rpartition('.')[0])} is on the meta device, which has no numbers to run "
                "with. Give the model its weights (`to_empty(device='cpu')` and `load_state_dict`), then prepare it."
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def require_float32_weights(module: nn.Module, place: str) -> None:
    """Insist that a layer to be quantized has weights in float32.

    Raises:
        QuantizationConfigError: names the layer and its type.
    """
    other = next((p.dtype for p in module.parameters() if p.is_floating_point() and p.dtype != torch.float32), None)
    if other is not None:
        raise QuantizationConfigError(
            f"`{type(module).__name__}` {place} has weights of {other}, and is to be quantized: integers are made of "
            "float32. Call `model.float()` before you prepare it; a layer that computes in float16 on the chip is "
            "asked for with a qconfig (`get_qconfig(out_dtype=torch.float16)`)."
        )


def copy_model(model: nn.Module, what: str) -> nn.Module:
    """A deep copy, whose functions hold its own parts, or an error that says why the model cannot be copied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                # What autograd computed and a module keeps (a normalised weight, its last output), copied as a value.
                memo[id(value)] = value.detach().clone()
            elif type(value) in (OrderedDict, set) and not value:
                # Of hooks, and of buffers that are not saved: most of the time of a deep copy went into empty ones.
                memo[id(value)] = type(value)()
    try:
        copied = copy.deepcopy(model, memo)
        for module in model.modules():
            if isinstance(module, fx.GraphModule):  # whose copy has what the graph reads, and no `qconfig`
                own = vars(memo.get(id(module), module))
                lost = {name: value for name, value in vars(module).items() if name not in own}
                own.update(copy.deepcopy(lost, memo))
        rebind_functions(memo)
        return copied
    except Exception as error:
        raise HorizonError(
            f"{what} copies `{type(model).__name__}` and could not: {str(error).rstrip('.')}. Something that cannot be "
            "copied (a lock, an open file, a generator) is stored as an attribute of a module; make it where it is "
            "needed, or give that module a `__deepcopy__`."
        ) from error
