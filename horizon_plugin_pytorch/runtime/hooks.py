"""Hooks that are pickled with their module, and hooks that go with a module's place to another module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from horizon_plugin_pytorch.asking import OWN_HOOKS
from horizon_plugin_pytorch.errors import QuantizationWarning, listed, warn


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


# How torch keeps hooks: dictionaries by number, and the numbers of those that are called otherwise.
BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
STATE = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
ALL = (*BEFORE, *AFTER, *BACKWARD, *STATE)


def copy_hooks(new: nn.Module, old: nn.Module, kinds: Sequence[str] = ALL, of_users: bool = False) -> None:
    """Give a module the hooks of another one, whose place it takes.

    Args:
        kinds: which.
        of_users: only those that are no hooks of this package.

    >>> old, new = nn.Linear(1, 1), nn.Identity()
    >>> _ = old.register_forward_hook(lambda module, args, kwargs, out: -out, with_kwargs=True)
    >>> copy_hooks(new, old)
    >>> new(3)
    -3
    """
    left_out = {number for kind in kinds for number, hook in getattr(old, kind).items() if of_users and _is_ours(hook)}
    for kind in kinds:
        for number, hook in getattr(old, kind).items():
            if number not in left_out:
                getattr(new, kind)[number] = _bound(hook, new)
    own = old.__dict__.get(OWN_HOOKS)
    if own:
        new.__dict__[OWN_HOOKS] = own | new.__dict__.get(OWN_HOOKS, frozenset())
    if "_backward_hooks" in kinds and old._is_full_backward_hook is not None:
        new._is_full_backward_hook = old._is_full_backward_hook


def note_own_hooks(module: nn.Module) -> None:
    """Remember the hooks that a float module has: they belong to the model, while those that come later are tools."""
    numbers = frozenset(number for kind in ("_forward_pre_hooks", "_forward_hooks") for number in getattr(module, kind))
    if numbers:
        module.__dict__[OWN_HOOKS] = numbers


def tell_moved(module: nn.Module, where: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Say that hooks of a module get by position what its caller named.

    Args:
        where: the module's place.
        before, after: the keywords of the call as it is written, and as the hooks get them.
    """
    moved = [f"`{name}`" for name in before if name not in after]
    hooks = [
        hook
        for kind in ("_forward_pre_hooks", "_forward_hooks")
        for number, hook in getattr(module, kind).items()
        if number in getattr(module, f"{kind}_with_kwargs") and not _is_ours(hook)
    ]
    if moved and hooks:
        warn(
            f"{type(module).__name__} {where} has hooks with `with_kwargs=True`, and is called with {listed(moved)} by "
            "name: the hooks of the prepared model find it among the positional arguments, and not among the "
            "keywords. Let the hook take it from there, or call the layer by position, as in `self.conv(x)`.",
            QuantizationWarning,
        )


def drop_hooks(module: nn.Module) -> None:
    """Take all hooks from a module."""
    for kind in ALL:
        getattr(module, kind).clear()


def computes(module: nn.Module) -> bool:
    """Has a module hooks that see or change what it computes, forward or backward?"""
    return any(getattr(module, kind) for kind in (*BEFORE, *AFTER, *BACKWARD))


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps those that are called before a state dict is loaded
    return isinstance(hook, KeptHook) or str(getattr(hook, "__module__", "")).startswith("horizon_plugin_pytorch.")


def _bound(hook: Any, module: nn.Module) -> Any:
    """A hook, or what torch binds to a module before its state dict is loaded, for another module."""
    if not hasattr(hook, "with_module"):
        return hook
    return type(hook)(hook.hook, module if hook.with_module else None)
