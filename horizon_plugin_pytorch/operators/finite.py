"""Functions with a finite value and a finite slope everywhere: what is put into a table, and trained with.

Outside of a function's domain the value is that of the domain's nearest end, where it is not finite a chosen largest
magnitude, and there is no gradient there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 100.0  # functions with a pole are clipped here by default


def _where(is_inside: Tensor, function: Callable[[Tensor], Tensor], x: Tensor, inner: float, outside: object) -> Tensor:
    """``function(x)`` inside, `outside` elsewhere; there the function gets `inner`, so no gradient is lost to NaN."""
    return torch.where(is_inside, function(torch.where(is_inside, x, inner)), outside)  # type: ignore[call-overload]


def sqrt(x: Tensor) -> Tensor:
    """``sqrt(x)``; 0 for negative x. At 0 the slope is infinite; no gradient there.

    >>> sqrt(torch.tensor([-1.0, 0.0, 4.0]))
    tensor([0., 0., 2.])
    """
    return _where(x > 0, torch.sqrt, x, 1.0, 0.0)


def rsqrt(x: Tensor, epsilon: float = 0.0, max_value: float = LARGEST) -> Tensor:
    """``1 / sqrt(max(x, 0) + epsilon)``, at most `max_value`."""
    shifted = x.clamp(min=0.0) + epsilon
    return _where(shifted >= max_value**-2, torch.rsqrt, shifted, 1.0, max_value)


def reciprocal(x: Tensor, max_value: float = LARGEST) -> Tensor:
    """``1 / x`` within ``[-max_value, max_value]``; `max_value` at 0.

    >>> reciprocal(torch.tensor([-0.001, 0.0, 4.0]))
    tensor([-100.0000,  100.0000,    0.2500])
    """
    return _where(x.abs() >= 1 / max_value, torch.reciprocal, x, 1.0, torch.where(x < 0, -max_value, max_value))


def log(x: Tensor, min_value: float = -10.0) -> Tensor:
    """``log(x)``, at least `min_value`, also for x <= 0.

    >>> log(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-10., -10.,   0.])
    """
    return _where(x > math.exp(min_value), torch.log, x, 1.0, min_value)


def log2(x: Tensor) -> Tensor:
    """``log2(x)``, as `log`."""
    return log(x) / math.log(2)


def log10(x: Tensor) -> Tensor:
    """``log10(x)``, as `log`."""
    return log(x) / math.log(10)


def log1p(x: Tensor, min_value: float = -10.0) -> Tensor:
    """``log(1 + x)``, at least `min_value`, also for x <= -1."""
    return _where(x > math.expm1(min_value), torch.log1p, x, 0.0, min_value)


def pow(x: Tensor, exponent: float, max_value: float = LARGEST) -> Tensor:
    """``x ** exponent``.

    With a negative exponent its magnitude is at most `max_value`. A negative x has no broken power: it counts as 0.

    >>> pow(torch.tensor([-2.0, 0.0, 4.0]), 3), pow(torch.tensor([-2.0, 0.0, 4.0]), -0.5)
    (tensor([-8.,  0., 64.]), tensor([100.0000, 100.0000,   0.5000]))
    """
    is_whole = float(exponent).is_integer()
    if exponent >= 0 and is_whole:
        return torch.pow(x, exponent)
    if exponent > 0:
        return _where(x > 0, lambda v: torch.pow(v, exponent), x, 1.0, 0.0)
    edge = max_value ** (1 / exponent)
    largest: object = torch.where(x < 0, -max_value, max_value) if is_whole and exponent % 2 else max_value
    return _where((x.abs() if is_whole else x) >= edge, lambda v: torch.pow(v, exponent), x, 1.0, largest)


def tan(x: Tensor, max_value: float = LARGEST) -> Tensor:
    """``tan(x)`` within ``[-max_value, max_value]``."""
    return torch.tan(x).clamp(-max_value, max_value)


def asin(x: Tensor) -> Tensor:
    """``asin(x)``; beyond [-1, 1] as at the nearest end."""
    return _where(x.abs() < 1, torch.asin, x, 0.0, torch.where(x < 0, -math.pi / 2, math.pi / 2))


def acos(x: Tensor) -> Tensor:
    """``acos(x)``; beyond [-1, 1] as at the nearest end."""
    return _where(x.abs() < 1, torch.acos, x, 0.0, torch.where(x < 0, math.pi, 0.0))


def acosh(x: Tensor) -> Tensor:
    """``acosh(x)``; 0 below 1."""
    return _where(x > 1, torch.acosh, x, 2.0, 0.0)


def atanh(x: Tensor, max_value: float = 6.0) -> Tensor:
    """``atanh(x)`` within ``[-max_value, max_value]``, also beyond (-1, 1)."""
    return _where(x.abs() < math.tanh(max_value), torch.atanh, x, 0.0, torch.where(x < 0, -max_value, max_value))


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """``log(x / (1 - x))`` of x within ``[eps, 1 - eps]``; without `eps`, within [-10, 10].

    >>> logit(torch.tensor([0.0, 0.25, 1.0])).round(decimals=1)
    tensor([-10.0000,  -1.1000,  10.0000])
    """
    edge = 1 / (1 + math.exp(10)) if eps is None else max(eps, 1e-7)
    return torch.logit(x, edge)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """``atan2(y, x)``; no gradient at the origin, and 0 has no sign, as among integers.

    >>> atan2(torch.tensor([0.0, 1.0, -0.0]), torch.tensor([0.0, 0.0, -1.0]))
    tensor([0.0000, 1.5708, 3.1416])
    """
    is_origin = (y == 0) & (x == 0)
    return torch.atan2(torch.where(is_origin, 0.0, y + 0.0), torch.where(is_origin, 1.0, x))
