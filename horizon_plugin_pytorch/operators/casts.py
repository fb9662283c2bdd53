"""What a QTensor answers to casts, to questions for numbers, and to functions that only read its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.asking.stack import is_trace_check
from horizon_plugin_pytorch.dtype import QuantDType, qbool
from horizon_plugin_pytorch.function_handlers import described, handle, taken_for_number, unsupported
from horizon_plugin_pytorch.operators.scale_keeping import keep_scale
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import interceptor
from horizon_plugin_pytorch.torch_functions import FILLERS, FILLING_METHODS, VIEW_ATTRIBUTES, plain_tensors


def _cast_error(func: Callable, x: QTensor, wanted: Any) -> NotImplementedError:
    if x._format == qbool and isinstance(wanted, torch.dtype):
        remedy = "Write `mask.float()` for the numbers 0 and 1, or `mask.long()` for ordinary integers."
    else:
        remedy = "Call dequantize(), or put a DeQuantStub before it, to get real values; to change the number format, "
        remedy += "give its producer another qconfig."
    return NotImplementedError(f"{described(func)} cannot turn a {x._format} QTensor into {wanted}. {remedy}")


def _is_float(target: Any) -> bool:
    """Does ``x.to(target)`` want float32?"""
    if isinstance(target, QTensor):
        return target._format != qbool
    return target is torch.float32 or (isinstance(target, Tensor) and target.dtype == torch.float32)


def _to(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Another device for values, integers and scale. The number format is not the carrier's to change."""
    if not isinstance(args[0], QTensor):  # an ordinary tensor takes after a QTensor
        with plain_tensors():
            return func(*args, **kwargs)
    x = args[0].as_numbers() if any(map(_is_float, (*args[1:], *kwargs.values()))) else args[0]
    args = (x, *args[1:])
    carrier = x.plain().dtype  # this also computes deferred values, while they and the scale are on one device
    wanted = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, (torch.dtype, QuantDType))]
    if not {x._format, carrier}.issuperset(wanted):
        raise _cast_error(func, x, wanted[0])
    args = tuple(v for v in args if not isinstance(v, QuantDType))
    kwargs = {k: v for k, v in kwargs.items() if not isinstance(v, QuantDType)}
    if wanted and len(args) == 1 and not kwargs:
        return x
    out = keep_scale(func, args, kwargs)
    if out.plain().dtype != carrier:
        raise _cast_error(func, x, out.plain().dtype)
    out._scale = x._scale.to(out.device)
    return out


def _type(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``x.type(torch.float32)`` is ``x.to(torch.float32)``; ``x.type()`` is the name of the type in float."""
    x, named = args[0], (*args[1:], *(value for name, value in kwargs.items() if name == "dtype"))
    example = torch.empty(0, dtype=torch.bool if x._format == qbool else torch.float32, device=x.device)
    if not named or named[0] is None:
        return example.type()
    wanted = named[0] if isinstance(named[0], QuantDType) else example.type(named[0]).dtype  # also of a class or a name
    return _to(Tensor.to, (x, wanted), {})


def _result_type(func: Callable, args: tuple, kwargs: dict) -> torch.dtype:
    """The type that two tensors or numbers give together in float."""

    def in_float(x: Any) -> Any:
        if not isinstance(x, QTensor):
            return x
        return torch.empty((1,) * x.dim(), dtype=torch.bool if x._format == qbool else torch.float32)

    return func(*map(in_float, args), **{name: in_float(x) for name, x in kwargs.items()})


def _float(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Booleans as numbers; real values of other formats are asked for by name."""
    if args[0]._format != qbool:
        raise _cast_error(func, args[0], "real values (of booleans, call it before `cat`, `stack` or `where`)")
    return args[0].as_numbers()


def _double(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """For the comparison of `torch.jit.trace`: what the tensor holds, which is what a traced model gives."""
    if not is_trace_check():
        raise unsupported(func)
    return func(args[0].plain())


def _integers(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Booleans as ordinary 0 and 1; of other formats the integers alone say nothing."""
    x = args[0]
    if x._format != qbool:
        raise _cast_error(func, x, func.__name__)
    return func(x.plain())


def _number(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A number that the forward of a model reads, as in ``if x.max() > 0:``: the real one."""
    if interceptor() is None:
        raise unsupported(func)
    x = args[0]
    return func(x.plain() if x._format == qbool else x.as_real(), *args[1:], **kwargs)


def _set_requires_grad(func: Callable, args: tuple, kwargs: dict) -> None:
    """``x.requires_grad = True``: in float `x` was an input, here a QuantStub computed it and may have a gradient."""
    x, value = args
    with plain_tensors():
        if value and not x.is_leaf:
            x.requires_grad_()
        else:
            func(x, value)


def _filled(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Ordinary numbers in the shape of a QTensor; they are constants, with no scale yet."""
    x = args[0] if args else kwargs["input"]
    kwargs = {k: v for k, v in kwargs.items() if k != "input"}
    if any(isinstance(value, QTensor) for value in (*args[1:], *kwargs.values())):
        raise taken_for_number(func)
    template = torch.empty((), dtype=torch.bool if x._format == qbool else torch.float32, device=x.device)
    return func(template.expand(x.shape), *args[1:], **kwargs)


for _property in VIEW_ATTRIBUTES:
    handle(getattr(Tensor, _property).__get__, keeps=True)(keep_scale)
handle(Tensor.type, keeps=True)(_type)
handle(Tensor.to, Tensor.type_as, Tensor.cpu, Tensor.cuda, keeps=True)(_to)
handle(torch.result_type)(_result_type)
handle(Tensor.float)(_float)
handle(Tensor.double)(_double)
handle(Tensor.requires_grad.__set__)(_set_requires_grad)  # type: ignore[attr-defined]
handle(*FILLERS, *(getattr(Tensor, name) for name in FILLING_METHODS))(_filled)
handle(Tensor.long, Tensor.int)(_integers)
handle(Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__)(_number)
