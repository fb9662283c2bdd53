"""The constants of a program: each content once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import Tensor

from horizon_plugin_pytorch.program.memory import memory_of


class Constants:
    """Tensors by name. Equal ones, of whatever module, are one."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._alike: defaultdict[Hashable, list[str]] = defaultdict(list)
        self._shown: defaultdict[Hashable, list[str]] = defaultdict(list)

    def name_of(self, x: Tensor, hint: str) -> str:
        """The name of a constant with these numbers."""
        alike = self._alike[_look(x)]
        for name in alike:
            if _is_equal(self.tensors[name], x):
                return name
        name, count = hint, 0
        while name in self.tensors:
            count += 1
            name = f"{hint}_{count}"
        self.tensors[name] = x
        self._shown[memory_of(x)].append(name)
        alike.append(name)
        return name

    def keep(self, x: Tensor) -> None:
        """Keep the numbers that constants have now: a write to this tensor is about to change their memory."""
        for name in self._shown.pop(memory_of(x), ()):
            self.tensors[name] = self.tensors[name].clone()


def _look(x: Tensor) -> Hashable:
    """What equal constants have in common, at little cost; layouts count, as kernels round differently by them."""
    first = x.flatten()[:8] if x.is_contiguous() else x[(0,) * x.dim()].reshape(1) if x.numel() else x.flatten()
    return x.dtype, tuple(x.shape), x.stride(), x.device, tuple(_bits(first).tolist())


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(torch.uint8) if x.dim() else _bits(x.reshape(1))


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Bit by bit: -0.0 is another constant than 0.0."""
    return a is b or torch.equal(_bits(a), _bits(b))
