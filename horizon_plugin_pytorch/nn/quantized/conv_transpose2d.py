"""Transposed convolutions on integers."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.quantized.conv2d import Conv2d


class ConvTranspose2d(Conv2d):
    """ConvTranspose2d on integers."""

    is_transposed = True
    output_axis = 1


class ConvTransposeReLU2d(ConvTranspose2d):
    """ConvTranspose2d and ReLU on integers."""


class ConvTransposeReLU62d(ConvTranspose2d):
    """ConvTranspose2d and ReLU6 on integers."""


class ConvTransposeAdd2d(ConvTranspose2d):
    """ConvTranspose2d plus another tensor, on integers."""

    has_add = True


class ConvTransposeAddReLU2d(ConvTransposeAdd2d):
    """ConvTranspose2d plus another tensor, and ReLU, on integers."""


class ConvTransposeAddReLU62d(ConvTransposeAdd2d):
    """ConvTranspose2d plus another tensor, and ReLU6, on integers."""
