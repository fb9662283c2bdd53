"""Operators in few cheap calls, for steps on so few numbers that the calls are what takes the time.

Numbers are arrays of numpy, whose calls take a fifth of what those of torch take. Integers stay in float64 from one
operator to the next, which holds each of them, and every sum and product that an operator makes on its way: these have
at most 53 bits, so that they can be made in any order. The results are those of the operators, to the bit. Activations
have at most 16 bits, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.fixed_point.accumulator import Layout, whole_weight
from horizon_plugin_pytorch.fixed_point.accumulator_plan import INT32_MAX, AccumulatorPlan
from horizon_plugin_pytorch.fixed_point.library import kernel_of, unflatten

_FACTOR_BITS = 22  # with which a product of two activations still has 52 bits
_MOST_WEIGHTS = 1 << 19  # in one product: more do not stay in the cache of a core as float64, from step to step
_SMALL_PRODUCT = 1 << 18  # multiplications; more are worth torch's threads


@dataclass(frozen=True)
class StepForm:
    """An operator with its constants, on arrays of float64.

    Attributes:
        operands: how many arrays it takes: the first arguments of the operator.
        function: gives the result for these, in memory of its own.
        prepared: what `function` takes in place of the second array; of each number on its own, so that it can be
            had for all steps at once.
    """

    operands: int
    function: Callable[..., np.ndarray]
    prepared: Callable[[np.ndarray], np.ndarray] | None = None


def _rounding(low: float, high: float) -> Callable[[np.ndarray], np.ndarray]:
    """Round half up, and clamp, what 0.5 was added to; in its memory."""
    least, most = np.array(float(low)), np.array(float(high))

    def rounded(x: np.ndarray) -> np.ndarray:
        np.floor(x, out=x)
        np.maximum(x, least, out=x)
        return np.minimum(x, most, out=x)

    return rounded


def _linear(x: Tensor, residual: Tensor | None, *constants: Any) -> StepForm | None:
    """The weights hold the factor, as those of `accumulator_plan` for float64 do; so does what is added."""
    (plan,) = unflatten(constants, AccumulatorPlan)
    is_plain = plan.worst_case <= INT32_MAX and not plan.is_real
    if not is_plain or x.dim() != 2 or (residual is not None and residual.shape != (len(x), plan.factor.numel())):
        return None
    if x.shape[1] * plan.factor.numel() > _MOST_WEIGHTS:
        return None
    factor = plan.factor.double()
    weight = (whole_weight(plan.weights, plan.parts, Layout(1, -1, 1, (-1,))).double().t() * factor).contiguous()
    bias = torch.zeros_like(factor) if plan.bias is None else plan.bias.double()
    product, rounded = _product_with(weight, len(x)), _rounding(plan.low, plan.high)

    def function(a: np.ndarray, term: np.ndarray) -> np.ndarray:
        out = product(a)
        return rounded(np.add(out, term, out=out))

    if residual is None or plan.residual_factor is None:
        offset = (bias * factor + 0.5).numpy()
        return StepForm(1, lambda a: function(a, offset))
    ratio, bias_array, factor_array = (x.double().numpy() for x in (plan.residual_factor, bias, factor))
    return StepForm(2, function, lambda r: (np.floor(r * ratio + 0.5) + bias_array) * factor_array + 0.5)


def _product_with(weight: Tensor, rows: int) -> Callable[[np.ndarray], np.ndarray]:
    if rows * weight.numel() > _SMALL_PRODUCT:
        return lambda a: torch.mm(torch.from_numpy(a), weight).numpy()
    array = weight.numpy()
    return lambda a: np.dot(a, array)


def _lookup(x: Tensor, table: Tensor, offset: int) -> StepForm | None:
    """The table begins at 0; negative numbers count from its end."""
    if not -len(table) < offset <= 0:
        return None
    rolled = table.double().roll(offset).numpy()
    return StepForm(1, lambda a: rolled.take(a.astype(np.intp)))


def _mul(a: Tensor, b: Tensor, factor: Tensor, low: int, high: int) -> StepForm | None:
    if factor.numel() != 1 or not (math.frexp(float(factor))[0] * 2.0**_FACTOR_BITS).is_integer():
        return None
    value, half, rounded = np.array(float(factor)), np.array(0.5), _rounding(low, high)

    def function(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        out = np.multiply(x, y)
        np.multiply(out, value, out=out)
        return rounded(np.add(out, half, out=out))

    return StepForm(2, function)


def _add(
    a: Tensor, b: Tensor, factor_a: float, factor_b: float, is_narrow: bool, low: int, high: int
) -> StepForm | None:
    if a.shape != b.shape:
        return None
    first, second, half, rounded = np.array(factor_a), np.array(factor_b), np.array(0.5), _rounding(low, high)

    def function(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        out = np.multiply(x, first)
        np.add(out, np.multiply(y, second), out=out)
        return rounded(np.add(out, half, out=out))

    return StepForm(2, function)


def _requantize(q: Tensor, factor: Tensor, axis: int, low: int, high: int) -> StepForm | None:
    if factor.numel() != 1:
        return None
    value, half, rounded = np.array(float(factor)), np.array(0.5), _rounding(low, high)

    def function(x: np.ndarray) -> np.ndarray:
        out = np.multiply(x, value)
        return rounded(np.add(out, half, out=out))

    return StepForm(1, function)


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
    >>> step_form(torch.ops.horizon.mul.default, args).function(x.double().numpy(), x.double().numpy())
    array([[127.,  12.]])
    """
    build = _FORMS.get(overload._schema.name)
    return None if build is None else build(*args)


def in_float64(overload: Any) -> Callable[..., Any]:
    """The operator itself, between others that give float64."""
    kernel = kernel_of(overload)

    def call(*args: Any) -> Any:
        return kernel(*(torch.from_numpy(x).float() if isinstance(x, np.ndarray) else x for x in args)).double().numpy()

    return call


def move_form(overload: Any) -> Callable[..., Any]:
    """An operator of torch that gives the numbers which it takes, on arrays."""
    return _MOVES.get(overload._schema.name) or _through_torch(overload._op)


def _slice(x: np.ndarray, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> np.ndarray:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _split(x: np.ndarray, size: int, dim: int = 0) -> list[np.ndarray]:
    before = (slice(None),) * (dim % x.ndim)
    return [x[(*before, slice(begin, begin + size))] for begin in range(0, x.shape[dim], size)]


_MOVES: dict[str, Callable[..., Any]] = {
    "aten::slice": _slice,
    "aten::split": _split,
    "aten::narrow": lambda x, dim, start, length: _slice(x, dim, start, start + length),
    "aten::chunk": lambda x, chunks, dim=0: _split(x, -(-x.shape[dim] // chunks), dim),
}


def _through_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(np.ndarray, torch.from_numpy, (args, kwargs))
        return pytree.tree_map_only(Tensor, Tensor.numpy, function(*args, **kwargs))

    return call
