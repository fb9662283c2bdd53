"""The error of one operator alone: two forms of it on the same numbers, so that errors before it do not count."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.analysis.similarity_function import largest_difference
from horizon_plugin_pytorch.dtype import qbool
from horizon_plugin_pytorch.nested import map_tensors, tensors_of
from horizon_plugin_pytorch.nn.quantized.module import QuantizedModule
from horizon_plugin_pytorch.qtensor import QTensor, bool_qtensor, exact_qtensor, integer_qtensor
from horizon_plugin_pytorch.runtime.located import PlacedModule
from horizon_plugin_pytorch.runtime.real_tensor import unmarked
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.undisturbed import undisturbed
from horizon_plugin_pytorch.writing import writes


class NotComparable(Exception):
    """The two forms cannot take the same inputs; the message says why."""


def real_of(x: Tensor) -> Tensor:
    """A tensor's real numbers."""
    return (x.as_real() if isinstance(x, QTensor) else unmarked(x)).detach()


def is_float(call: OperatorCall) -> bool:
    """True if nothing that it takes or gives has a scale."""
    return not any(isinstance(x, QTensor) for x in (*call.inputs, *call.outputs))


def same_input_error(one: OperatorCall, other: OperatorCall, parts: tuple[Sequence[OperatorCall], ...]) -> float:
    """The largest difference of two forms of an operator on the same inputs.

    A float form gets the real numbers that the quantized one got; of two quantized forms the second runs on the
    inputs of the first. An operator that is fused in one model is compared with all of its members in the other.

    Args:
        one, other: calls of the two forms, with their tensors.
        parts: for each of them, the calls before it that are members of what the other one fuses, in order.

    Raises:
        NotComparable: the calls take other tensors, or have overwritten them.
    """
    is_first_run = bool(parts[0]) or (is_float(one) and not is_float(other) and not parts[1])
    ran, model, before = (one, other, parts[0]) if is_first_run else (other, one, parts[1])
    if _writes(model):
        raise NotComparable("it writes to its input")
    if not before and _take_the_same(one, other):  # so the results are there already
        return _difference(one.outputs, other.outputs)
    with torch.no_grad():
        found = _run_chain([*before, ran], model.inputs) if before else _run(ran, model.inputs)
    outputs = tensors_of(found)
    if [x.shape for x in outputs] != [x.shape for x in model.outputs]:
        raise NotComparable("its results have other shapes")
    return _difference(outputs, model.outputs)


def _take_the_same(one: OperatorCall, other: OperatorCall) -> bool:
    """Did two quantized forms take the same numbers, and leave them as they were?"""
    if is_float(one) or is_float(other) or _writes(one) or _writes(other) or len(one.inputs) != len(other.inputs):
        return False
    pairs = zip(one.inputs, other.inputs, strict=True)
    return all(x.shape == y.shape and x.device == y.device and _are_equal(x, y) for x, y in pairs)


def _are_equal(x: Tensor, y: Tensor) -> bool:
    if isinstance(x, QTensor) != isinstance(y, QTensor) or x.dtype != y.dtype:
        return False
    if isinstance(x, QTensor) and isinstance(y, QTensor) and not torch.equal(x.scale, y.scale):
        return False
    return torch.equal(real_of(x), real_of(y))


def _difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max((largest_difference(real_of(y), real_of(x).to(y.device)) for y, x in pairs), default=0.0)


def _run(call: OperatorCall, inputs: Sequence[Tensor]) -> Any:
    """A call with other inputs of the same shapes."""
    if [x.shape for x in call.inputs] != [x.shape for x in inputs]:
        raise NotComparable("the two calls take other tensors")
    given = iter(inputs)
    args, kwargs = map_tensors(lambda x: _in_form_of(next(given), x), (call.args, call.kwargs))
    return _called(call, args, kwargs)


def _called(call: OperatorCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if call.module is None:
        assert call.function is not None
        return call.function(*args, **kwargs)
    is_fixed = isinstance(call.module, QuantizedModule)  # which keeps nothing of a run
    with nullcontext() if is_fixed else undisturbed(call.module):
        if call.method:
            return getattr(call.module, call.method)(*args, **kwargs)
        if isinstance(call.module, PlacedModule):  # whose own `forward` may be a step of the model's run
            return type(call.module).forward(call.module, *args, **kwargs)
        return call.module(*args, **kwargs)


def _writes(call: OperatorCall) -> bool:
    """Has a call overwritten an input of its own?"""
    if not any(x is y for x in call.inputs for y in call.outputs):
        return False
    if call.module is not None:
        return bool(getattr(call.module, "inplace", False)) and not isinstance(
            call.module, nn.modules.dropout._DropoutNd
        )
    return call.function is not None and writes(call.function, call.args, call.kwargs)


def _run_chain(calls: Sequence[OperatorCall], inputs: Sequence[Tensor]) -> Any:
    """The members of a fused operator one after the other, in float: a layer, batch norm, add and activation."""
    rest = [real_of(x).clone() for x in inputs]
    value = rest.pop(0)
    for call in calls:
        is_add = call.method == "add" or (call.module is None and call.operator == "add")
        if is_add and len(rest) != 1:
            raise NotComparable("its add takes other tensors")
        if call.method and not is_add:
            raise NotComparable(f"`{call.name}` is no part of a fused operator")
        value = _called(call, [value, rest.pop()] if is_add else [value], {})
    if rest:
        raise NotComparable("the two calls take other tensors")
    return value


def _in_form_of(x: Tensor, form: Tensor) -> Tensor:
    """A tensor's numbers as another one holds its: float, integers, or real numbers with a scale."""
    if not isinstance(form, QTensor):
        return real_of(x).clone().to(form.device)
    if form.dtype == qbool:
        return bool_qtensor(real_of(x).to(form.device) != 0, form.is_integer)
    scale, axis = form.scale, form.per_channel_axis  # the very tensor: plans of operators are found by it
    out = None
    if isinstance(x, QTensor) and (x.dtype, x.per_channel_axis) == (form.dtype, axis):
        if x.is_integer == form.is_integer and x.device == form.device:
            return x
        if torch.equal(x.scale.to(scale.device), scale):
            out = integer_qtensor(x.as_grid().detach().to(form.device), scale, form.dtype, axis)
            out.set_range(*x.range)
    if out is None:
        shape = [1] * x.dim()
        shape[axis] = -1
        steps = real_of(x).to(form.device) / (scale.reshape(shape) if axis >= 0 else scale)
        out = integer_qtensor(steps.round().clamp(form.dtype.min, form.dtype.max), scale, form.dtype, axis)
    return out if form.is_integer else exact_qtensor(out, scale)
