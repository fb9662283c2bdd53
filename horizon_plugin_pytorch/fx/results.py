"""The tensors in what a model gives or keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (list, tuple, set, frozenset)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in a value: itself, or what containers, dataclasses and other objects hold; modules are not looked into.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> list(tensors_in({"boxes": SimpleNamespace(scores=[torch.tensor(1)])}))
    [tensor(1)]
    """
    pending, seen = [value], set()
    while pending:
        here = pending.pop()
        if isinstance(here, Tensor):
            yield here
            continue
        if isinstance(here, (str, bytes, int, float, type, nn.Module)) or here is None or id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, Mapping):
            pending.extend(here.values())
        elif isinstance(here, _CONTAINERS):
            pending.extend(here)
        else:
            pending.extend(getattr(here, "__dict__", {}).values())
            pending.extend(getattr(here, name, None) for name in getattr(type(here), "__slots__", ()))
