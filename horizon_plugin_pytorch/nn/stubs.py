"""Where a model enters and leaves the quantized part."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import QuantizationConfigError


def _number(value: Any) -> float:
    """A number, however it is given; NaN for what is none, or several."""
    if isinstance(value, (str, bytes)):
        return math.nan
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


class QuantStub(nn.Module):
    """Marks a float input that becomes quantized.

    Args:
        scale: a fixed scale, such as 1 / 128 for centred images; a number, also of numpy or in a tensor. None observes
            it.
        zero_point: must be 0 or None.
        qconfig: a qconfig of its own.

    >>> import torch
    >>> QuantStub(scale=1 / 128)(torch.ones(1))
    tensor([1.])
    """

    requantizes = False  # one that `prepare` puts between two integer formats; the user's pass integers on
    may_be_constant = False  # one that `prepare` puts on a parameter or constant, whose values may well be equal
    may_be_mask = False  # is it added to what a softmax takes?
    is_after_cpu = False  # one that `prepare` puts after an operator of the CPU

    def __init__(self, scale: float | None = None, zero_point: Any = None, qconfig: Any = None) -> None:
        super().__init__()
        if zero_point is not None and _number(zero_point) != 0:
            raise QuantizationConfigError(
                f"QuantStub: quantization is symmetric, zero_point must be 0, got {zero_point}."
            )
        self.scale, self.zero_point = None if scale is None else _number(scale), 0
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise QuantizationConfigError(
                f"QuantStub: scale must be one positive and finite number, got {scale!r}. An input has one scale for "
                "all its channels: bring them to one range first, or give each its own QuantStub."
            )
        if qconfig is not None:
            self.qconfig = qconfig

    def forward(self, x: Tensor) -> Tensor:
        return x

    def extra_repr(self) -> str:
        return "" if self.scale is None else f"scale={self.scale}"


class DeQuantStub(nn.Module):
    """Marks where a quantized value becomes float again."""

    is_before_cpu = False  # one that `prepare` puts before an operator of the CPU

    def __init__(self, qconfig: Any = None) -> None:
        super().__init__()
        if qconfig is not None:
            self.qconfig = qconfig

    def forward(self, x: Tensor) -> Tensor:
        return x


class QuantWrapper(nn.Module):
    """A module with a QuantStub before and a DeQuantStub after it.

    >>> [name for name, _ in QuantWrapper(nn.ReLU()).named_children()]
    ['quant', 'module', 'dequant']
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.quant, self.module, self.dequant = QuantStub(), module, DeQuantStub()
        self.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.module(self.quant(x)))


show_at("quantization.stubs", QuantStub, DeQuantStub, QuantWrapper)
