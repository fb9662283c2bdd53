"""QAT convolutions."""

from __future__ import annotations

from torch import Tensor, nn

from horizon_plugin_pytorch.nn.qat.gemm import QATGemm, register_layers
from horizon_plugin_pytorch.nn.qat.module import relu_limits
from horizon_plugin_pytorch.nn.quantized import conv2d as quantized


class Conv2d(QATGemm, nn.Conv2d):
    """Conv2d with rounded weights and output."""

    float_class = nn.Conv2d
    quantized_class = quantized.Conv2d

    def split_padding(self) -> tuple[list[int], list[int]]:
        """Padding that `F.pad` must do (other modes than zeros, or uneven), and padding that the convolution does."""
        both_sides = list(self._reversed_padding_repeated_twice)
        is_even = both_sides[0] == both_sides[1] and both_sides[2] == both_sides[3]
        if self.padding_mode == "zeros" and is_even:
            return [], [both_sides[2], both_sides[0]]
        return both_sides, [0, 0]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._conv_forward(x, weight, self.bias)


class ConvReLU2d(Conv2d):
    """Conv2d and ReLU; only the result is rounded."""

    limits = relu_limits(True, False)
    quantized_class = quantized.ConvReLU2d


class ConvReLU62d(Conv2d):
    """Conv2d and ReLU6; only the result is rounded."""

    limits = relu_limits(True, True)
    quantized_class = quantized.ConvReLU62d


class ConvAdd2d(Conv2d):
    """Conv2d plus another tensor; only the result is rounded."""

    has_add = True
    quantized_class = quantized.ConvAdd2d


class ConvAddReLU2d(ConvAdd2d):
    """Conv2d plus another tensor, and ReLU; only the result is rounded."""

    limits = relu_limits(True, False)
    quantized_class = quantized.ConvAddReLU2d


class ConvAddReLU62d(ConvAdd2d):
    """Conv2d plus another tensor, and ReLU6; only the result is rounded."""

    limits = relu_limits(True, True)
    quantized_class = quantized.ConvAddReLU62d


register_layers(
    "conv2d",
    Conv2d,
    (
        ConvReLU2d,
        ConvReLU62d,
        ConvAdd2d,
        ConvAddReLU2d,
        ConvAddReLU62d,
    ),
)
