"""Functions of `torch.jit` that meet quantized tensors run as the Python that they were made of.

TorchScript asks no `__torch_function__` of what a script function is given (it does for script modules): it would
compute on the memory of a quantized tensor, without its scale. A symbolic trace would even end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.asking.stack import user_frames
from horizon_plugin_pytorch.errors import UnsupportedOperatorError, source_line
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.call_site import is_recording
from horizon_plugin_pytorch.runtime.real_tensor import RealTensor

_SEEN = (QTensor, RealTensor, fx.Proxy)
_call = torch.jit.ScriptFunction.__call__


def _run(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not (is_recording() or any(isinstance(x, _SEEN) for x in pytree.tree_leaves((args, kwargs)))):
        return _call(self, *args, **kwargs)
    return _written(self)(*args, **kwargs)


def _written(function: Any) -> Callable:
    """The Python function that a script function was made of."""
    written = getattr(function, "_torchdynamo_inline", None)  # which torch keeps for its compiler
    if written is None:
        line = source_line(user_frames())
        raise UnsupportedOperatorError(
            f"`{function.name}`{f' ({line})' if line else ''} is a function of torch.jit whose Python is not at hand, "
            "as of one that was loaded from a file. It computes on memory and knows no scales. Call the Python "
            "function instead, or put a DeQuantStub before and a QuantStub after it."
        )
    return written


torch.jit.ScriptFunction.__call__ = _run  # type: ignore[method-assign]
