"""Weights that are computed from others before each use, as by weight normalisation or pruning, become weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook
from torch.nn.utils.weight_norm import WeightNorm

from horizon_plugin_pytorch.errors import QuantizationWarning, listed, warn

_REMOVE = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}


def plain_weights(model: nn.Module) -> nn.Module:
    """Put the present values in place of parametrizations and pruning masks, in the model itself.

    Training goes on from there. What is pruned is told: its zeros stay only if the training leaves them alone.

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
    pruned = settle_weights(model)
    if pruned:
        warn(
            f"{listed(f'`{name}`' for name in pruned)} of `{type(model).__name__}` "
            f"{'are' if len(pruned) > 1 else 'is'} pruned: the zeros are in the prepared model, the mask is not, and "
            "training would fill them. To keep them, mask the gradients before training: `weight = layer.weight; "
            "weight.register_hook(lambda grad, kept=weight.detach() != 0: grad * kept)`.",
            QuantizationWarning,
        )
    return model


def settle_weights(model: nn.Module) -> list[str]:
    """Put the present values in place of what hooks compute before each forward: pruning, weight and spectral norm.

    Between an optimizer's step and the next forward, the weight that such a hook has left is that of before the step.

    Returns:
        The names of the tensors that are pruned.

    >>> layer = prune.l1_unstructured(nn.Linear(2, 2), "weight", amount=1)
    >>> settle_weights(layer), [name for name, _ in layer.named_parameters()]
    (['weight'], ['bias', 'weight'])
    """
    pruned = []
    for path, module in list(model.named_modules()):
        for hook in list(module._forward_pre_hooks.values()):
            remove = _REMOVE.get(type(hook))  # type: ignore[call-overload]
            if remove is not None:
                remove(module, hook.name)  # type: ignore[attr-defined]
                _forget_loading(module, hook.name)  # type: ignore[attr-defined]
            if isinstance(hook, prune.BasePruningMethod):
                pruned += [f"{path}.{name}" if path else name for name in _keep_pruned(module, hook._tensor_name)]
    return pruned


def _forget_loading(module: nn.Module, name: str) -> None:
    """Take off the hook that asks a checkpoint for the parts of a normalised weight: torch leaves it behind."""
    for number, wrapped in list(module._load_state_dict_pre_hooks.items()):
        hook = getattr(wrapped, "hook", wrapped)
        if isinstance(hook, SpectralNormLoadStateDictPreHook) and hook.fn.name == name:
            del module._load_state_dict_pre_hooks[number]


def _keep_pruned(module: nn.Module, name: str) -> list[str]:
    """Put a pruned tensor in the place of its mask and original; its name, if anything of it is pruned."""
    has_zeros = not bool(getattr(module, f"{name}_mask").all())
    with torch.no_grad():
        prune.remove(module, name)
    return [name] if has_zeros else []


def _take_class(module: nn.Module) -> None:
    """Give a module its own copy of its class: torch writes the computed weight there, for all copies of the module."""
    cls = type(module)
    members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(cls.__name__, cls.__bases__, members)
