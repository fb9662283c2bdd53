"""What can be fused into a layer with weights, and how the fused classes are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

# The layers that take part in fusion, with the pattern of their fused names.
LAYER_NAMES: dict[type[nn.Module], str] = {
    nn.Conv1d: "Conv{}1d",
    nn.Conv2d: "Conv{}2d",
    nn.Conv3d: "Conv{}3d",
    nn.ConvTranspose1d: "ConvTranspose{}1d",
    nn.ConvTranspose2d: "ConvTranspose{}2d",
    nn.ConvTranspose3d: "ConvTranspose{}3d",
    nn.Linear: "Linear{}",
}


@dataclass(frozen=True)
class Form:
    """What follows a layer, in this order: batch normalisation, add, activation.

    >>> Form(has_add=True, relu=nn.ReLU6).name_of(nn.Conv2d)
    'ConvAddReLU62d'
    """

    has_bn: bool = False
    has_add: bool = False
    relu: type[nn.Module] | None = None

    def name_of(self, layer: type[nn.Module]) -> str:
        """The name of the layer's class in this form."""
        members = ("BN" if self.has_bn else "", "Add" if self.has_add else "", self.relu.__name__ if self.relu else "")
        return LAYER_NAMES[layer].format("".join(members))

    @property
    def without_bn(self) -> Form:
        """The form that is left when batch normalisation is folded into the layer."""
        return Form(False, self.has_add, self.relu)


_FORMS = [Form(False, has_add, relu) for has_add in (False, True) for relu in (None, nn.ReLU, nn.ReLU6)]
FORMS = tuple(_FORMS[1:])  # the first is the layer itself
BN_FORMS = tuple(Form(True, form.has_add, form.relu) for form in _FORMS)

Base = TypeVar("Base")


def derive(
    base: type[Base],
    layer: type[nn.Module],
    forms: Iterable[Form],
    module: str,
    attributes: Callable[[Form], dict[str, Any]] = lambda form: {},
) -> list[type[Base]]:
    """A subclass of `base` for each form.

    Args:
        base: the class that they derive from.
        layer: the torch layer, for their names.
        module: name of the module that has them as attributes, where pickle looks.
        attributes: class attributes that depend on the form.
    """
    made: list[type[Base]] = []
    for form in forms:
        parts = [layer.__name__, *(["batch normalisation"] if form.has_bn else [])]
        parts += (["add"] if form.has_add else []) + ([form.relu.__name__] if form.relu else [])
        namespace = {"form": form, "__module__": module, "__doc__": f"{', '.join(parts)}.", **attributes(form)}
        made.append(type(form.name_of(layer), (base,), namespace))
    return made
