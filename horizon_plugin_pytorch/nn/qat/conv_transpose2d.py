"""QAT transposed convolutions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from horizon_plugin_pytorch.nn.qat.gemm import QATGemm, register_layers
from horizon_plugin_pytorch.nn.qat.module import relu_limits
from horizon_plugin_pytorch.nn.quantized import conv_transpose2d as quantized


class ConvTranspose2d(QATGemm, nn.ConvTranspose2d):
    """ConvTranspose2d with rounded weights and output."""

    float_class = nn.ConvTranspose2d
    quantized_class = quantized.ConvTranspose2d
    weight_axis = 1

    def split_padding(self) -> tuple[list[int], list[int]]:
        """A transposed convolution pads by itself."""
        return [], list(self.padding)  # type: ignore[arg-type]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv_transpose2d(
            x,
            weight,
            self.bias,
            self.stride,
            self.padding,  # type: ignore[arg-type]
            self.output_padding,
            self.groups,
            self.dilation,
        )


class ConvTransposeReLU2d(ConvTranspose2d):
    """ConvTranspose2d and ReLU; only the result is rounded."""

    limits = relu_limits(True, False)
    quantized_class = quantized.ConvTransposeReLU2d


class ConvTransposeReLU62d(ConvTranspose2d):
    """ConvTranspose2d and ReLU6; only the result is rounded."""

    limits = relu_limits(True, True)
    quantized_class = quantized.ConvTransposeReLU62d


class ConvTransposeAdd2d(ConvTranspose2d):
    """ConvTranspose2d plus another tensor; only the result is rounded."""

    has_add = True
    quantized_class = quantized.ConvTransposeAdd2d


class ConvTransposeAddReLU2d(ConvTransposeAdd2d):
    """ConvTranspose2d plus another tensor, and ReLU; only the result is rounded."""

    limits = relu_limits(True, False)
    quantized_class = quantized.ConvTransposeAddReLU2d


class ConvTransposeAddReLU62d(ConvTransposeAdd2d):
    """ConvTranspose2d plus another tensor, and ReLU6; only the result is rounded."""

    limits = relu_limits(True, True)
    quantized_class = quantized.ConvTransposeAddReLU62d


register_layers(
    "conv_transpose2d",
    ConvTranspose2d,
    (
        ConvTransposeReLU2d,
        ConvTransposeReLU62d,
        ConvTransposeAdd2d,
        ConvTransposeAddReLU2d,
        ConvTransposeAddReLU62d,
    ),
)
