"""Fused float modules."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn


class FusedModule(nn.Module):
    """A layer with an optional add and activation after it."""

    layer_class: ClassVar[type]
    has_add: ClassVar[bool] = False
    relu_class: ClassVar[type | None] = None
    conv: nn.Module
    relu: nn.Module | None

    def __init__(self, conv: nn.Module, relu: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = conv
        if self.relu_class is not None:
            self.relu = relu if relu is not None else self.relu_class()
        self.train(conv.training)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.conv(x)
        if self.has_add:
            assert residual is not None, f"{type(self).__name__} needs a second tensor to add"
            out = out + residual
        return self.relu(out) if self.relu_class is not None and self.relu is not None else out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The fused module stands where the model calls ``add``."""
        return self(x, residual)


class ConvReLU2d(FusedModule):
    """Conv2d, ReLU."""

    layer_class, relu_class = nn.Conv2d, nn.ReLU


class ConvReLU62d(FusedModule):
    """Conv2d, ReLU6."""

    layer_class, relu_class = nn.Conv2d, nn.ReLU6


class ConvAdd2d(FusedModule):
    """Conv2d, add."""

    layer_class, has_add = nn.Conv2d, True


class ConvAddReLU2d(FusedModule):
    """Conv2d, add, ReLU."""

    layer_class, has_add, relu_class = nn.Conv2d, True, nn.ReLU


class ConvAddReLU62d(FusedModule):
    """Conv2d, add, ReLU6."""

    layer_class, has_add, relu_class = nn.Conv2d, True, nn.ReLU6


class ConvTransposeReLU2d(FusedModule):
    """ConvTranspose2d, ReLU."""

    layer_class, relu_class = nn.ConvTranspose2d, nn.ReLU


class ConvTransposeReLU62d(FusedModule):
    """ConvTranspose2d, ReLU6."""

    layer_class, relu_class = nn.ConvTranspose2d, nn.ReLU6


class ConvTransposeAdd2d(FusedModule):
    """ConvTranspose2d, add."""

    layer_class, has_add = nn.ConvTranspose2d, True


class ConvTransposeAddReLU2d(FusedModule):
    """ConvTranspose2d, add, ReLU."""

    layer_class, has_add, relu_class = nn.ConvTranspose2d, True, nn.ReLU


class ConvTransposeAddReLU62d(FusedModule):
    """ConvTranspose2d, add, ReLU6."""

    layer_class, has_add, relu_class = nn.ConvTranspose2d, True, nn.ReLU6


class LinearReLU(FusedModule):
    """Linear, ReLU."""

    layer_class, relu_class = nn.Linear, nn.ReLU


class LinearReLU6(FusedModule):
    """Linear, ReLU6."""

    layer_class, relu_class = nn.Linear, nn.ReLU6


class LinearAdd(FusedModule):
    """Linear, add."""

    layer_class, has_add = nn.Linear, True


class LinearAddReLU(FusedModule):
    """Linear, add, ReLU."""

    layer_class, has_add, relu_class = nn.Linear, True, nn.ReLU


class LinearAddReLU6(FusedModule):
    """Linear, add, ReLU6."""

    layer_class, has_add, relu_class = nn.Linear, True, nn.ReLU6


_CLASSES = {(cls.layer_class, cls.has_add, cls.relu_class): cls for cls in FusedModule.__subclasses__()}


def fused_class(layer_class: type, has_add: bool, relu_class: type | None) -> type[FusedModule] | None:
    """The fused module for a combination, None if the BPU does not fuse it.

    >>> from torch import nn
    >>> fused_class(nn.Conv2d, True, nn.ReLU).__name__
    'ConvAddReLU2d'
    """
    return _CLASSES.get((layer_class, has_add, relu_class))
