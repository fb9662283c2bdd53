"""Float16 results inside a model that runs its own forward: functions on them have modules, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.running import interceptor


class HalfTensor(Tensor):
    """A float16 result. Functions on it are sent to the modules made for them, as functions on QTensors are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        model = interceptor()
        if model is not None:
            out = model(func, args, kwargs)
            if out is not NotImplemented:
                return out
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        return out if model is None else marked(out)


def marked(tree: Any) -> Any:
    """Float tensors as float16 results."""
    return pytree.tree_map(
        lambda x: x.as_subclass(HalfTensor) if type(x) is Tensor and x.is_floating_point() else x, tree
    )


def unmarked(tree: Any) -> Any:
    """Float16 results as ordinary tensors."""
    return pytree.tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, HalfTensor) else x, tree)
