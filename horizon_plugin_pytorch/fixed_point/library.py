"""Fixed-point functions as `horizon::*` operators, so that every tracer sees one node for each."""

from __future__ import annotations

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
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        call = getattr(torch.ops.horizon, name)
        call.__doc__ = function.__doc__
        call.kernel = function
        return call

    return register
