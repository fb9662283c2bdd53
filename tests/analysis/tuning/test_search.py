"""Choosing sites, on numbers alone: against every subset that there is."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from horizon_plugin_pytorch.analysis.tuning.search import Additive, Search, compatible, gram_order, lowest_ratio

SITES = [f"s{i}" for i in range(14)]


def world(seed: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Errors of 14 sites as vectors, and the real error of every subset that is left in int8, by bit mask."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(64, generator=generator)
    sizes = torch.exp(1.2 * torch.randn(14, generator=generator))
    vectors = {
        site: size * (torch.randn(64, generator=generator) + 0.4 * torch.randn(1, generator=generator) * common)
        for site, size in zip(SITES, sizes, strict=True)
    }
    masks = np.arange(1 << 14)
    bits = ((masks[:, None] >> np.arange(14)) & 1).astype(float)
    stacked = torch.stack(list(vectors.values())).double().numpy()
    return vectors, ((bits @ stacked) ** 2).sum(1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.3, 0.05])
def test_search_is_within_one_site_of_the_best_of_all_subsets(seed, share):
    vectors, errors = world(seed)
    target = share * errors[-1]
    counts = np.array([bin(mask).count("1") for mask in range(1 << 14)])
    optimum = 14 - counts[errors <= target].max()

    def meets(raised):
        return errors[sum(1 << i for i, site in enumerate(SITES) if site not in raised)] <= target

    sizes = {site: float(v.square().sum()) for site, v in vectors.items()}
    additive = Additive(sizes)
    search = Search(meets, 40)
    order = additive.order()
    length = search.shortest(order, 14)
    chosen = order[:length]
    gram = gram_order(SITES, vectors, sizes)
    if search.ask(gram[: length - 1]):
        chosen = gram[: search.shortest(gram, length - 1)]
    chosen = search.refine(chosen, [site for site in order if site not in chosen], additive.gain)
    assert meets(frozenset(chosen))
    assert optimum <= len(chosen) <= optimum + 1
    assert len(search.asked) <= 40
    real = {raised: errors[sum(1 << i for i, s in enumerate(SITES) if s not in raised)] for raised in search.asked}
    rho = lowest_ratio(additive, real)
    corrected = additive.fewest(target, rho)
    assert corrected is not None and corrected <= len(chosen)


def test_the_fewest_sites_of_a_sum_are_those_of_every_subset():
    additive = Additive({"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}, {"a": 1.0}, floor=0.5)
    for target in (11.0, 6.0, 4.6, 3.4, 1.5, 1.0):
        fitting = [
            count
            for count in range(5)
            for raised in combinations("abcd", count)
            if additive.error(raised) <= target + 1e-9
        ]
        assert additive.fewest(target) == (min(fitting) if fitting else None)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_within_a_budget_is_that_of_every_subset(seed):
    generator = np.random.default_rng(seed)
    sites = SITES[:10]
    additive = Additive(dict(zip(sites, generator.exponential(size=10), strict=True)))
    costs = dict(zip(sites, map(float, generator.integers(0, 20, 10)), strict=True))
    budget = 30.0
    chosen = additive.best_within(costs, budget)
    assert sum(costs[site] for site in chosen) <= budget
    best = min(
        additive.error(raised)
        for count in range(11)
        for raised in combinations(sites, count)
        if sum(costs[site] for site in raised) <= budget
    )
    assert additive.error(chosen) <= best * 1.02 + 1e-12


def test_what_a_chip_does_not_have_together_is_left_out():
    assert compatible(["a", "b", "c"], lambda x, y: {x, y} == {"a", "b"}) == ["a", "c"]
