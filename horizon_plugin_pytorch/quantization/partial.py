"""A class with some of its constructor's arguments given: what a qconfig is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Partial:
    """A class with some constructor arguments given; call it to make the object, `with_args` to give more.

    Args:
        is_default: nobody asked for it: it counts where something is needed, and changes nothing where not.

    >>> Partial(dict, {"a": 1}).with_args(b=2)()
    {'a': 1, 'b': 2}
    """

    cls: type
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_default: bool = field(default=False, compare=False)

    def __call__(self, **kwargs: Any) -> Any:
        return self.cls(**{**self.kwargs, **kwargs})

    def with_args(self, **kwargs: Any) -> Partial:
        """The same class with more arguments given."""
        return Partial(self.cls, {**self.kwargs, **kwargs})

    def __hash__(self) -> int:
        return hash((self.cls, *sorted(self.kwargs)))  # the values may be unhashable; equal partials have equal names

    def __repr__(self) -> str:
        return f"{self.cls.__name__}.with_args({', '.join(f'{k}={v!r}' for k, v in self.kwargs.items())})"
