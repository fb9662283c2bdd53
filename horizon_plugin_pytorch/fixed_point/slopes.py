"""Two slopes that meet at 0: PReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.elementwise import along
from horizon_plugin_pytorch.fixed_point.library import operator
from horizon_plugin_pytorch.fixed_point.rescaling import choose_factor


def choose_slopes(ratio: Tensor, slopes: Tensor, low: int, high: int, bound: float) -> tuple[Tensor, Tensor]:
    """Factors for integers from 0 up, and for those below 0, one for each slope; both of one dtype.

    Args:
        ratio: input scale over output scale.
        slopes: of any sign, or 0; a negative slope has the factor of its magnitude with the other sign, whose proof
            covers integers of both signs.
        low, high, bound: as in `choose_factor`.
    """
    sizes = (slopes.detach().double().reshape(-1) * ratio).abs()
    both = torch.cat([ratio.reshape(-1), torch.where(sizes == 0, 1.0, sizes)])
    factors = choose_factor(both, low, high, bound)
    return factors[:1], factors[1:] * torch.sign(slopes.detach().reshape(-1)).to(factors.dtype)


@operator("prelu(Tensor q, Tensor above, Tensor below, int axis, int low, int high) -> Tensor")
def prelu(q: Tensor, above: Tensor, below: Tensor, axis: int, low: int, high: int) -> Tensor:
    """``clamp((q * M + 2**(n-1)) >> n)``; ``M / 2**n`` is `above` for ``q >= 0``, else `below`, one per channel."""
    scaled = torch.where(q < 0, along(below, axis, q.dim()), along(above, -1, q.dim())).mul_(q)
    if above.dtype == torch.float32:
        return scaled.round_().clamp_(low, high)
    return scaled.add_(0.5).floor_().clamp_(low, high).float()
