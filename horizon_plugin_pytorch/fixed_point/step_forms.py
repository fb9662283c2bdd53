"""Operators in few calls of torch, for steps on so few numbers that the calls are what takes the time.

Integers stay in float64 from one operator to the next, which holds each of them, and every sum and product that an
operator makes on its way: these have at most 53 bits, so that they can be made in any order, and several in one call.
The results are those of the operators, to the bit. Activations have at most 16 bits, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.fixed_point.accumulator import Layout, whole_weight
from horizon_plugin_pytorch.fixed_point.accumulator_plan import INT32_MAX, AccumulatorPlan
from horizon_plugin_pytorch.fixed_point.library import kernel_of, unflatten

_FACTOR_BITS = 22  # with which a product of two activations still has 52 bits


@dataclass(frozen=True)
class StepForm:
    """An operator with its constants, on float64 tensors.

    Attributes:
        operands: how many tensors it takes: the first arguments of the operator.
        function: gives the result for these.
        prepared: what `function` takes in place of the second tensor; of each number on its own, so that it can be
            had for all steps at once.
    """

    operands: int
    function: Callable[..., Tensor]
    prepared: Callable[[Tensor], Tensor] | None = None


def _half() -> Tensor:
    return torch.full((), 0.5, dtype=torch.float64)


def _linear(x: Tensor, residual: Tensor | None, *constants: Any) -> StepForm | None:
    """The weights hold the factor, as those of `accumulator_plan` for float64 do; so does what is added."""
    (plan,) = unflatten(constants, AccumulatorPlan)
    is_plain = plan.worst_case <= INT32_MAX and not plan.is_real
    if not is_plain or x.dim() != 2 or (residual is not None and residual.shape != (len(x), plan.factor.numel())):
        return None
    factor = plan.factor.double()
    weight = whole_weight(plan.weights, plan.parts, Layout(1, -1, 1, (-1,))).double().t() * factor
    bias = torch.zeros_like(factor) if plan.bias is None else plan.bias.double()
    low, high = float(plan.low), float(plan.high)
    if residual is None or plan.residual_factor is None:
        offset = bias * factor + 0.5
        return StepForm(1, lambda a: torch.addmm(offset, a, weight).floor_().clamp_(low, high))
    ratio = plan.residual_factor.double()
    return StepForm(
        2,
        lambda a, term: torch.addmm(term, a, weight).floor_().clamp_(low, high),
        lambda r: torch.mul(r, ratio).add_(0.5).floor_().add_(bias).mul_(factor).add_(0.5),
    )


def _lookup(x: Tensor, table: Tensor, offset: int) -> StepForm | None:
    """The table begins at 0; negative numbers count from its end."""
    if not -len(table) < offset <= 0:
        return None
    rolled = table.double().roll(offset)
    return StepForm(1, lambda a: torch.take(rolled, a.long()))


def _mul(a: Tensor, b: Tensor, factor: Tensor, low: int, high: int) -> StepForm | None:
    if factor.numel() != 1 or not (math.frexp(float(factor))[0] * 2.0**_FACTOR_BITS).is_integer():
        return None
    half, value, ends = _half(), float(factor), (float(low), float(high))
    return StepForm(2, lambda x, y: torch.addcmul(half, x, y, value=value).floor_().clamp_(*ends))


def _add(
    a: Tensor, b: Tensor, factor_a: float, factor_b: float, is_narrow: bool, low: int, high: int
) -> StepForm | None:
    half, ends = _half(), (float(low), float(high))
    if a.shape != b.shape:
        return None
    return StepForm(2, lambda x, y: torch.add(half, x, alpha=factor_a).add_(y, alpha=factor_b).floor_().clamp_(*ends))


def _requantize(q: Tensor, factor: Tensor, axis: int, low: int, high: int) -> StepForm | None:
    if factor.numel() != 1:
        return None
    half, value, ends = _half(), float(factor), (float(low), float(high))
    return StepForm(1, lambda x: torch.add(half, x, alpha=value).floor_().clamp_(*ends))


_FORMS: dict[str, Callable[..., StepForm | None]] = {
    "horizon::linear": _linear,
    "horizon::lookup": _lookup,
    "horizon::evaluate": lambda q, program, table, offset: _lookup(q, table, offset),
    "horizon::mul": _mul,
    "horizon::add": _add,
    "horizon::requantize": _requantize,
}


def step_form(overload: Any, args: tuple) -> StepForm | None:
    """A call of one of our operators in such a form, for tensors on the CPU like those given; None if it has none.

    >>> x = torch.tensor([[100.0, -7.0]])
    >>> args = (x, x, torch.tensor([0.25], dtype=torch.float64), -128, 127)
    >>> step_form(torch.ops.horizon.mul.default, args).function(x.double(), x.double())
    tensor([[127.,  12.]], dtype=torch.float64)
    """
    build = _FORMS.get(overload._schema.name)
    return None if build is None or args[0].device.type != "cpu" else build(*args)


def in_float64(overload: Any, operands: Collection[int]) -> Callable[..., Any]:
    """The operator itself, between others that give float64.

    Args:
        operands: which of its arguments they give.
    """
    kernel = kernel_of(overload)

    def call(*args: Any) -> Any:
        return kernel(*(x.float() if i in operands else x for i, x in enumerate(args))).double()

    return call
