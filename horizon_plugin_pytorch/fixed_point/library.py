"""Fixed-point functions as `horizon::*` operators, so that every tracer sees one node for each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

_LIBRARY = torch.library.Library("horizon", "DEF")
_KERNELS: dict[str, Callable[..., Any]] = {}
_SCHEMA_TYPES = {"Tensor | None": "Tensor?", "list[Tensor]": "Tensor[]", "list[int]": "int[]"}


def signature(cls: Any) -> str:
    """The fields of a dataclass as arguments of a schema, so that its operators do not spell them out again.

    >>> @dataclasses.dataclass
    ... class Window:
    ...     size: list[int]
    ...     count: int
    >>> signature(Window)
    'int[] size, int count'
    """
    return ", ".join(f"{_SCHEMA_TYPES.get(str(f.type), str(f.type))} {f.name}" for f in dataclasses.fields(cls))


def flatten(*parts: Any) -> list[Any]:
    """The fields of dataclass objects in order: arguments of an operator whose schema has their `signature`."""
    return [value for part in parts for value in _reader(part.__class__)(part)]


def unflatten(values: tuple, *classes: Any) -> list[Any]:
    """The objects again."""
    rest = iter(values)
    return [cls(*itertools.islice(rest, len(_names(cls)))) for cls in classes]


@functools.lru_cache(maxsize=64)
def _reader(cls: Any) -> Callable[[Any], tuple]:
    """Reads all fields of an object at once."""
    names = _names(cls)
    return attrgetter(*names) if len(names) > 1 else lambda part: tuple(getattr(part, name) for name in names)


@functools.lru_cache(maxsize=64)
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


def operator(
    schema: str, shape: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a pure function on integer-valued tensors as ``horizon::<name>``.

    The Python body is the kernel on every device, and the shape rule for fake tensors.

    Args:
        shape: the shape rule, for a body that looks at values: it takes the same arguments, and gives an empty tensor.
    """
    name = schema.split("(", 1)[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _KERNELS[name] = function
        _LIBRARY.impl(name, _in_full_precision(function), "CompositeExplicitAutograd")
        if shape is not None:
            torch.library.register_fake(f"horizon::{name}", shape, lib=_LIBRARY)
        call = getattr(torch.ops.horizon, name)
        call.__doc__ = function.__doc__
        return call

    return register


def kernel_of(overload: Any) -> Callable[..., Any]:
    """What runs when an operator of torch is called, without the way through torch's dispatcher if it is one of ours.

    Autocast must be off, as the way takes care of it.

    >>> kernel_of(torch.ops.aten.neg.default)(torch.ones(1))
    tensor([-1.])
    """
    is_own = overload.namespace == "horizon"
    return _KERNELS[overload._schema.name.split("::")[1]] if is_own else overload


def _in_full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would run the sums in bfloat16, which does not hold the integers."""

    @functools.wraps(function)
    def kernel(*args: Any) -> Any:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return function(*args)
        return function(*args)

    return kernel
