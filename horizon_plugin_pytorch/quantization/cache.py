"""Values derived from tensors, kept while the tensors do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def _version(x: Tensor) -> tuple[object, int]:
    # ``x.data = y`` counts as no write, but moves the data. Tensors made in inference mode count no writes at all, so
    # they always look changed.
    return (object() if x.is_inference() else x._version), x.data_ptr()


class Cache:
    """A value derived from tensors; forgets itself when they change, and is not copied or pickled.

    A write through ``tensor.data`` is the one change that torch does not count; `clear` is for that.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget."""
        self._sources: tuple[Tensor, ...] = ()
        self._versions: tuple[tuple[object, int], ...] = ()
        self._value: Any = None

    def get(self, sources: tuple[Tensor, ...], build: Callable[[], Any]) -> Any:
        """The value for these tensors, built anew if any of them was replaced or written to."""
        if not self.holds(sources):
            self._value = build()
            self._sources = sources
            self._versions = tuple([_version(t) for t in sources])
        return self._value

    def holds(self, sources: tuple[Tensor, ...]) -> bool:
        """Is there a value for these tensors, and none of them was written to since?"""
        return self._value is not None and self._is_current(sources)

    def _is_current(self, sources: tuple[Tensor, ...]) -> bool:
        if len(sources) != len(self._sources):
            return False
        for new, old, version in zip(sources, self._sources, self._versions, strict=True):  # a loop: called often
            if new is not old or _version(new) != version:
                return False
        return True

    def __deepcopy__(self, memo: dict) -> Cache:
        return Cache()

    def __reduce__(self) -> tuple:
        return Cache, ()
