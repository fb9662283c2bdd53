"""Fused float modules."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from torch import Tensor, nn

from horizon_plugin_pytorch.nn.intrinsic.forms import BN_FORMS, FORMS, LAYER_NAMES, Form, derive


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
    """A batch norm that was folded into a layer normalised axis 1, which is the layer's channels in one rank only."""
    if rank is not None and x.dim() != rank:
        raise RuntimeError(
            f"a BatchNorm1d is folded into this layer, which is right for {rank}-d inputs only "
            f"({'[batch, features]' if rank == 2 else '[batch, channels, length]'}), not for {x.dim()}-d ones. "
            "Transpose around the batch norm in the model, or keep it apart with qconfig=None."
        )


def check_rank_hook(module: Any, args: tuple) -> None:
    """The same for a float layer, as a forward pre-hook."""
    check_rank(args[0], module.input_rank)


class CalledByAdd:
    """A fused module that stands where the model calls ``add``, with the layer's input as one of the operands."""

    def enter_through(self, entry: Entry | None) -> None:
        """Say which hook sees the layer's input."""
        self.__dict__["_entry"] = entry

    def called_as(self, other: Any) -> None:
        """Be called by add as another form of this module is."""
        self.enter_through(other.__dict__.get("_entry"))
        self.__dict__["_operand"] = other.__dict__.get("_operand")

    @property
    def entry(self) -> Entry | None:
        """The hook that sees the layer's input, if the user fused the modules by name."""
        return self.__dict__.get("_entry")

    def layer_first(self, x: Any, y: Any) -> tuple[Any, Any]:
        """The operands of add, the layer's input first: that is the one which came through the entry."""
        is_second = self.__dict__.get("_operand") == 2
        if is_second or (self.entry is not None and self.entry.has_passed(y) and not self.entry.has_passed(x)):
            return y, x
        return x, y

    def add(self, x: Any, y: Any) -> Any:
        """The layer of one operand plus the other."""
        return self(*self.layer_first(x, y))  # type: ignore[operator]


class FusedModule(CalledByAdd, nn.Module):
    """A layer with an optional add and activation after it."""

    layer_class: ClassVar[type]
    form: ClassVar[Form]
    conv: nn.Module
    bn: nn.Module
    relu: nn.Module | None

    def __init__(self, conv: nn.Module, relu: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = conv
        if self.form.relu is not None:
            self.relu = relu if relu is not None else self.form.relu()
        self.train(conv.training)

    def __getattr__(self, name: str) -> Any:
        is_layers = name in ("weight", "bias") and "conv" in self._modules  # as in the QAT form
        return getattr(self.conv, name) if is_layers else super().__getattr__(name)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.conv(x)
        if self.form.has_bn:
            out = self.bn(out)
        if self.form.has_add:
            assert residual is not None, f"{type(self).__name__} needs a second tensor to add"
            out = out + residual
        return self.relu(out) if self.form.relu is not None and self.relu is not None else out


class FusedBNModule(FusedModule):
    """A layer with batch normalisation after it, which goes on training (`QATMode.WithBN`); then add and activation."""

    def __init__(self, conv: nn.Module, bn: nn.Module, relu: nn.Module | None = None) -> None:
        super().__init__(conv, relu)
        self.bn = bn


_CLASSES: dict[tuple[type, Form], type[FusedModule]] = {}


def _forms(layer: type[nn.Module]) -> list[type[FusedModule]]:
    plain = derive(FusedModule, layer, FORMS, __name__, lambda form: {"layer_class": layer})
    normed = derive(FusedBNModule, layer, BN_FORMS, __name__, lambda form: {"layer_class": layer})
    made: list[type[FusedModule]] = [*plain, *normed]
    for cls in made:
        _CLASSES[layer, cls.form] = cls
        globals()[cls.__name__] = cls
    return made


FUSED_CLASSES: dict[str, type[FusedModule]] = {cls.__name__: cls for layer in LAYER_NAMES for cls in _forms(layer)}


def fused_class(
    layer_class: type[nn.Module], has_add: bool, relu_class: type[nn.Module] | None, has_bn: bool = False
) -> type[FusedModule] | None:
    """The fused module for a combination, None if the BPU does not fuse it.

    >>> from torch import nn
    >>> fused_class(nn.Conv2d, True, nn.ReLU).__name__
    'ConvAddReLU2d'
    """
    return _CLASSES.get((layer_class, Form(has_bn, has_add, relu_class)))
