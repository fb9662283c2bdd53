"""Modules that were put into the user's, and that the user's forward does not meet when it lists its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from horizon_plugin_pytorch.asking.who import model_lists
from horizon_plugin_pytorch.running import interceptor
from horizon_plugin_pytorch.runtime.located import as_written


class Children(dict):
    """The children of a module: all of them by name, but in lists only the user's own while its forward asks.

    Args:
        children: all children.
        added: names of those that are not the user's.
    """

    def __init__(self, children: Mapping[str, nn.Module | None] | None = None, added: Collection[str] = ()) -> None:
        super().__init__(children or {})
        self.added = frozenset(added)

    def _own(self) -> dict[str, Any]:
        return {name: child for name, child in super().items() if name not in self.added}

    def __iter__(self) -> Iterator[str]:
        return iter(self._own()) if _is_listed() else super().__iter__()

    def __len__(self) -> int:
        return len(self._own()) if _is_listed() else super().__len__()

    def keys(self) -> Any:
        return self._own().keys() if _is_listed() else super().keys()

    def values(self) -> Any:
        return self._own().values() if _is_listed() else super().values()

    def items(self) -> Any:
        return self._own().items() if _is_listed() else super().items()

    def copy(self) -> Children:
        return Children(dict(super().items()), self.added)


def _is_listed() -> bool:
    """Does the forward of the user's model list children, itself or through torch?"""
    return interceptor() is not None and model_lists(2)


def hide_added(module: nn.Module, own: Collection[str]) -> None:
    """Let the user's forward list only those children of a module that it has been written with.

    Args:
        own: their names.
    """
    added = [name for name in module._modules if name not in own]
    if added:
        module.__dict__["_modules"] = Children(module._modules, added)


class Parameters(dict):
    """The parameters of a module that stands for another one: the float ones while the user's forward lists them.

    ``next(self.parameters()).device`` finds some in a converted model too, which has none.

    Args:
        module: whose parameters.
        names: those of the float module.
    """

    def __init__(self, module: Any = None, names: Collection[str] = ()) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)

    def items(self) -> Any:
        return [(name, as_written(self.module, name)) for name in self.names] if _is_listed() else super().items()


def list_parameters(module: nn.Module, names: Collection[str]) -> None:
    """Let the user's forward list parameters of a module that has none any more."""
    if names and not module._parameters:
        module.__dict__["_parameters"] = Parameters(module, names)
