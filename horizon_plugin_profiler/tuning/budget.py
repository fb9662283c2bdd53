"""How much may be raised where `tune` is given a limit instead of a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horizon_plugin_profiler.tuning.bench import Bench
from horizon_plugin_pytorch.analysis.tuning.costs import cost_of, raising_costs
from horizon_plugin_pytorch.analysis.tuning.sites import ACTIVATION, Site


@dataclass(frozen=True)
class Budget:
    """What each site costs if it is raised, and how much that may be together."""

    costs: Mapping[Site, float]
    limit: float

    @classmethod
    def of(cls, bench: Bench, share: float | None, operations: float | None) -> Budget:
        """A share of the operators, or of the multiply-accumulates; one of them is given."""
        if share is not None:
            most = int(share * bench.survey.operators + 1e-9)
            return cls(dict.fromkeys(bench.sites, 1.0), float(most))
        assert operations is not None
        cost = cost_of(bench.mixed.raise_to(()), bench.data.measured[0])
        by_taker = raising_costs(bench.survey.takers, cost)
        costs = {
            site: float((by_taker if site.kind == ACTIVATION else cost.by_operator).get(site.operator, 0))
            for site in bench.sites
        }
        return cls(costs, operations * sum(cost.products.values()))

    def fill(self, order: Sequence[Site]) -> list[Site]:
        """As many of an order as there is room for."""
        chosen, left = [], self.limit
        for site in order:
            if self.costs[site] <= left:
                chosen.append(site)
                left -= self.costs[site]
        return chosen
