"""Where in a model an operator runs: the module, and the line of the user's code."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.asking.owners import is_user_code
from horizon_plugin_pytorch.asking.stack import running_functions
from horizon_plugin_pytorch.capture.graph_lines import places_of_lines


class Places:
    """Finds the module and line of what is running.

    Args:
        model: whose modules are meant.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._written: dict[int, dict[int, tuple[str, str]]] = {}

    def has(self, module: nn.Module) -> bool:
        """Is it a module of the model?"""
        return id(module) in self._paths

    def here(self) -> tuple[str, str]:
        """The path of the innermost module of the model that is running, and the user's line."""
        path, line = None, ""
        for running in running_functions():
            if running.file == __file__:  # its locals, once looked at, would hold it, and all that runs, in a circle
                continue
            known = self._paths.get(id(running.owner))
            if path is None and known is not None:
                path, line = known, line or getattr(running.owner, "line", "")
            if not line and running.file.startswith("<eval_with_key>"):
                scope, line = self._of_generated_code(running.owner, running.number)
                path = path or scope
            elif not line and is_user_code(running.file):
                line = running.line
            if (path is not None and line) or (known == "" and running.name == "forward"):
                break  # what is above called the model
        return path or "", line

    def _of_generated_code(self, owner: Any, lineno: int) -> tuple[str, str]:
        """The user's module and line of what runs at a line of the code that fx has written."""
        if not isinstance(owner, fx.GraphModule):
            return "", ""
        if id(owner) not in self._written:
            self._written[id(owner)] = places_of_lines(owner)
        return self._written[id(owner)].get(lineno, ("", ""))
