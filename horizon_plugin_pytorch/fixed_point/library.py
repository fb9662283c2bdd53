"""Fixed-point functions as `horizon::*` operators, so that every tracer sees one node for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("horizon", "DEF")


def operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a pure function on integer-valued tensors as ``horizon::<name>``.

    The Python body is the kernel on every device, and the shape rule for fake tensors.
    """
    name = schema.split("(", 1)[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, _in_full_precision(function), "CompositeExplicitAutograd")
        call = getattr(torch.ops.horizon, name)
        call.__doc__ = function.__doc__
        return call

    return register


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
