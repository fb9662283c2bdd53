"""What QAT convolutions have in common, over any number of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horizon_plugin_pytorch.fake_quant.learnable import LayerOfData, rounded_data
from horizon_plugin_pytorch.nn.qat.gemm import QATGemm

_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


_EACH_AXIS = ("stride", "padding", "output_padding", "dilation")


class _Convolution(QATGemm):
    """Settings that may be set later, as torch's layers take them."""

    stride: Any
    padding: Any
    dilation: Any
    groups: int

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _EACH_AXIS and isinstance(value, (int, list)):
            value = (value,) * (self.weight.dim() - 2) if isinstance(value, int) else tuple(value)
        super().__setattr__(name, value)


class QATConvolution(_Convolution):
    """A convolution, mixed into torch's of the same kind."""

    padding_mode: Any

    @property
    def _reversed_padding_repeated_twice(self) -> list[int]:
        """Torch's layers compute it once; here it follows the settings."""
        if self.padding == "valid" or not hasattr(self, "weight"):  # torch's constructor fills in a list of its own
            return [0] * (2 * len(self.stride))
        if self.padding != "same":
            return [size for size in reversed(self.padding) for _ in range(2)]
        totals = [d * (k - 1) for d, k in zip(self.dilation, self.weight.shape[2:], strict=True)]
        return [size for total in reversed(totals) for size in (total // 2, total - total // 2)]

    @_reversed_padding_repeated_twice.setter
    def _reversed_padding_repeated_twice(self, value: list[int]) -> None:
        pass

    def split_padding(self) -> tuple[list[int], list[int]]:
        """Padding that `F.pad` must do (other modes than zeros, or uneven), and padding that the convolution does."""
        both_sides = list(self._reversed_padding_repeated_twice)
        befores, afters = both_sides[::2][::-1], both_sides[1::2][::-1]
        if self.padding_mode == "zeros" and befores == afters:
            return [], befores
        return both_sides, [0] * len(befores)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        data = rounded_data(x) if torch.is_grad_enabled() else None
        if data is None or self.split_padding()[0] or x.dim() != weight.dim():
            return self._conv_forward(x, weight, bias)  # type: ignore[operator]
        return LayerOfData.apply(x, weight, bias, data.scale, data.x, data, self._conv_forward, self._gradients)

    def _gradients(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> tuple:
        """Those of input, weight and bias that are wanted."""
        padding, none = self.split_padding()[1], [0] * len(self.stride)
        sizes = [weight.shape[0]]
        return torch.ops.aten.convolution_backward(
            grad, x, weight, sizes, self.stride, padding, self.dilation, False, none, self.groups, wanted
        )


class QATTransposedConvolution(_Convolution):
    """A transposed convolution, mixed into torch's of the same kind."""

    weight_axis = 1
    output_padding: Any

    def split_padding(self) -> tuple[list[int], list[int]]:
        """A transposed convolution pads by itself."""
        return [], list(self.padding)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        run = _TRANSPOSED[len(self.stride)]
        return run(x, weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation)
