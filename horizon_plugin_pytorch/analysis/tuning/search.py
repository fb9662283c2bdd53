"""Which sites to raise: the fewest that meet a target, or the best for a budget, and how good that answer is.

Errors of single sites add up roughly: over random subsets of two pretrained networks the sum is 0.83 to 1.35 times the
real error. So candidates come from the sum (and from a Gram matrix of the measured errors, shrunk by half: one of few
samples must not be trusted), and what counts is what the model does with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

S = TypeVar("S", bound=Hashable)
_WORTH = 0.1  # the gain, as a share of that of two others, from which a site may stand for both: errors can cancel
Conflict = Callable[[S, S], bool]


@dataclass(frozen=True)
class Additive(Generic[S]):
    """The model that errors add up.

    Args:
        errors: of each site in int8, alone.
        left: of each site in int16.
        floor: what stays with every site raised.
    """

    errors: Mapping[S, float]
    left: Mapping[S, float] = field(default_factory=dict)
    floor: float = 0.0

    def gain(self, site: S) -> float:
        """What raising a site takes away."""
        return max(self.errors[site] - self.left.get(site, 0.0), 0.0)

    def error(self, raised: Collection[S]) -> float:
        """The error with these sites raised."""
        kept = sum(value for site, value in self.errors.items() if site not in raised)
        return self.floor + kept + sum(self.left.get(site, 0.0) for site in raised)

    def order(self) -> list[S]:
        """The site that takes away most first; ties in the order of the model."""
        return sorted(self.errors, key=lambda site: -self.gain(site))

    def fewest(self, target: float, factor: float = 1.0) -> int | None:
        """The fewest sites whose raising brings ``factor * error`` to a target; None if all do not."""
        gains = np.array([self.gain(site) for site in self.order()])
        errors = self.error(()) - np.concatenate([[0.0], gains.cumsum()])
        reached = np.flatnonzero(factor * errors <= target * (1 + 1e-12))
        return int(reached[0]) if reached.size else None

    def best_within(self, costs: Mapping[S, float], budget: float, steps: int = 2000) -> list[S]:
        """The sites that take away most, of those whose costs together stay within a budget.

        Costs are rounded to `steps` parts of the budget, once up, which keeps it, and once down, which is repaired; the
        better of both counts.
        """
        free = [site for site in self.errors if costs[site] <= 0 and self.gain(site) > 0]
        paid = [site for site in self.order() if 0 < costs[site] <= budget and self.gain(site) > 0]
        if not paid or budget <= 0:
            return free
        exact = np.array([costs[site] for site in paid]) / budget * steps
        found = [self._knapsack(paid, sizes, steps) for sizes in (np.ceil(exact - 1e-9), np.floor(exact + 1e-9))]
        fitting = [self._fit(chosen, paid, costs, budget) for chosen in found]
        return free + min(fitting, key=self.error)

    def _knapsack(self, paid: Sequence[S], sizes: np.ndarray, steps: int) -> list[S]:
        """The best sites for whole costs."""
        best = np.zeros(steps + 1)
        taken = np.zeros((len(paid), steps + 1), dtype=bool)
        whole = sizes.astype(int)
        for i, (site, size) in enumerate(zip(paid, whole, strict=True)):
            with_it = best[: steps + 1 - size] + self.gain(site)
            taken[i, size:] = with_it > best[size:]
            best[size:] = np.maximum(best[size:], with_it)
        chosen, room = [], steps
        for i in range(len(paid) - 1, -1, -1):
            if taken[i, room]:
                chosen.append(paid[i])
                room -= whole[i]
        return chosen

    def _fit(self, chosen: list[S], paid: Sequence[S], costs: Mapping[S, float], budget: float) -> list[S]:
        """A choice without the least useful of it, if it is over the budget, and with what else has room."""
        kept = sorted(chosen, key=lambda site: -self.gain(site) / costs[site])
        while sum(costs[site] for site in kept) > budget * (1 + 1e-12):
            kept.pop()
        left = budget - sum(costs[site] for site in kept)
        for site in paid:
            if site not in kept and costs[site] <= left:
                kept.append(site)
                left -= costs[site]
        return kept


def gram_order(sites: Sequence[S], vectors: Mapping[S, Tensor], errors: Mapping[S, float]) -> list[S]:
    """Sites in the order in which they take away most of the error that a half-shrunk Gram matrix predicts.

    Args:
        vectors: measured errors of the outputs; sites without one count as independent of the others.
        errors: squared lengths, of all sites.
    """
    measured = [site for site in sites if site in vectors]
    position = {site: i for i, site in enumerate(sites)}
    gram = torch.diag(torch.tensor([errors[site] for site in sites], dtype=torch.float64))
    if measured:
        stacked = torch.stack([vectors[site].double() for site in measured])
        products = 0.5 * stacked @ stacked.T
        products.fill_diagonal_(0.0)
        where = torch.tensor([position[site] for site in measured])
        gram[where[:, None], where] += products
    gains = 2 * gram.sum(1) - gram.diagonal()
    order: list[S] = []
    for _ in sites:
        best = int(gains.argmax())
        order.append(sites[best])
        gains = gains - 2 * gram[best]
        gains[best] = -torch.inf
    return order


def compatible(order: Sequence[S], conflicts: Conflict | None) -> list[S]:
    """An order without what a chip does not have together with something before it."""
    if conflicts is None:
        return list(order)
    kept: list[S] = []
    for site in order:
        if not any(conflicts(site, other) for other in kept):
            kept.append(site)
    return kept


@dataclass
class Search(Generic[S]):
    """The fewest sites that meet a target.

    Args:
        meets: does the model with these sites raised meet it?
        tries: how often it may be asked.
    """

    meets: Callable[[frozenset[S]], bool]
    tries: int
    asked: dict[frozenset[S], bool] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """How often it may still be asked."""
        return self.tries - len(self.asked)

    def ask(self, sites: Collection[S]) -> bool:
        """Does it meet the target?"""
        chosen = frozenset(sites)
        if chosen not in self.asked:
            self.asked[chosen] = self.meets(chosen)
        return self.asked[chosen]

    def shortest(self, order: Sequence[S], most: int, guess: int | None = None) -> int:
        """The shortest beginning of an order that meets the target; that of length `most` is known to.

        Args:
            guess: where to look first.
        """
        low, high = -1, most  # the longest that is known to fail, the shortest that is known to do
        middle = guess if guess is not None and 0 <= guess < most else (low + high) // 2
        while high - low > 1 and self.left > 0:
            if self.ask(order[:middle]):
                high = middle
            else:
                low = middle
            middle = (low + high) // 2
        return high

    def refine(self, chosen: Sequence[S], others: Sequence[S], gain: Callable[[S], float]) -> list[S]:
        """Take away what is not needed, and one for two where that does; the least useful are tried first."""
        kept = sorted(chosen, key=gain, reverse=True)
        for site in reversed(list(kept)):
            if self.left <= 0:
                return kept
            shorter = [other for other in kept if other != site]
            if self.ask(shorter):
                kept = shorter
        for site in others:
            if self.left <= 0 or len(kept) < 2:
                break
            swapped = [*kept[:-2], site]
            may_do = gain(site) > _WORTH * sum(map(gain, kept[-2:]))
            if may_do and site not in kept and self.ask(swapped):
                kept = sorted(swapped, key=gain, reverse=True)
        return kept


def lowest_ratio(additive: Additive[S], real: Mapping[frozenset[S], float]) -> float:
    """The lowest real error over the sum, of all mixtures that were run: rho."""
    ratios = [error / predicted for raised, error in real.items() if (predicted := additive.error(raised)) > 0]
    return min([1.0, *ratios])
