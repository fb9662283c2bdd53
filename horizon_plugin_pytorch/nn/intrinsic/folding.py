"""Batch normalisation as a part of the layer before it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.intrinsic.fused import check_rank_hook
from horizon_plugin_pytorch.runtime.hooks import keep


def gain_of(bn: Any) -> Tensor:
    """``gamma / sqrt(var + eps)`` with the running statistics, float64."""
    gain = torch.rsqrt(bn.running_var.double() + bn.eps)
    return gain if bn.weight is None else gain * bn.weight.double()


def by_output(values: Tensor, layer: Any) -> Tensor:
    """One value an output channel, in a shape that multiplies the layer's weight."""
    spread = [1] * (layer.weight.dim() - 2)
    if not getattr(layer, "transposed", False):
        return values.reshape(-1, 1, *spread)
    inputs = layer.weight.shape[0] // layer.groups  # [in, out / groups, ...]: a group's inputs see its outputs
    return (
        values.reshape(layer.groups, 1, -1).expand(-1, inputs, -1).flatten(0, 1).reshape(layer.in_channels, -1, *spread)
    )


def fold(layer: Any, bn: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of the layer with the batch normalisation in them; gradients pass.

    ``W' = W * g``, ``b' = (b - mean) * g + beta`` with ``g = gamma / sqrt(var + eps)``, in float64.
    """
    gain = gain_of(bn)
    weight = _multiplied(layer.weight, by_output(gain, layer))
    bias = -bn.running_mean.double() if layer.bias is None else layer.bias.double() - bn.running_mean.double()
    bias = bias * gain
    if bn.bias is not None:
        bias = bias + bn.bias.double()
    return weight, bias.to(layer.weight.dtype)


_CHUNK = 2**16  # numbers that stay in the processor's cache as float64


def _multiplied(weight: Tensor, gain: Tensor) -> Tensor:
    """``weight * gain`` in float64, rounded to the weight's type; gain is of the weight's length along axis 0."""
    if torch.is_grad_enabled() or weight.numel() <= _CHUNK:
        return (weight.double() * gain).to(weight.dtype)
    out = torch.empty_like(weight)
    rows = max(1, _CHUNK * len(weight) // weight.numel())
    for part, factor, target in zip(weight.split(rows), gain.split(rows), out.split(rows), strict=True):
        target.copy_(part.double() * factor)
    return out


@torch.no_grad()
def fold_bn(layer: Any, bn: Any) -> Any:
    """A copy of the layer with the batch normalisation in its weight and bias.

    >>> fold_bn(nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2)).bias.shape
    torch.Size([2])
    """
    out = copy.copy(layer)
    out._parameters = dict(layer._parameters)
    weight, bias = fold(layer, bn)
    out._parameters["weight"] = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    shifts = [p for p in (layer.bias, bn.weight, bn.bias) if p is not None]
    out._parameters["bias"] = nn.Parameter(bias, requires_grad=any(p.requires_grad for p in shifts))
    rank = rank_for(layer, bn)
    if rank is not None:
        out.input_rank = rank
        out._forward_pre_hooks = layer._forward_pre_hooks.copy()
        keep(out.register_forward_pre_hook, check_rank_hook)
    return out


def rank_for(layer: nn.Module, bn: nn.Module) -> int | None:
    """The only rank of inputs for which folding is right: normalisation is along axis 1, a Linear along the last."""
    if isinstance(layer, nn.Linear):
        return 2
    return 3 if isinstance(bn, nn.BatchNorm1d) else None
