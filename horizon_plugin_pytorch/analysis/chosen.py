"""Which operators a tool is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from horizon_plugin_pytorch.errors import QuantizationWarning, listed, warn
from horizon_plugin_pytorch.nn.origin import is_made_of


@dataclass(frozen=True)
class Chosen:
    """Operators by the start of their names, or by their classes; all, if nothing is asked for.

    A float class also means what fusion, preparation and conversion have made of its modules.

    Args:
        who: the tool that was asked, for messages.

    >>> Chosen("check_qconfig", ("backbone",)).has("backbone.conv", nn.ReLU())
    True
    """

    who: str
    prefixes: Sequence[str] = ()
    types: Sequence[type] = ()

    def __post_init__(self) -> None:
        is_right = not isinstance(self.prefixes, str) and all(isinstance(x, str) for x in self.prefixes)
        if not is_right or isinstance(self.types, type) or not all(isinstance(x, type) for x in self.types):
            raise TypeError(f"{self.who}: prefixes is a tuple of names, and types a tuple of classes.")

    def has(self, path: str, module: nn.Module | None) -> bool:
        """Is the operator at this path asked for? A function has no module."""
        is_all = not self.prefixes and not self.types
        is_named = bool(self.prefixes) and path.startswith(tuple(self.prefixes))
        return is_all or is_named or (module is not None and any(is_made_of(module, cls) for cls in self.types))

    def tell_unused(self, model: nn.Module) -> None:
        """Say which names and classes the model does not have: nothing is shown for them."""
        modules = dict(model.named_modules())
        unused = [repr(prefix) for prefix in self.prefixes if not any(path.startswith(prefix) for path in modules)]
        unused += [
            cls.__name__ for cls in self.types if not any(is_made_of(module, cls) for module in modules.values())
        ]
        if unused:
            warn(
                f"{self.who}: `{type(model).__name__}` has no module of {listed(unused)}, so nothing is shown for it.",
                QuantizationWarning,
            )
