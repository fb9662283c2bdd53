"""A model together with the graph of its calls."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


class Captured:
    """A model with its recorded graph, as passes see it: modules are put into the model itself."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self.graph = graph
        self.__model = model  # mangled: the user's model may have a child named `model`

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_Captured__model"], name)

    def add_submodule(self, path: str, module: nn.Module) -> None:
        """Put a new module at a path."""
        *parents, name = path.split(".")
        owner = self.__model
        for parent in parents:  # a dynamic block is a container of its own
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = getattr(owner, parent)
        owner.add_module(name, module)

    def recompile(self) -> None:
        """The forward stays the user's."""
