"""Is a mixture of formats good enough? By the user's function, or by how far outputs are from those in float."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from horizon_plugin_profiler.tuning.lent_model import lent
from horizon_plugin_pytorch.analysis.tuning.outputs import Wanted
from horizon_plugin_pytorch.errors import CalibrationError, QuantizationConfigError
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.statistics.metrics import METRICS, metric_of

Evaluate = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Judge:
    """What a model is judged by.

    Args:
        evaluate: the user's function; None compares outputs.
        metric: how outputs are compared.
        higher_is_better: of the value of `evaluate`.
    """

    evaluate: Evaluate | None
    metric: str
    higher_is_better: bool

    @classmethod
    def of(cls, evaluate: Evaluate | None, metric: str, higher_is_better: bool) -> Judge:
        """Check the arguments.

        Raises:
            QuantizationConfigError: says what is wrong.
        """
        if evaluate is not None and not callable(evaluate):
            raise QuantizationConfigError(f"tune: evaluate must be a function of the model, got {evaluate!r}.")
        if metric not in METRICS:
            raise QuantizationConfigError(
                f"tune: there is no metric {metric!r}; there are {', '.join(METRICS)}. A function of yours is "
                "`evaluate`, which takes a model and gives a number."
            )
        if evaluate is not None and metric != "Cosine":
            raise QuantizationConfigError(
                f"tune: metric={metric!r} compares outputs, and evaluate judges the model; give one of them."
            )
        if evaluate is None and not higher_is_better:
            raise QuantizationConfigError(
                "tune: higher_is_better is of the value of evaluate, which is not given; a metric knows its own."
            )
        return cls(evaluate, metric, metric_of(metric).higher_is_better if evaluate is None else higher_is_better)

    @property
    def name(self) -> str:
        """What tables call the value."""
        return self.metric if self.evaluate is None else getattr(self.evaluate, "__name__", "evaluate")

    def value(self, model: nn.Module, what: str) -> float:
        """What the user's function says of a model.

        Raises:
            CalibrationError: it fails, or gives no number, or lets the model not round.
        """
        assert self.evaluate is not None
        with lent(model):
            rounding = [q for q in model.modules() if isinstance(q, FakeQuantize) and q.is_quantizing]
            try:
                found = self.evaluate(model.eval())
            except Exception as error:
                raise CalibrationError(
                    f"tune: evaluate failed on {what}: {type(error).__name__}: {error}. What was measured before is "
                    "kept; call tune again with the same arguments to go on from here."
                ) from error
            if not all(quantizer.is_quantizing for quantizer in rounding):
                raise CalibrationError(
                    f"tune: evaluate switches the rounding of {what} off, so that its value says nothing of number "
                    "formats. Leave the state of the model as it is: it is VALIDATION."
                )
        value = _number(found, what)
        if math.isnan(value):
            raise CalibrationError(
                f"tune: evaluate gave NaN for {what}: nothing can be said of it. Does it divide by a count of 0, or "
                "does the model give NaN on these data? What was measured before is kept."
            )
        return value

    def float_value(self, model: nn.Module) -> float:
        """What the user's function says of the float model.

        Raises:
            CalibrationError: see `value`; or it is infinite.
        """
        value = self.value(model, "the float model")
        if math.isinf(value):
            raise CalibrationError(f"tune: evaluate gave {value} for the float model: nothing can be compared with it.")
        return value

    def compared(self, outputs: Sequence[Sequence[Tensor]], wanted: Wanted) -> float:
        """How far outputs are from those in float: of several, the worst."""
        values = []
        for position in range(len(wanted.weights)):
            metric = metric_of(self.metric)
            for found, expected in zip(outputs, wanted.outputs, strict=True):
                metric.update(found[position], expected[position])
            values.append(metric.result())
        values = [self.worst if math.isnan(value) else value for value in values]
        return min(values) if self.higher_is_better else max(values)

    @property
    def worst(self) -> float:
        """The worst value that there is."""
        return -math.inf if self.higher_is_better else math.inf

    def is_met(self, value: float, target: float) -> bool:
        """Is a value as good as the target?"""
        return value >= target if self.higher_is_better else value <= target

    def better(self, one: float, other: float) -> bool:
        """Is the first value the better one?"""
        return one > other if self.higher_is_better else one < other


def _number(found: Any, what: str) -> float:
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CalibrationError(
            f"tune: evaluate must return a number; for {what} it returned {found!r:.200}."
        ) from error
