"""What two models give on the same inputs, tensor by tensor, and the metrics that tell how far apart it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.analysis.same_input import real_of
from horizon_plugin_pytorch.asking.functions import code_text
from horizon_plugin_pytorch.errors import CheckError
from horizon_plugin_pytorch.nested import located
from horizon_plugin_pytorch.statistics.metrics import METRICS, metric_of

MetricFunction = Callable[[Tensor, Tensor], Any]
GivenMetric = str | MetricFunction | Sequence[str | MetricFunction] | None


class OutputMetric:
    """A metric of one output of both models.

    Args:
        metric: Cosine, MSE, L1, KL, SQNR; or ``metric(baseline, analysis)``, which gives a number or a tensor of one.
        higher_is_better: of a function; the five know it themselves.
        who: the tool that was asked, for messages.

    >>> OutputMetric("L1", None, "sensitivity")(torch.zeros(2), torch.tensor([1.0, 3.0]))
    2.0
    """

    def __init__(self, metric: str | MetricFunction, higher_is_better: bool | None, who: str) -> None:
        if not isinstance(metric, str) and not callable(metric):
            raise TypeError(f"{who}: a metric is one of {', '.join(METRICS)}, or a function; got {metric!r}.")
        self._metric, self._who = metric, who
        self.is_own = not isinstance(metric, str)
        self.name = metric if isinstance(metric, str) else str(getattr(metric, "__name__", type(metric).__name__))
        known = None if self.is_own else metric_of(self.name).higher_is_better  # an unknown name is an error now
        self.higher_is_better = bool(higher_is_better) if known is None else known

    def __call__(self, wanted: Tensor, found: Tensor) -> float:
        """How far what is found is from what is wanted.

        Raises:
            CheckError: a function of the user's fails, or gives no single number.
        """
        if isinstance(self._metric, str):
            metric = metric_of(self._metric)
            metric.update(found, wanted)
            return metric.result()
        try:
            value = self._metric(wanted, found)
            return float(value.detach()) if isinstance(value, Tensor) else float(value)
        except Exception as error:
            raise CheckError(
                f"{self._who}: the metric `{self.name}` failed on tensors of shape {tuple(wanted.shape)}: "
                f"{type(error).__name__}: {error}. It takes the baseline's tensor and the analysed model's, and gives "
                "one number."
            ) from error

    @property
    def text(self) -> str:
        """What it computes, to tell whether it is another one."""
        return self._metric if isinstance(self._metric, str) else code_text(self._metric)

    def badness(self, value: float) -> float:
        """A value as a number that is the larger the worse it is; NaN is the worst, and of a function's the best."""
        if math.isnan(value):
            return -math.inf if self.is_own else math.inf
        return -value if self.higher_is_better else value


def metrics_of(given: GivenMetric, higher_is_better: bool | None, who: str) -> list[OutputMetric]:
    """The metrics that are asked for; None is all five.

    >>> [metric.name for metric in metrics_of(None, None, "auto_find_bad_case")]
    ['Cosine', 'MSE', 'L1', 'KL', 'SQNR']
    """
    several = [given] if isinstance(given, str) or callable(given) else list(METRICS if given is None else given)
    if not several:
        raise TypeError(f"{who}: no metric is given.")
    metrics = [OutputMetric(metric, higher_is_better, who) for metric in several]
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise TypeError(f"{who}: the metrics have the names {', '.join(names)}; each needs a name of its own.")
    return metrics


def named_outputs(out: Any) -> dict[str, Tensor]:
    """The tensors of a model's output by the names that the tables have: positions and keys, joined by ``-``.

    The output is the first of a list, so a tuple of three gives ``0-0``, ``0-1`` and ``0-2``, and one tensor ``0``.

    >>> list(named_outputs({"boxes": [torch.ones(1), torch.ones(1)], "scores": torch.ones(1)}))
    ['0-boxes-0', '0-boxes-1', '0-scores']
    """
    return {"-".join(map(str, path)): real_of(x) for path, x in located([out])}


def compared(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], refuse: Callable[[str, str], None]
) -> dict[str, tuple[Tensor, Tensor]]:
    """The outputs that two models have in common and that can be compared.

    Args:
        refuse: is told the name of each other one, and why it cannot.
    """
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in dict.fromkeys([*wanted, *found]):
        if name not in wanted or name not in found:
            refuse(name, f"only the {'analysed model' if name in found else 'baseline'} gives it")
            continue
        one, other = wanted[name], found[name].to(wanted[name].device)
        if one.shape != other.shape:
            refuse(name, f"its shape is {tuple(one.shape)} in the baseline and {tuple(other.shape)} in the other model")
        elif one.is_complex() or other.is_complex():
            refuse(name, "it is complex")
        elif not one.numel():
            refuse(name, "it is empty")
        else:
            pairs[name] = one, other
    return pairs


def kept(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of outputs, which later runs cannot write to."""
    return {name: torch.clone(x) for name, x in outputs.items()}
