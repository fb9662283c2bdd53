"""Fused float modules."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from torch import Tensor, nn


class Entry:
    """A hook on what stands where a layer was that is now fused into an add: remembers which tensor went through."""

    def __init__(self) -> None:
        self._passed: weakref.ref | None = None

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._passed = weakref.ref(output)

    def has_passed(self, x: Any) -> bool:
        """Was this the last tensor that went through?"""
        return self._passed is not None and self._passed() is x

    def __reduce__(self) -> tuple:
        return Entry, ()


def check_rank(x: Any, rank: int | None) -> None:
    """A BatchNorm1d that was folded into a Linear normalised axis 1, which is the last in 2-d inputs only."""
    if rank is not None and x.dim() != rank:
        raise RuntimeError(
            f"a BatchNorm1d is folded into this Linear, which is right for [batch, features] inputs only, not for "
            f"{x.dim()}-d ones. Transpose around the batch norm in the model, or keep it apart with qconfig=None."
        )


def check_rank_hook(module: Any, args: tuple) -> None:
    """The same for a float layer, as a forward pre-hook."""
    check_rank(args[0], module.input_rank)


class CalledByAdd:
    """A fused module that stands where the model calls ``add``, with the layer's input as one of the operands."""

    def enter_through(self, entry: Entry | None) -> None:
        """Say which hook sees the layer's input."""
        self.__dict__["_entry"] = entry

    @property
    def entry(self) -> Entry | None:
        """The hook that sees the layer's input, if the user fused the modules by name."""
        return self.__dict__.get("_entry")

    def add(self, x: Any, y: Any) -> Any:
        """The layer of one operand plus the other; the one that came through the entry is the layer's."""
        if self.entry is not None and self.entry.has_passed(y) and not self.entry.has_passed(x):
            x, y = y, x
        return self(x, y)  # type: ignore[operator]


class FusedModule(CalledByAdd, nn.Module):
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
