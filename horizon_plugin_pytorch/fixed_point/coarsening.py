"""Channels whose weights are nothing, or almost nothing, next to what else the accumulator must hold.

Pruned or dead channels are common in trained networks: batch normalisation folds to weights of 1e-9 and a bias of 1. On
the grid of such weights the bias would need 40 bits. Their grid is made coarser by a power of two, until the bias fits;
the weights lose bits that no output can show.

A channel whose weights are all zero has no grid of its own: how sampling offsets and the last layers of branches begin.
It takes one that is fine enough for its bias and its residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.rescaling import OutputSums, by_output, signed_sums

# Beyond int32 with room for the sum there is no choice; beyond float32's integers a coarser grid is only faster, so it
# is taken where its effect on the output is provably below an eighth of a step.
_MUST_FIT = 2.0**30
_SHOULD_FIT = 2.0**23
_COMFORTABLE = 2.0**18
# How many steps a channel without weights gives to the largest number that it must hold, by its output.
_FINE_FOR_REAL = 2.0**22
_FINE_FOR_INT16 = 2.0**23
_INVISIBLE = 1 / 8
_INT8_STEPS = 256


def _by_input(values: Tensor, weight: Tensor, output_axis: int, groups: int) -> Tensor:
    """One value per output channel, in the shape that multiplies the weight."""
    if output_axis == 0:
        return values.reshape(-1, *[1] * (weight.dim() - 1))
    inputs = weight.shape[0]  # [in, out / groups, ...]: the inputs of a group see that group's outputs
    spread = values.reshape(groups, 1, -1).expand(groups, inputs // groups, -1).reshape(inputs, -1)
    return spread.reshape(*spread.shape, *[1] * (weight.dim() - 2))


def _lost(weight: Tensor, exponent: Tensor, output_axis: int, groups: int) -> Tensor:
    """What a coarser grid takes away from the magnitudes of everything that one output channel reads, at most."""
    rows = by_output(weight, output_axis, groups).flatten(1)
    (changed,) = exponent.nonzero(as_tuple=True)
    positive, negative = signed_sums(_remainder(rows[changed], exponent[changed]))
    return torch.zeros_like(exponent).index_copy_(0, changed, positive + negative)


def coarsen(
    weight: Tensor,
    bias: Tensor | None,
    accumulator_scale: Tensor,
    output_scale: Tensor | None,
    *,
    output_axis: int,
    groups: int,
    input_size: float,
    output_steps: int,
    residual_size: Tensor | float = 0.0,
    sums: OutputSums | None = None,
) -> tuple[Tensor, Tensor]:
    """Integer weights and the accumulator's scale, on a coarser grid in channels whose bias or residual needs it.

    A channel's grid becomes coarser by ``2**k``: ``weight -> round(weight / 2**k)``, ``scale -> scale * 2**k``. ``k``
    is the smallest that keeps bias and residual within 2**30; or within 2**18, where they pass 2**23 and the change
    moves no 8-bit output by more than an eighth of a step. It is 0 for ordinary channels. A residual counts only as far
    as the output can show it: what lies beyond saturates, whatever the layer adds.

    ``k`` is negative for a channel without weights whose grid would be coarse.

    Args:
        weight: integer weights, float32.
        bias: real bias, one per output channel.
        accumulator_scale: input scale times weight scale, one or one per output channel.
        output_scale: the output's scale; None for a high-precision output.
        output_axis: 0 for Conv2d and Linear, 1 for ConvTranspose2d.
        groups: the layer's groups.
        input_size: the input's largest magnitude, in integers.
        output_steps: how many steps the output's range has.
        residual_size: largest real magnitude of a tensor that is added to the accumulator.
        sums: those of the weight, where they are known.

    >>> weight, scale = torch.tensor([[127.0], [127.0]]), torch.tensor([1e-12, 1e-3], dtype=torch.float64)
    >>> w, s = coarsen(weight, torch.ones(2), scale, torch.tensor([0.1]), output_axis=0, groups=1, input_size=128,
    ...                output_steps=255)
    >>> w.flatten().tolist(), [f"{v:.1e}" for v in s.tolist()]
    ([0.0, 127.0], ['1.3e-04', '1.0e-03'])
    """
    channels = weight.shape[0] if output_axis == 0 else weight.shape[1] * groups
    scale = accumulator_scale.detach().double().reshape(-1).expand(channels)
    step = None if output_scale is None else output_scale.double().reshape(-1)
    sums = OutputSums.of(weight, output_axis, groups) if sums is None else sums
    total = sums.positive + sums.negative
    size = total * input_size * scale
    carried = torch.as_tensor(residual_size, dtype=torch.float64, device=weight.device).reshape(-1).expand(channels)
    if bias is not None:
        size = size + bias.detach().double().abs()
    if step is not None:
        carried = torch.minimum(carried, size + step * output_steps)
    if bias is not None:
        carried = torch.maximum(carried, bias.detach().double().abs())
    chosen = must = _exponent(carried / scale, _MUST_FIT, _MUST_FIT)
    largest = carried if step is None else torch.maximum(carried, step * output_steps)
    if step is not None and output_steps < _INT8_STEPS:
        should = torch.maximum(must, _exponent(largest / scale, _SHOULD_FIT, _COMFORTABLE))
        if bool(should.any()):
            error = _lost(weight, should, output_axis, groups) * input_size * scale / step
            chosen = torch.where(error <= _INVISIBLE, should, must)
    fine = _FINE_FOR_REAL if step is None else _COMFORTABLE if output_steps < _INT8_STEPS else _FINE_FOR_INT16
    is_free = (total == 0) & (largest > 0) & (largest < scale * fine)
    chosen = torch.where(is_free, torch.ceil(torch.log2(largest / (scale * fine))), chosen)
    if not bool(chosen.any()):
        return weight, accumulator_scale
    factor = _by_input(torch.ldexp(torch.ones_like(chosen), -chosen), weight, output_axis, groups).to(weight.dtype)
    return torch.round(weight * factor), torch.ldexp(scale, chosen)


def _exponent(size: Tensor, limit: float, target: float) -> Tensor:
    """The power of two that brings sizes beyond the limit down to the target; 0 for the others."""
    return torch.where(size > limit, torch.ceil(torch.log2(size.clamp(min=1.0) / target)), 0.0)


def _remainder(rows: Tensor, exponent: Tensor) -> Tensor:
    """What of the weights of each row its coarser grid does not hold."""
    exponent = exponent.clamp(max=64.0)  # far beyond every weight, and within float32
    step = torch.ldexp(torch.ones_like(exponent), exponent).to(rows.dtype).unsqueeze(1)
    return rows - torch.div(rows, step).round_().mul_(step)  # a power of two: nothing is lost in float32
