"""Linear layers whose weights belong to another module, as in torch's attention and recurrent modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.qat.gemm import QATGemm
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.quantized import linear as quantized


class PackedLinear(QATGemm):
    """A linear layer on rows of a parameter of its owner, which keeps torch's name for it and trains it.

    Args:
        owner: the module that has the parameters.
        weight, bias: their names there; no bias if the owner's is None.
        rows: the rows that this layer takes; None for all.
    """

    float_class = nn.Linear
    quantized_class = quantized.Linear

    def __init__(self, owner: nn.Module, weight: str, bias: str, rows: slice | None, qconfig: Any) -> None:
        QATModule.__init__(self)
        self._owner = (owner,)  # a tuple hides it from torch, which would see a module inside itself
        self._names, self._rows = (weight, bias), rows
        self._held: tuple[Tensor, ...] = ()
        self.out_features, self.in_features = self.weight.shape
        self.attach(qconfig)

    def _packed(self) -> list[Tensor | None]:
        return [getattr(self._owner[0], name, None) for name in self._names]

    def _part(self, index: int) -> Any:
        packed = self._packed()[index]
        return packed if packed is None or self._rows is None else packed[self._rows]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The layer's rows of the owner's weight."""
        return self._part(0)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The layer's rows of the owner's bias."""
        return self._part(1)

    @property
    def bias_place(self) -> tuple[nn.Module, str]:
        return self._owner[0], self._names[1]

    def add_bias(self) -> None:
        packed = self._packed()[0]
        assert packed is not None
        setattr(*self.bias_place, nn.Parameter(packed.new_zeros(len(packed)), packed.requires_grad))

    def twin_sources(self) -> list[Tensor]:
        return [p for p in self._packed() if p is not None] + super().twin_sources()

    @contextmanager
    def rounded_once(self) -> Iterator[None]:
        """Round the weights once for all calls inside, such as the steps of a sequence."""
        self._held = () if self.is_exact else (self.weight_fake_quant.weight(self.weight),)
        try:
            yield
        finally:
            self._held = ()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rounded_weight(self) -> Tensor:
        return self._held[0] if self._held else super().rounded_weight()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class PackedLinearAdd(PackedLinear):
    """The same plus another tensor; only the sum is rounded."""

    has_add = True
    quantized_class = quantized.LinearAdd
