"""What a process may have set around a model: autocast, and the device on which tensors are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_DEVICES = ("cuda", "cpu")


def is_autocast() -> bool:
    """Is `torch.autocast` active?"""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def has_default_device() -> bool:
    """Would tensors be made elsewhere than on the CPU, where nobody says on which device?"""
    return torch._C._len_torch_function_stack() > 0 and torch.get_default_device().type != "cpu"


@contextmanager
def on_cpu() -> Iterator[None]:
    """Tensors are made on the CPU where nobody says on which device, whatever the process has set."""
    with torch.device("cpu") if has_default_device() else nullcontext():
        yield


@contextmanager
def float32() -> Iterator[None]:
    """Without autocast: what is quantized has formats of its own, whatever the float code around it uses."""
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def as_float32(tree: Any) -> Any:
    """Ordinary half-precision tensors, which autocast made, in float32."""

    def one(x: Any) -> Any:
        is_half = type(x) is Tensor and x.dtype in (torch.float16, torch.bfloat16)
        return x.float() if is_half else x

    return pytree.tree_map(one, tree)
