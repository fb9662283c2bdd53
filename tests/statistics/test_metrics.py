"""Metrics of tensors: against plain formulas, batch by batch, and at their edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.statistics.metrics import METRICS, Metric, RelativeError, metric_of, relative_error

INF, NAN = math.inf, math.nan


def _formula(name: str, found: Tensor, wanted: Tensor) -> Tensor:
    """The textbook's formula, on whole tensors."""
    f, w = found.double().flatten(), wanted.double().flatten()
    match name:
        case "Cosine":
            return torch.cosine_similarity(f, w, dim=0)
        case "MSE":
            return torch.nn.functional.mse_loss(f, w)
        case "L1":
            return torch.nn.functional.l1_loss(f, w)
        case "KL":
            return torch.nn.functional.kl_div(f.log_softmax(0), w.log_softmax(0), log_target=True, reduction="sum")
        case "SQNR":
            return 20 * (w.norm() / (f - w).norm()).log10()
    raise AssertionError(name)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])  # e**300 is no float32
@pytest.mark.parametrize("name", METRICS)
def test_batch_by_batch_is_the_formula_over_all_numbers(name: str, scale: float) -> None:
    random = torch.Generator().manual_seed(0)
    wanted = torch.randn(6, 5, 4, generator=random) * scale
    found = wanted + 0.1 * scale * torch.randn(6, 5, 4, generator=random)
    metric = metric_of(name)
    for part in (slice(0, 1), slice(1, 1), slice(1, 4), slice(4, 6)):  # the second is empty
        metric.update(found[part], wanted[part])
    assert metric.result() == pytest.approx(float(_formula(name, found, wanted)), rel=1e-9, abs=1e-12)


def test_metrics_begin_empty_and_keep_no_tensors() -> None:
    metric = RelativeError()
    assert metric.is_empty and math.isnan(metric.result())
    x = torch.randn(3, requires_grad=True)
    metric.update(x, torch.ones(3))
    assert not metric.is_empty and not metric._sums.requires_grad and metric._sums.numel() == 2


#                   found           wanted        Cosine  MSE   L1    KL    SQNR  relative
EDGES = [
    ([1.0, 2.0],       [1.0, 2.0],       1.0,   0.0,  0.0,  0.0,  INF,  0.0),
    ([0.0, 0.0],       [0.0, 0.0],       0.0,   0.0,  0.0,  0.0,  INF,  0.0),
    ([0.0, 0.0],       [1.0, 1.0],       0.0,   1.0,  1.0,  0.0,  0.0,  1.0),
    ([-1.0, -2.0],     [1.0, 2.0],       -1.0,  10.0, 3.0,  None, None, 2.0),
    ([1.0, INF],       [1.0, INF],       1.0,   0.0,  0.0,  0.0,  INF,  0.0),
    ([1.0, NAN],       [1.0, NAN],       1.0,   0.0,  0.0,  0.0,  INF,  0.0),
    ([1.0, INF],       [1.0, -INF],      NAN,   INF,  INF,  INF,  -INF, INF),
    ([1.0, INF],       [1.0, 1.0],       NAN,   INF,  INF,  INF,  -INF, INF),
    ([1.0, 1.0],       [1.0, INF],       NAN,   INF,  INF,  INF,  -INF, INF),
    ([1.0, NAN],       [1.0, 1.0],       NAN,   INF,  INF,  INF,  -INF, INF),
    ([1.0, 1.0],       [1.0, NAN],       NAN,   INF,  INF,  INF,  -INF, INF),
    ([1.0, 1.0],       [0.0, 0.0],       0.0,   1.0,  1.0,  0.0,  -INF, None),
]  # fmt: skip


@pytest.mark.parametrize(("found", "wanted", "values"), [(found, wanted, values) for found, wanted, *values in EDGES])
def test_edges(found: list[float], wanted: list[float], values: list[float | None]) -> None:
    metrics: list[Metric] = [*map(metric_of, METRICS), RelativeError()]
    for metric, value in zip(metrics, values, strict=True):
        metric.update(torch.tensor(found), torch.tensor(wanted))
        assert value is None or metric.result() == pytest.approx(value, nan_ok=True), type(metric).__name__


def test_what_cannot_be_compared() -> None:
    assert relative_error(torch.ones(2), torch.ones(1, 2)) == INF
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(1, 2\)"):
        metric_of("L1").update(torch.ones(2), torch.ones(1, 2))
    with pytest.raises(QuantizationConfigError, match="no metric 'cosine'; there are Cosine, MSE, L1, KL, SQNR"):
        metric_of("cosine")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float16])
def test_other_types_are_numbers(dtype: torch.dtype) -> None:
    assert relative_error(torch.tensor([1, 1]).to(dtype), torch.tensor([1, 0]).to(dtype)) == 1.0


def test_which_way_is_better() -> None:
    assert {name for name, metric in METRICS.items() if metric.higher_is_better} == {"Cosine", "SQNR"}
