"""What a member of a fused operator gives before the operator is complete: only the next member may take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.asking.who import package_asks
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.torch_functions import is_metadata, is_shape, unseen


class Unfinished(QTensor):
    """Stands for a result that the fused operator does not compute; reading it is an error.

    Its shape, where that is known, and its device can be asked for.

    Args:
        held: what the next member takes.
        refuse: gives the error for a reader.
        has_shape: is the shape of `held` that of the result?
    """

    held: Any
    refuse: Callable[[], Exception]
    has_shape: bool

    @staticmethod
    def __new__(cls, held: Tensor, refuse: Callable[[], Exception], has_shape: bool) -> Unfinished:
        with unseen():
            shape, nowhere = held.shape, (0,) * len(held.shape)
            out = torch.empty_strided(shape, nowhere, dtype=torch.float32, device=held.device).as_subclass(Unfinished)
        out.held, out.refuse, out.has_shape = held, refuse, has_shape
        return out

    def __getattr__(self, name: str) -> Any:
        if name in QTensor.__annotations__:  # it has no scale, no format and no integers
            raise self.refuse()
        raise AttributeError(name)

    def plain(self) -> Tensor:
        raise self.refuse()

    def alias(self) -> Unfinished:
        """Itself: it has no values that two could show."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "Unfinished()"

    def __deepcopy__(self, memo: dict) -> Unfinished:
        return self

    def __reduce_ex__(self, proto: Any) -> Any:
        raise self.refuse()

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        """``torch.float32`` to the model, as in float, and to tools: there is no quantized result to speak of."""
        if package_asks():
            raise self.refuse()
        return torch.float32

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_metadata(func) and func is not Tensor.as_subclass:
            if not args[0].has_shape and is_shape(func):
                raise args[0].refuse()
            return func(*(x.held if isinstance(x, Unfinished) else x for x in args), **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)
