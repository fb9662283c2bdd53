"""Quantized tensors that torch passes by: it reads their memory as numbers and asks no `__torch_function__`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horizon_plugin_pytorch.function_handlers import taken_for_number
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import EmptyIsZero


class CodeCalls(EmptyIsZero):
    """Sees the functions that wrapped code calls.

    ``torch.full(size, x.max())`` and ``torch.tensor(x)`` would find the integers of a converted model, and in a
    prepared one memory that nobody has written: where torch wants a number or copies, it does not ask the tensor.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        # Code of this package looks at plain memory on purpose, and says so.
        if torch._C._is_torch_function_enabled() and not any(issubclass(t, QTensor) for t in types):
            for x in (*args, *kwargs.values()) if kwargs else args:
                if isinstance(x, QTensor) and out is not x:  # `torch.as_tensor(x)` is `x`
                    raise taken_for_number(func)
        return out
