"""Estimates of few draws made better by what they have in common.

The square of a product with random signs scatters much: of `n` such squares the mean is off by `sqrt(2 / n)` of itself.
The sum of the squares of its parts, channel by channel, scatters little, and would be as large if the errors of the
channels had nothing to do with each other, as those of rounding mostly do. How true this is differs between models, and
between parts of one; it shows in the ratios of the two at the sites nearby. If these scatter no more than chance
explains, the parts are to be believed; if they scatter more, the whole is. This is the empirical Bayes estimate of a
normal mean, in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_FEWEST = 8  # sites of a kind, to tell how they scatter
_NEGLIGIBLE = 1e-8  # of the largest
_NEAR, _REACH = 6, 24  # sites over which the influence of a neighbour falls to a third, and at which it ends


def shrunk(wholes: Sequence[float], parts: Sequence[float], kinds: Sequence[str], freedom: int) -> list[float]:
    """Mean squares of sites, drawn towards what their parts tell, kind by kind.

    Args:
        wholes: the mean of the squared products of each site, in the order of the model or against it.
        parts: the mean of the sum of squares of the products' parts.
        kinds: what is alike: weights, activations.
        freedom: how many squares are in a mean.

    >>> parts = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    >>> shrunk([2.5, 3.2, 6.4, 7.5, 10.4, 11.7, 14.2, 15.8], parts, ["weight"] * 8, 4)[0] < 2.7  # no more than chance
    True
    >>> shrunk([1e3, 2e-3, 3e3, 4e-3, 5e3, 6e-3, 7e3, 8e-3], parts, ["weight"] * 8, 4)[0] > 500  # much more
    True
    """
    whole, part = torch.tensor(wholes, dtype=torch.float64), torch.tensor(parts, dtype=torch.float64)
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    noise = float(torch.polygamma(1, half))  # the variance of the logarithm of a mean of so many squares
    offset = float(torch.digamma(half)) - math.log(half)  # and its mean
    is_known = (whole > 0) & (part > part.amax() * _NEGLIGIBLE) if whole.numel() else whole > 0
    for kind in dict.fromkeys(kinds):
        at = is_known & torch.tensor([one == kind for one in kinds])
        if int(at.sum()) >= _FEWEST:
            whole[at] = _posterior(whole[at].log() - offset, part[at].log(), noise).exp()
    return whole.tolist()


def _posterior(whole: Tensor, part: Tensor, noise: float) -> Tensor:
    """The expected logarithms: between the ratio to the parts nearby and the own one, by how much ratios scatter."""
    ratio = whole - part
    weights = torch.exp(-torch.arange(-_REACH, _REACH + 1, dtype=ratio.dtype).abs() / _NEAR)[None, None]
    sums, counts = (F.conv1d(x[None, None], weights, padding=_REACH)[0, 0] for x in (ratio, torch.ones_like(ratio)))
    common = sums / counts
    own = ratio - common
    real = max(float(own.var()) - noise, 0.0)
    return part + common + real / (real + noise) * own
