"""Rounding with scales that are computed anew for each tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch import fixed_point as fp
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.dtype import as_dtype, qint8
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.fake_quant.fake_quantize import SWITCHES, FakeQuantize, FakeQuantState, answer_to_torch
from horizon_plugin_pytorch.fake_quant.rounding import Rounded
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.statistics.partial import Partial
from horizon_plugin_pytorch.untraced import applied


class DynamicFakeQuantize(nn.Module):
    """Round a tensor with scales of its own values, computed each time: nothing is observed, and nothing is kept.

    One scale for each slice along `dim` lets a row with outliers leave the others their precision. It is for the
    `input` of a qconfig; linear layers take it (see `SetDynamicQuantTemplate`).

    Args:
        dtype: ``qint8``.
        block_size: how many values along `dim` share a scale; ``"full"`` is all of them.
        dim: the axis.

    >>> DynamicFakeQuantize()(torch.tensor([[0.1, 255.0], [0.1, 0.2]]))
    tensor([[0.0000e+00, 2.5400e+02],
            [1.0039e-01, 1.9922e-01]])
    """

    def __init__(self, dtype: Any = qint8, block_size: int | str = "full", dim: int = -1, channel_len: int = 1) -> None:
        super().__init__()
        self.dtype, self.block_size, self.dim = as_dtype(dtype), block_size, dim
        if self.dtype != qint8:
            raise QuantizationConfigError(f"DynamicFakeQuantize: dtype must be qint8, got {dtype!r}.")
        is_size = isinstance(block_size, int) and not isinstance(block_size, bool) and block_size > 0
        if block_size != "full" and not is_size:
            raise QuantizationConfigError(
                f'DynamicFakeQuantize: block_size must be "full" or a positive int, got {block_size!r}.'
            )
        if not isinstance(dim, int):
            raise QuantizationConfigError(f"DynamicFakeQuantize: dim must be an int, got {dim!r}.")
        answer_to_torch(DynamicFakeQuantize)
        self.is_quantizing = True

    @classmethod
    def with_args(cls, **kwargs: Any) -> Partial:
        """A constructor with some arguments already given."""
        return Partial(cls, kwargs)

    @property
    def quant_min(self) -> int:
        """The smallest integer."""
        return self.dtype.min

    @property
    def quant_max(self) -> int:
        """The largest integer."""
        return self.dtype.max

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Round, or not."""
        self.is_quantizing = bool(enabled)

    def disable_fake_quant(self) -> None:
        """Do not round."""
        self.enable_fake_quant(False)

    def enable_observer(self, enabled: bool = True) -> None:
        """There is nothing to switch: each tensor has the scales of its own values."""

    def disable_observer(self) -> None:
        """There is nothing to switch, as above."""

    def set_state(self, state: FakeQuantState) -> None:
        """Round as the state says."""
        self.enable_fake_quant(SWITCHES[state][1])

    def size_of_block(self, length: int) -> int:
        """How many values share a scale where `dim` has this length."""
        return length if isinstance(self.block_size, str) else self.block_size

    def forward(self, x: Tensor) -> Tensor:
        """The nearest values of the slices' grids; gradients pass straight through."""
        if isinstance(x, QTensor):
            x = x.as_real()
        if not (self.is_quantizing and FakeQuantize.enabled):
            return x
        parts = []
        for part in x.split(self.size_of_block(x.shape[self.dim]), self.dim):
            scale = fp.block_scale(part.detach(), self.dim, self.quant_min, self.quant_max)
            parts.append(applied(Rounded, part, scale, (self.quant_min, self.quant_max), None))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}, block_size={self.block_size}, dim={self.dim}"


def is_dynamic(part: Any) -> bool:
    """Does this part of a qconfig make a `DynamicFakeQuantize`?"""
    return isinstance(part, Partial) and isinstance(part.cls, type) and issubclass(part.cls, DynamicFakeQuantize)


show_at("quantization.fake_quantize", DynamicFakeQuantize, is_dynamic)
