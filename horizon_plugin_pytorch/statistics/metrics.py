"""How far tensors are from what they should be.

Each metric keeps sums and no tensors, so that it can be given batch after batch: the result is that of all the numbers
together. Sums are in float64, and stay on the device of the tensors until somebody asks for the result.

Where both tensors hold the same infinity, or NaN, nothing is counted. NaN or infinity in one of them only is as wrong
as can be: errors are infinite, `SQNR` is minus infinity, and `Cosine` is NaN.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import QuantizationConfigError

_TINY = 1e-30  # for sums that are divided by
_PART = 1 << 17  # numbers at a time: their float64 form stays in the cache, and takes no memory of note


class Metric(ABC):
    """Compares tensors with those that are wanted, over as many pairs as are given.

    >>> error = MSE()
    >>> error.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    >>> error.update(torch.tensor([3.0, 3.0]), torch.tensor([3.0, 3.0]))
    >>> error.result()
    1.0
    """

    higher_is_better: ClassVar[bool] = False

    def __init__(self) -> None:
        self._sums: Any = 0.0

    def update(self, found: Tensor, wanted: Tensor) -> None:
        """Count another pair of tensors.

        Raises:
            ValueError: if they differ in shape.
        """
        if found.shape != wanted.shape:
            raise ValueError(f"tensors of shapes {tuple(found.shape)} and {tuple(wanted.shape)} cannot be compared.")
        found, wanted = found.detach().flatten(), wanted.detach().flatten()
        if not found.numel():
            self._add(found.double(), wanted.double())
        for one, other in zip(found.split(_PART), wanted.split(_PART), strict=True):  # in float64, bit by bit
            self._add(one.double(), other.double())

    def _add(self, found: Tensor, wanted: Tensor) -> None:
        """Count numbers, as many of the one as of the other."""
        new = torch.stack(self._terms(found, wanted))
        if not bool(new.isfinite().all()):  # a sum of squares is finite if the numbers are
            new = torch.stack(self._terms(*_counted(found, wanted)))
        self._sums = self._sums + new

    @abstractmethod
    def _terms(self, found: Tensor, wanted: Tensor) -> list[Tensor]:
        """What is summed up."""

    @abstractmethod
    def _value(self, *sums: float) -> float:
        """The result, of the sums."""

    @property
    def is_empty(self) -> bool:
        """Was nothing compared yet?"""
        return not isinstance(self._sums, Tensor)

    def result(self) -> float:
        """The metric over all pairs so far; NaN if there was none."""
        return math.nan if self.is_empty else self._value(*self._sums.tolist())


class Cosine(Metric):
    """The cosine of the angle between the tensors; 0 if one of them is all zeros."""

    higher_is_better = True

    def _terms(self, found: Tensor, wanted: Tensor) -> list[Tensor]:
        return [torch.dot(found, wanted), torch.dot(found, found), torch.dot(wanted, wanted)]

    def _value(self, *sums: float) -> float:
        product, found, wanted = sums
        size = math.sqrt(found) * math.sqrt(wanted)
        return product / size if size else 0.0


class MSE(Metric):
    """The mean of the squared differences."""

    def _terms(self, found: Tensor, wanted: Tensor) -> list[Tensor]:
        return [_squares(found - wanted), _count(found)]

    def _value(self, *sums: float) -> float:
        return _or_infinite(sums[0] / max(sums[1], 1))


class L1(Metric):
    """The mean of the absolute differences."""

    def _terms(self, found: Tensor, wanted: Tensor) -> list[Tensor]:
        return [(found - wanted).abs().sum(), _count(found)]

    def _value(self, *sums: float) -> float:
        return _or_infinite(sums[0] / max(sums[1], 1))


class RelativeError(Metric):
    """``|found - wanted| / |wanted|`` (L2 norms)."""

    def _terms(self, found: Tensor, wanted: Tensor) -> list[Tensor]:
        return [_squares(found - wanted), _finite_squares(wanted)]

    def _value(self, *sums: float) -> float:
        return _or_infinite(math.sqrt(sums[0]) / max(math.sqrt(sums[1]), _TINY))


class SQNR(Metric):
    """What is wanted over the noise that is added to it, in decibels; infinite for equal tensors."""

    higher_is_better = True

    def _terms(self, found: Tensor, wanted: Tensor) -> list[Tensor]:
        return [_finite_squares(wanted), _squares(found - wanted)]

    def _value(self, *sums: float) -> float:
        signal, noise = sums
        if noise == 0:
            return math.inf
        if not math.isfinite(noise) or signal == 0:
            return -math.inf
        return 10 * (math.log10(signal) - math.log10(noise))


class KL(Metric):
    """The divergence of the softmax over all numbers that are found from that of the numbers that are wanted.

    The sums are of exponentials, relative to the largest number so far.
    """

    def _add(self, found: Tensor, wanted: Tensor) -> None:
        found, wanted = _counted(found, wanted)
        if not found.numel():
            return
        new = torch.stack([*_exponentials(found, found), *_exponentials(wanted, wanted - found)])
        self._sums = new if self.is_empty else _joined(self._sums, new)

    def _terms(self, found: Tensor, wanted: Tensor) -> list[Tensor]:
        raise AssertionError("KL adds numbers in another way.")

    def _value(self, *sums: float) -> float:
        largest_found, total_found, _, largest, total, weighted = sums
        if not all(map(math.isfinite, sums)):
            return math.inf
        log_found, log_wanted = largest_found + math.log(total_found), largest + math.log(total)
        return max(weighted / total + log_found - log_wanted, 0.0)


def _exponentials(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest number, the sum of exponentials relative to it, and that with weights."""
    largest = x.max()
    shares = (x - largest).exp()
    return largest, shares.sum(), (shares * weights).sum()


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """The sums over two sets of numbers."""
    one, other = one.view(2, 3), other.view(2, 3)
    largest = torch.maximum(one[:, :1], other[:, :1])
    sums = one[:, 1:] * (one[:, :1] - largest).exp() + other[:, 1:] * (other[:, :1] - largest).exp()
    return torch.cat([largest, sums], 1).view(-1)


def _counted(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """What counts: all but equal infinities, and NaN in both."""
    is_finite = found.isfinite() & wanted.isfinite()
    if bool(is_finite.all()):
        return found, wanted
    counts = is_finite | ((found != wanted) & ~(found.isnan() & wanted.isnan()))
    return found[counts], wanted[counts]


def _squares(x: Tensor) -> Tensor:
    return torch.dot(x, x)


def _finite_squares(x: Tensor) -> Tensor:
    total = torch.dot(x, x)
    return total if bool(total.isfinite()) else x[x.isfinite()].square().sum()


def _count(x: Tensor) -> Tensor:
    return torch.full((), float(x.numel()), dtype=torch.float64, device=x.device)


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


METRICS: dict[str, type[Metric]] = {"Cosine": Cosine, "MSE": MSE, "L1": L1, "KL": KL, "SQNR": SQNR}


def metric_of(name: str) -> Metric:
    """A new metric of the names that the guides have: Cosine, MSE, L1, KL, SQNR.

    >>> metric_of("Cosine").higher_is_better
    True

    Raises:
        QuantizationConfigError: for another name.
    """
    if name not in METRICS:
        raise QuantizationConfigError(f"There is no metric {name!r}; there are {', '.join(METRICS)}.")
    return METRICS[name]()


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """``|found - wanted| / |wanted|`` (L2 norms); infinite for other shapes, and for NaN or infinity in other places.

    >>> relative_error(torch.tensor([3.0, 5.0, math.inf]), torch.tensor([3.0, 4.0, math.inf]))
    0.2
    """
    if found.shape != wanted.shape:
        return math.inf
    metric = RelativeError()
    metric.update(found, wanted)
    return metric.result()
