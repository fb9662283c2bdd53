"""The measures of similarity that the tools offer, and when a similarity is worth a look."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.statistics.metrics import METRICS, Metric, metric_of

# Where a result of quantization is commonly taken to be poor. The guides name no numbers.
THRESHOLDS = {"Cosine": 0.99, "MSE": 1.0, "L1": 1.0, "KL": 0.1, "SQNR": 20.0}
_PART = 1 << 18  # numbers at a time, which stay in the cache


class SimilarityFunction:
    """A metric by its name, or a function of the user's.

    Args:
        func: Cosine, MSE, L1, KL, SQNR; or ``func(x, y)``, which gives a number or a tensor of one.
        who: the tool that was asked, for messages.

    >>> import torch
    >>> cosine = SimilarityFunction("Cosine", "compare_weights")
    >>> cosine(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])), cosine.threshold
    (0.96, 0.99)
    """

    def __init__(self, func: str | Callable[[Tensor, Tensor], Any], who: str) -> None:
        if not isinstance(func, str) and not callable(func):
            raise TypeError(f"{who}: similarity_func is one of {', '.join(METRICS)} or a function, got {func!r}.")
        self._func, self._who = func, who
        if isinstance(func, str):
            self.higher_is_better: bool | None = metric_of(func).higher_is_better  # an unknown name is an error now
        else:
            self.higher_is_better = None
        self.name = func if isinstance(func, str) else getattr(func, "__name__", type(func).__name__)
        self.threshold = THRESHOLDS.get(func) if isinstance(func, str) else None

    def __call__(self, wanted: Tensor, found: Tensor) -> float:
        """How similar a tensor is to the one that is wanted; NaN for a result that is no single number."""
        if isinstance(self._func, str):
            metric = metric_of(self._func)
            metric.update(found, wanted)
            return metric.result()
        value = self._func(wanted, found)
        if isinstance(value, Tensor):
            return float(value.detach()) if value.numel() == 1 else math.nan
        return float(value)

    def metric(self) -> Metric | None:
        """A new metric, to count several pairs; None for a function of the user's."""
        return metric_of(self._func) if isinstance(self._func, str) else None

    def is_poor(self, value: float, threshold: float) -> bool:
        """Is a value beyond the threshold? Of a function of the user's, values above it are."""
        return math.isnan(value) or (value < threshold if self.higher_is_better else value > threshold)


class RunningSimilarity:
    """A similarity over several pairs of tensors: of all numbers together; of a function of the user's, the mean.

    >>> import torch
    >>> mse = RunningSimilarity(SimilarityFunction("MSE", "model_profiler"))
    >>> mse.update(torch.tensor([1.0]), torch.tensor([1.0]))
    >>> mse.update(torch.tensor([1.0]), torch.tensor([3.0]))
    >>> mse.result()
    2.0
    """

    def __init__(self, function: SimilarityFunction) -> None:
        self._function = function
        self._metric = function.metric()
        self._sum, self._count = 0.0, 0

    def update(self, wanted: Tensor, found: Tensor) -> None:
        """Count another pair."""
        if self._metric is not None:
            self._metric.update(found, wanted)
        else:
            self._sum += self._function(wanted, found)
            self._count += 1

    def result(self) -> float:
        """The similarity so far; NaN if nothing was compared."""
        if self._metric is not None:
            return self._metric.result()
        return self._sum / self._count if self._count else math.nan


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference; equal infinities and NaN in the same place do not differ.

    >>> import torch
    >>> largest_difference(torch.tensor([1.0, torch.inf]), torch.tensor([1.5, torch.inf]))
    0.5
    """
    parts = zip(one.flatten().split(_PART), other.flatten().split(_PART), strict=True)
    return max((_largest_difference(*pair) for pair in parts if pair[0].numel()), default=0.0)


def _largest_difference(one: Tensor, other: Tensor) -> float:
    if one.is_floating_point() and one.dtype == other.dtype:
        low, high = torch.aminmax(one - other)
        largest = max(abs(float(low)), abs(float(high)))
        if math.isfinite(largest):
            return largest
    difference = (one.double() - other.double()).abs()
    is_same = (one == other) | (one.isnan() & other.isnan())
    return float(difference.masked_fill(is_same, 0.0).nan_to_num(nan=math.inf).max())
