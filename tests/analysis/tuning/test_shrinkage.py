"""Estimates of few draws: nearer to the truth if sites have much in common, and not worse if they have nothing."""

from __future__ import annotations

import pytest
import torch

from horizon_plugin_pytorch.analysis.tuning.shrinkage import shrunk


def off_by(found: list[float], truth: torch.Tensor) -> float:
    return float((torch.tensor(found, dtype=torch.float64).log() - truth.log()).square().mean())


@pytest.mark.parametrize(("scatter", "gain"), [(0.1, 0.3), (3.0, 1.05)])
def test_the_estimate_is_better_by_as_much_as_sites_have_in_common(scatter: float, gain: float) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(200, generator=generator, dtype=torch.float64).mul(2).exp()
    parts = truth * torch.randn(200, generator=generator, dtype=torch.float64).mul(scatter).exp()
    whole = truth * torch.randn(8, 200, generator=generator, dtype=torch.float64).square().mean(0)
    kinds = ["weight", "activation"] * 100
    found = shrunk(whole.tolist(), parts.tolist(), kinds, 8)
    assert off_by(found, truth) < gain * off_by(whole.tolist(), truth)


def test_what_nothing_is_known_of_stays() -> None:
    assert shrunk([], [], [], 4) == []
    assert shrunk([0.0, 2.0], [0.0, 1.0], ["weight", "weight"], 4) == [0.0, 2.0]  # too few to tell
    found = shrunk([0.0, *range(1, 10)], [0.0, *range(1, 10)], ["weight"] * 10, 4)
    assert found[0] == 0 and min(found[1:]) > 0
