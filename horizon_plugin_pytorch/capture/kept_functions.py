"""Functions that a model keeps: attributes and hooks that were made where ``self`` is the model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from horizon_plugin_pytorch.asking.functions import held_by, hold, is_user_function, twin


def rebind_functions(memo: dict[int, Any]) -> None:
    """Let the functions in what `copy.deepcopy` made hold what it made, and not what that was copied from.

    It copies no functions: a hook that was made where ``self`` is the model, ``lambda m, args, out:
    self.features.append(out)``, would go on writing to the model that was copied, and the copy would read what that
    holds. What the function shares with other code than the model's stays shared.

    Args:
        memo: of `copy.deepcopy`; its values are changed.
    """
    copies = [value for key, value in memo.items() if key != id(memo)]
    rebinding = _Rebinding(memo)
    for made in copies:
        rebinding.change(made)


class OwnFunction(functools.partial):
    """A function that holds parts of a model; its deep copy holds those of the copied model.

    Attributes:
        parts: what it holds of the model.
    """

    parts: list[Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnFunction:
        parts = {id(part) for part in self.parts}
        return _own(self.func, lambda held: copy.deepcopy(held, memo) if id(held) in parts else held, memo, id(self))

    def replace(self, successors: dict[int, nn.Module]) -> None:
        """Put new modules into the place of old ones.

        Args:
            successors: the new modules by the id of the old.
        """
        if any(id(part) in successors for part in self.parts):
            hold(self.func, self.func, lambda held: successors.get(id(held), held))  # type: ignore[arg-type]
            self.parts = [successors.get(id(part), part) for part in self.parts]


def _own(function: Any, current: Callable[[Any], Any], made: dict[int, Any], key: int) -> OwnFunction:
    """A function like another, with something else in the place of parts of a model.

    Args:
        current: gives what takes the place of something, or the same.
        made, key: where to put the function before it holds anything: it may hold itself.
    """
    new = made[key] = OwnFunction(twin(function))
    functools.update_wrapper(new, function)
    new.parts = []

    def noted(held: Any) -> Any:
        now = current(held)
        if now is not held:
            new.parts.append(now)
        return now

    hold(new.func, function, noted)  # type: ignore[arg-type]
    return new


class _Rebinding:
    """Functions of the user's that hold something which was copied, and what takes their place."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._done: dict[int, OwnFunction] = {}

    def change(self, made: Any) -> None:
        """Replace the functions that something holds, in place."""
        if isinstance(made, dict):
            self._change_entries(made)
        elif isinstance(made, list):
            for index, value in enumerate(made):
                if isinstance(value, (FunctionType, tuple)) and (current := self._current(value)) is not value:
                    made[index] = current
        elif isinstance(made, functools.partial):
            if (function := self._current(made.func)) is not made.func:
                made.__setstate__((function, made.args, made.keywords, made.__dict__))  # type: ignore[attr-defined]
        elif isinstance(getattr(made, "__dict__", None), dict):
            self._change_entries(made.__dict__)

    def _change_entries(self, entries: dict) -> None:
        for name, value in [entry for entry in entries.items() if isinstance(entry[1], (FunctionType, tuple))]:
            if (current := self._current(value)) is not value:
                entries[name] = current

    def _current(self, value: Any) -> Any:
        if type(value) is tuple:
            items = tuple(map(self._current, value))
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        if not isinstance(value, FunctionType) or not self._holds_copied(value, set()):
            return value
        return self._done.get(id(value)) or _own(value, self._held, self._done, id(value))

    def _holds_copied(self, function: FunctionType, seen: set[int]) -> bool:
        if id(function) in seen or not is_user_function(function):
            return False
        seen.add(id(function))
        return any(
            id(held) in self._memo or (isinstance(held, FunctionType) and self._holds_copied(held, seen))
            for held in held_by(function)
        )

    def _held(self, value: Any) -> Any:
        return self._memo[id(value)] if id(value) in self._memo else self._current(value)
