"""What rules know: the document, the two models, and what follows from both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.analysis.profile.advice.texts import TEXTS
from horizon_plugin_pytorch.analysis.profile.document import Advice, Document, Operator, Values
from horizon_plugin_pytorch.analysis.profile.tasks import Task, task_of
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nn import qat, quantized
from horizon_plugin_pytorch.operators.table import Operator as Row
from horizon_plugin_pytorch.operators.table import Trait, row_named

_LEAST = 1e-30
_TABLES = (qat.SegmentLUT, quantized.SegmentLUT)


@dataclass(frozen=True)
class Noise:
    """What rounding to a grid does to the values of the first model, as far as their histogram tells.

    Args:
        power: the mean square of the values.
        rounding, clipping: of the error by rounding, and of that by the ends of the grid.
        largest: the largest magnitude of the values.
        end: the last number of the grid.
        share: which share of the values is beyond it.
    """

    power: float
    rounding: float
    clipping: float
    largest: float
    end: float
    share: float

    @property
    def rounding_error(self) -> float:
        """By rounding, as a share of the values."""
        return math.sqrt(self.rounding / max(self.power, _LEAST))

    @property
    def mainly_clips(self) -> bool:
        """Is the grid too narrow? An observer that weighs both errors clips about as much as it rounds."""
        return self.clipping > 4 * self.rounding

    @property
    def error(self) -> float:
        """By both, as a share of the values."""
        return math.hypot(self.rounding_error, self.clipping_error)

    @property
    def clipping_error(self) -> float:
        """By clipping, as a share of the values."""
        return math.sqrt(self.clipping / max(self.power, _LEAST))


def largest_of(values: Values | None) -> float:
    """The largest magnitude; 0 where there are no values."""
    if values is None or values.low is None or values.high is None:
        return 0.0
    return max(-values.low, values.high)


def power_of(values: Values) -> float:
    """The mean square."""
    return (values.var or 0.0) + (values.mean or 0.0) ** 2


def magnitudes(values: Values) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The middles of the bins of a histogram, and the shares of values there."""
    histogram = values.histogram
    if histogram is None or not sum(histogram.counts):
        return None
    counts = torch.tensor(histogram.counts, dtype=torch.float64)
    width = (histogram.high - histogram.low) / len(counts)
    middles = histogram.low + width * (torch.arange(len(counts), dtype=torch.float64) + 0.5)
    return middles, counts / counts.sum()


def reach_of(values: Values, share: float) -> float:
    """The magnitude that this share of the values does not exceed."""
    found = magnitudes(values)
    if found is None:
        return largest_of(values)
    sizes, order = found[0].abs().sort()
    place = int((found[1][order].cumsum(0) < share - 1e-12).sum())
    return float(sizes[min(place, len(sizes) - 1)])


class Evidence:
    """All that rules may ask.

    Args:
        inputs: batches of inputs, for rules that run the float model again.

    Attributes:
        claimed: operators that a rule has spoken of, so that a more general one need not.
    """

    def __init__(self, document: Document, first: nn.Module, second: nn.Module, inputs: Sequence[Any] = ()) -> None:
        self.document, self.first, self.second, self.inputs = document, first, second, inputs
        self.operators = document.operators
        self.task: Task = task_of(document.task)
        self._modules = dict(second.named_modules(remove_duplicate=False))
        self.claimed: set[int] = set()

    # -- structure

    def module(self, operator: Operator) -> nn.Module | None:
        """The module of an operator in the second model."""
        found = self._modules.get(operator.path)
        return found if type(found).__name__ == operator.type else None

    def row(self, operator: Operator) -> Row | None:
        """The row of the operator table."""
        return row_named(operator.operator) or row_named(getattr(self.module(operator), "operator", ""))

    def quantizer(self, operator: Operator) -> FakeQuantize | None:
        """The fake quantizer of an operator's result; None for what keeps its input's scale, and in integer models."""
        found = getattr(self.module(operator), "activation_post_process", None)
        return found if isinstance(found, FakeQuantize) else None

    def has_own_scale(self, operator: Operator) -> bool:
        """Does it choose a scale, rather than take that of its input?"""
        if operator.scale is None:
            return False
        if self.quantizer(operator) is not None:
            return True
        return all(self.operators[i].scale != operator.scale for i in operator.inputs)

    def is_input(self, operator: Operator) -> bool:
        """Is it the stub of an input of the model?"""
        row = self.row(operator)
        return row is not None and Trait.QUANT in row.traits and not operator.inputs

    def is_function(self, operator: Operator) -> bool:
        """Is it a function of one number, by a table, or a quotient?"""
        row = self.row(operator)
        is_quotient = row is not None and bool(row.traits & (Trait.QUOTIENT | Trait.LOGARITHM))
        return is_quotient or isinstance(self.module(operator), _TABLES)

    @cached_property
    def consumers(self) -> dict[int, list[Operator]]:
        """Who takes the result of each operator."""
        found: dict[int, list[Operator]] = {operator.index: [] for operator in self.operators}
        for operator in self.operators:
            for source in operator.inputs:
                found[source].append(operator)
        return found

    def is_dequantized(self, operator: Operator) -> bool:
        """Does its result go to DeQuantStubs only, perhaps through functions?"""
        return operator.index in self._dequantized

    @cached_property
    def _dequantized(self) -> set[int]:
        found: set[int] = set()
        for operator in reversed(self.operators):
            consumers = self.consumers[operator.index]
            if consumers and all(
                self._is_dequant(one) or (self.module(one) is None and one.index in found) for one in consumers
            ):
                found.add(operator.index)
        return found

    def _is_dequant(self, operator: Operator) -> bool:
        row = self.row(operator)
        return row is not None and Trait.DEQUANT in row.traits

    def functions_behind(self, operator: Operator) -> list[str]:
        """The functions between an operator and its DeQuantStubs that a deployed model has something for."""
        behind = {operator.index: operator}
        for before in (waiting := [operator]):
            new = [one for one in self.consumers[before.index] if one.index not in behind and not self._is_dequant(one)]
            behind.update((one.index, one) for one in new)
            waiting += new
        del behind[operator.index]
        found = [behind[index] for index in sorted(behind)]
        return list(dict.fromkeys(one.operator or one.type for one in found if not self._does_nothing(one)))

    def _does_nothing(self, operator: Operator) -> bool:
        row = self.row(operator)
        return row is not None and row.does_nothing

    def sources(self, operator: Operator) -> list[Operator]:
        """The operators whose results it takes."""
        return [self.operators[index] for index in operator.inputs]

    def calls(self) -> Iterator[tuple[str, list[Operator]]]:
        """The operators by module, those of functions left out."""
        found: dict[str, list[Operator]] = {}
        for operator in self.operators:
            if self.module(operator) is not None:
                found.setdefault(operator.path, []).append(operator)
        yield from found.items()

    def grouped(
        self,
        found: Iterable[Operator],
        is_source: Callable[[Operator], bool],
        is_alike: Callable[[Operator, Operator], bool] = lambda one, other: True,
    ) -> dict[int, list[int]]:
        """Operators with one trouble, by where it begins.

        One that follows another of them has its trouble from there, if both are alike. What begins at an operator that
        `is_source` reaches everything behind it; otherwise it ends at the first operator that does not have it.
        """
        troubled = {operator.index for operator in found}
        begins: dict[int, int] = {}
        carried: dict[int, int] = {}
        for operator in self.operators:
            before = [carried[i] for i in operator.inputs if i in carried]
            far = [root for root in before if is_source(self.operators[root])]
            if operator.index in troubled:
                near = [root for root in before if is_alike(operator, self.operators[root])]
                begins[operator.index] = carried[operator.index] = (far or near or [operator.index])[0]
            elif far:
                carried[operator.index] = far[0]
        groups: dict[int, list[int]] = {}
        for index, root in begins.items():
            groups.setdefault(root, []).append(index)
        return groups

    # -- errors

    def error(self, operator: Operator) -> float | None:
        """The measured error of a result, as a share of it; None if it is not known."""
        if operator.sqnr is None or math.isnan(operator.sqnr):
            return None
        return 10 ** (-operator.sqnr / 20)

    def is_poor(self, operator: Operator) -> bool:
        """Is the error of its result larger than the task allows?"""
        error = self.error(operator)
        return error is not None and error > self.task.error

    def is_poor_behind(self, operator: Operator) -> bool:
        """Is its result poor, or one that is made of it?"""
        reached = {operator.index}
        for one in self.operators[operator.index :]:
            if one.index in reached or reached.intersection(one.inputs):
                reached.add(one.index)
                if self.is_poor(one):
                    return True
        return False

    def noise(self, operator: Operator) -> Noise | None:
        """What the operator's grid does to its values; None where there is no grid, or nothing but zeros."""
        values = operator.first
        if values is None or operator.scale is None or operator.grid is None or values.low is None:
            return None
        power = power_of(values)
        if power <= _LEAST:
            return None
        low, high = operator.grid
        found = magnitudes(values)
        clipping = share = 0.0
        if found is not None:
            middles, shares = found
            beyond = (middles - high).clamp(min=0) + (low - middles).clamp(min=0)
            clipping = float((beyond.square() * shares).sum())
            share = float(shares[beyond > 0].sum())
        if operator.saturation is not None:
            share = operator.saturation
        rounding = operator.scale**2 / 12
        error = self.error(operator)
        if error is not None and self.is_input(operator):  # nothing went wrong before it: what is measured is its own
            rounding = min(rounding, (error**2) * power)
        return Noise(power, rounding, clipping, largest_of(values), max(-low, high), share)

    # -- advice

    def advice(
        self,
        rule: str,
        severity: str,
        place: str,
        operators: Iterable[int] = (),
        configuration: str = "",
        explains: float | None = None,
        **arguments: Any,
    ) -> Advice:
        """An advice with its sentences; numbers are shortened here."""
        numbers = tuple((name, shown(value)) for name, value in arguments.items())
        text = TEXTS[rule].en
        _, evidence, remedy = (part.format(**dict(numbers)) for part in text)
        chosen = tuple(operators)
        self.claimed.update(chosen)
        return Advice(rule, severity, place, chosen, evidence, remedy, configuration, numbers, explains)


def shown(value: Any) -> str:
    """A number as advice has it.

    >>> shown(0.123456), shown(3), shown("conv")
    ('0.1235', '3', 'conv')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def percent(value: float) -> str:
    """A share.

    >>> percent(0.12345), percent(0.0004), percent(3.2)
    ('12 %', '0.04 %', '320 %')
    """
    return f"{value * 100:.2g} %" if value < 1 else "∞" if math.isinf(value) else f"{value * 100:.0f} %"
