"""Which operators a tool is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chosen:
    """Operators by the start of their names, or by their classes; all, if nothing is asked for.

    Args:
        who: the tool that was asked, for messages.

    >>> Chosen("check_qconfig", ("backbone",)).has("backbone.conv", int)
    True
    """

    who: str
    prefixes: Sequence[str] = ()
    types: Sequence[type] = ()

    def __post_init__(self) -> None:
        is_right = not isinstance(self.prefixes, str) and all(isinstance(x, str) for x in self.prefixes)
        if not is_right or isinstance(self.types, type) or not all(isinstance(x, type) for x in self.types):
            raise TypeError(f"{self.who}: prefixes is a tuple of names, and types a tuple of classes.")

    def has(self, path: str, kind: type) -> bool:
        """Is the operator at this path, of this class, asked for?"""
        is_all = not self.prefixes and not self.types
        return is_all or path.startswith(tuple(self.prefixes)) or kind in tuple(self.types)
