"""The operators that a model runs, recorded by running it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.qtensor import QTensor


@dataclass(frozen=True)
class Step:
    """One operator: its overload, arguments and results."""

    operator: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: Any

    @property
    def name(self) -> str:
        """``aten::view`` or ``horizon::conv2d``."""
        return self.operator._schema.name


# Fused float kernels: torch writes them with simpler operators, and that is what is kept.
_FUSED = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._safe_softmax,
)


class Recorder(TorchDispatchMode):
    """Keeps every operator call, and every tensor, while it is active.

    Args:
        inputs: the model's inputs. What does not depend on them is a constant, and is computed as ever: a fused kernel
            and its simpler operators differ in the last bit.
    """

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._data = {_memory(x) for x in tensors_of(inputs)}
        self._decompositions = get_decompositions(_FUSED)
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_data = any(_memory(x) in self._data for x in tensors_of((args, kwargs)))
        simpler = self._decompositions.get(func) if is_data else None
        if simpler is None and self._is_inside and func._can_decompose():
            simpler = func.decompose  # torch's own forms also call operators that are made of others
        if simpler is not None:
            was_inside, self._is_inside = self._is_inside, True
            try:
                with self:
                    return simpler(*args, **(kwargs or {}))
            finally:
                self._is_inside = was_inside
        out = func(*args, **(kwargs or {}))
        self.steps.append(Step(func, args, kwargs or {}, out))
        if is_data:
            self._data.update(_memory(x) for x in tensors_of(out))
        return out


def plain(x: Any) -> Any:
    """An ordinary tensor for a QTensor."""
    return x.plain() if isinstance(x, QTensor) else x


def _memory(x: Tensor) -> Hashable:
    return plain(x).untyped_storage()._cdata


def tensor_key(x: Tensor) -> tuple[Hashable, ...]:
    """What a tensor shows of memory: two Python objects for the same data have the same key."""
    x = plain(x)
    return (x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)


def record(model: torch.nn.Module, args: tuple) -> tuple[list[Step], Any]:
    """Run the model and give its steps and outputs."""
    recorder = Recorder(args)
    with torch.no_grad(), recorder:
        outputs = model(*args)
    return recorder.steps, outputs
