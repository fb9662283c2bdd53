"""Two slopes that meet at 0: PReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.elementwise import along
from horizon_plugin_pytorch.fixed_point.library import operator


@operator("prelu(Tensor q, Tensor above, Tensor below, int axis, bool is_convex, int low, int high) -> Tensor")
def prelu(q: Tensor, above: Tensor, below: Tensor, axis: int, is_convex: bool, low: int, high: int) -> Tensor:
    """``clamp(round(q * slope))`` in float32; the slope is `above` for ``q >= 0``, else `below`, one per channel.

    Args:
        is_convex: no slope below 0 is steeper, so the larger product is the right one.
    """
    above, below = along(above, -1, q.dim()), along(below, axis, q.dim())
    if is_convex:
        out = q * above
        torch.maximum(out, q * below, out=out)
    else:
        out = q.clamp(min=0).mul_(above)
        out += q.clamp(max=0).mul_(below)  # one of the two is 0
    return out.round_().clamp_(low, high)
