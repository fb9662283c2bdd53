"""Hooks that are pickled with their module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle


class KeptHook:
    """A hook that keeps its number.

    Torch numbers hooks from 0 in each process, and a pickled module keeps the numbers of its hooks: in the process that
    loads it, a new hook would take the place of one of them.

    Args:
        function: the hook.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.number = function, -1

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        RemovableHandle.next_id = max(RemovableHandle.next_id, self.number + 1)


def keep(register: Callable[..., RemovableHandle], function: Callable[..., Any], **options: bool) -> None:
    """Register a hook that stays with its module.

    Args:
        register: a module's method, such as ``conv.register_forward_hook``.
        function: the hook.
        options: of `register`.
    """
    hook = KeptHook(function)
    hook.number = register(hook, **options).id
