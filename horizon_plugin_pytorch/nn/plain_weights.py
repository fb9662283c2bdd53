"""Weights that are computed from others before each use, as weight normalisation does, become weights."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_REMOVE = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}


def plain_weights(model: nn.Module) -> nn.Module:
    """Put the present values in place of parametrizations, in the model itself; training goes on from there.

    A layer on the chip has one weight, and its scale belongs to that weight.

    >>> from torch.nn.utils.parametrizations import weight_norm
    >>> layer = weight_norm(nn.Linear(2, 2))
    >>> [name for name, _ in plain_weights(layer).named_parameters()]
    ['bias', 'weight']
    """
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            _take_class(module)
            for name in list(module.parametrizations):  # type: ignore[arg-type]
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
        for hook in list(module._forward_pre_hooks.values()):
            remove = _REMOVE.get(type(hook))  # type: ignore[call-overload]
            if remove is not None:
                remove(module, hook.name)  # type: ignore[attr-defined]
    return model


def _take_class(module: nn.Module) -> None:
    """Give a module its own copy of its class: torch writes the computed weight there, for all copies of the module."""
    cls = type(module)
    members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(cls.__name__, cls.__bases__, members)
