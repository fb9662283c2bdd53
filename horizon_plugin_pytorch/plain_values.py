"""Numbers and indices as torch takes them, however the user's code writes them: of numpy, as an enum, as a range."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = frozenset({int, float, bool, complex, str, type(None), Tensor, torch.dtype, torch.device, type(Ellipsis)})


def is_plain(value: Any) -> bool:
    """Is it a number, a string or a tensor as it is? Asked first: most values are."""
    return type(value) in _PLAIN or isinstance(value, Tensor)


def plain_value(value: Any, arrays: str = "list") -> Any:
    """The same with Python's numbers in place of numpy's and of enums.

    Args:
        arrays: what arrays with axes become: a "list", where they are sizes or axes, or a "tensor".

    >>> plain_value({"size": (np.int32(2), np.array(3)), "axes": np.array([1, 2])})
    {'size': (2, 3), 'axes': [1, 2]}
    >>> plain_value(np.float64(0.5)), plain_value(torch.Size([2, 3])), plain_value(slice(np.int64(1), None))
    (0.5, (2, 3), slice(1, None, None))
    """
    if is_plain(value):
        return value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist() if arrays == "list" else array_tensor(value)
    if isinstance(value, slice):
        return slice(*(plain_value(part, arrays) for part in (value.start, value.stop, value.step)))
    if isinstance(value, list) or type(value) in (tuple, torch.Size):  # graphs have lists of a class of their own
        parts = [plain_value(part, arrays) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {name: plain_value(part, arrays) for name, part in value.items()}
    return _plain_subclass(value)


def _plain_subclass(value: Any) -> Any:
    """Numbers of classes of their own, such as enums, as what they are; strings may be formats."""
    if isinstance(value, Enum):
        return value.value if isinstance(value, (int, float, str)) else value
    for cls in (int, float):
        if isinstance(value, cls):
            return cls(value)
    return value


def array_tensor(array: np.ndarray) -> Tensor:
    """An array as a constant: float32 for real numbers, as the model computes in."""
    tensor = torch.as_tensor(np.ascontiguousarray(array))
    return tensor.float() if tensor.is_floating_point() else tensor


def plain_index(index: Any) -> Any:
    """An index as a single thing or a tuple of them, by torch's rule for lists: one that holds more than numbers is
    a tuple.

    >>> plain_index([slice(None), slice(0, np.int64(3))]), plain_index([0, 2]), plain_index(range(2))
    ((slice(None, None, None), slice(0, 3, None)), [0, 2], [0, 1])
    """
    if is_plain(index):
        return index
    if isinstance(index, list) and len(index) < 32 and any(_is_several(part) for part in index):
        index = tuple(index)
    if isinstance(index, tuple):
        return tuple(plain_index_part(part) for part in index)
    return plain_index_part(index)


def plain_index_part(part: Any) -> Any:
    """One part of an index."""
    if isinstance(part, range):
        return list(part)
    return plain_value(part, "tensor")


def _is_several(part: Any) -> bool:
    is_list = isinstance(part, (Tensor, list, tuple, range, np.ndarray)) and _lists_are_tuples()
    return part is None or part is Ellipsis or isinstance(part, slice) or is_list


@functools.lru_cache(maxsize=1)
def _lists_are_tuples() -> bool:
    """Is ``x[[[0, 1], [0, 1]]]`` ``x[[0, 1], [0, 1]]`` in this version of torch? From 2.9 on it is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(2)[[[0, 1], [0, 1]]].dim() == 1


def plain_arguments(
    args: tuple, kwargs: Mapping[str, Any], is_index: bool = False, arrays: str = "list"
) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call with plain numbers.

    Args:
        is_index: is it `x[index]`, or a write to it?
        arrays: what arrays with axes become: a "list", where they are sizes or axes, or a "tensor".
    """
    if not kwargs and all(map(is_plain, args)):
        return args, {}
    if is_index and len(args) > 1:
        return (args[0], plain_index(args[1]), *(plain_value(v, "tensor") for v in args[2:])), dict(kwargs)
    return tuple(plain_value(v, arrays) for v in args), {name: plain_value(v, arrays) for name, v in kwargs.items()}


def _maximum(x: Any, y: Any) -> Any:
    return torch.maximum(x, y) if isinstance(y, Tensor) else torch.clamp(x, min=y)


def _minimum(x: Any, y: Any) -> Any:
    return torch.minimum(x, y) if isinstance(y, Tensor) else torch.clamp(x, max=y)


_UFUNCS: dict[Any, Callable] = {
    np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul, np.true_divide: operator.truediv,
    np.power: operator.pow, np.matmul: operator.matmul, np.negative: operator.neg, np.maximum: _maximum,
    np.minimum: _minimum, np.greater: operator.gt, np.greater_equal: operator.ge, np.less: operator.lt,
    np.less_equal: operator.le, np.equal: operator.eq, np.not_equal: operator.ne,
    **{getattr(np, name): getattr(torch, name) for name in (
        "sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "tanh", "sinh", "cosh", "floor",
        "ceil", "square", "sign", "reciprocal", "absolute", "exp2",
    )},
    np.arctan: torch.atan, np.arcsin: torch.asin, np.arccos: torch.acos, np.arctan2: torch.atan2, np.rint: torch.round,
}  # fmt: skip


def array_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """``x + array`` and ``np.sqrt(x)`` in torch's functions: numpy's would take the numbers out of the model.

    A class of tensors has it as its ``__array_ufunc__``.
    """
    function = _function_of(ufunc, method, kwargs)
    if function is None:
        raise NotImplementedError(
            f"`numpy.{ufunc.__name__}` cannot compute with a tensor of the model, which would lose its scale and its "
            "gradient. Use torch's function of that name; or put a DeQuantStub before it, if it is post-processing."
        )
    return function(*(plain_value(x, "tensor") for x in inputs))


_ON_NUMBERS: dict[Any, Callable] = {
    **{getattr(np, name): getattr(math, name) for name in (
        "sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "tanh", "floor", "ceil",
    )},
    np.absolute: abs, np.maximum: max, np.minimum: min, np.floor_divide: operator.floordiv,
    np.prod: math.prod, np.sum: sum, np.max: max, np.amax: max, np.min: min, np.amin: min,
}  # fmt: skip


def number_function(function: Any) -> Callable | None:
    """What Python has for a function of numpy, for sizes that are not known as numbers yet.

    >>> number_function(np.prod)([2, 3])
    6
    """
    return _ON_NUMBERS.get(function) or _UFUNCS.get(function)


def seen_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """`array_ufunc` for ordinary tensors, on which numpy may compute whatever torch has no function for."""
    function = _function_of(ufunc, method, kwargs)
    if function is None:
        return getattr(ufunc, method)(*(np.asarray(x) if isinstance(x, Tensor) else x for x in inputs), **kwargs)
    return function(*(plain_value(x, "tensor") for x in inputs))


def _function_of(ufunc: Any, method: str, kwargs: Mapping[str, Any]) -> Callable | None:
    return _UFUNCS.get(ufunc) if method == "__call__" and not kwargs else None
