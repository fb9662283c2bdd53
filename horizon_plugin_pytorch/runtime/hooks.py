"""Hooks that are pickled with their module, and hooks that go with a module's place to another module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from horizon_plugin_pytorch.asking.who import OWN_HOOKS
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


def forward_of(module: nn.Module) -> tuple:
    """What a call of a module runs, to compare with later: the forward of its class, and hooks.

    A forward of its own is among its attributes.
    """
    return type(module).forward, dict(module._forward_pre_hooks), dict(module._forward_hooks)


def drop_kept(module: nn.Module, function: Callable[..., Any]) -> None:
    """Take the hooks that `keep` registered for a function from a module that does without."""
    hooks = [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
    for number in [n for n, hook in hooks if isinstance(hook, KeptHook) and hook.function is function]:
        for kind in (*BEFORE, *AFTER):
            getattr(module, kind).pop(number, None)


class EveryCall:
    """A hook on the calls of all modules, that is gone when it is removed.

    torch 2.13 keeps a mark of each one that took arguments by name, and goes its long way through all modules as long
    as there is one.

    Args:
        hook: ``hook(module, args, kwargs, out)``, called also for a module that raises, if `always_call`.
    """

    def __init__(self, hook: Callable[..., Any], always_call: bool = False) -> None:
        self._handle = torch_module.register_module_forward_hook(
            hook,
            with_kwargs=True,
            always_call=always_call,  # type: ignore[call-arg]
        )

    def remove(self) -> None:
        """Calls are no longer seen."""
        self._handle.remove()
        getattr(torch_module, "_global_forward_hooks_with_kwargs", {}).pop(self._handle.id, None)


def is_any_everywhere() -> bool:
    """Are there hooks on the calls of all modules? A mark that one left behind is none."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


# Attributes of a module: names of arguments that hooks find by name, in the call of a graph or in the one that runs.
BY_NAME, NAMED_NOW = "_arguments_by_name", "_arguments_named_now"
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
    skipped = {number for kind in kinds for number, hook in getattr(old, kind).items() if of_users and _is_ours(hook)}
    for kind in kinds:
        for number, hook in getattr(old, kind).items():
            if number not in skipped:
                getattr(new, kind)[number] = _bound(hook, new)
    own = old.__dict__.get(OWN_HOOKS)
    if own:
        new.__dict__[OWN_HOOKS] = own | new.__dict__.get(OWN_HOOKS, frozenset())
    if BY_NAME in old.__dict__:
        new.__dict__[BY_NAME] = old.__dict__[BY_NAME]
    if "_backward_hooks" in kinds and old._is_full_backward_hook is not None:
        new._is_full_backward_hook = old._is_full_backward_hook


def note_own_hooks(module: nn.Module) -> None:
    """Remember the hooks that a float module has: they belong to the model, while those that come later are tools."""
    numbers = frozenset(number for kind in ("_forward_pre_hooks", "_forward_hooks") for number in getattr(module, kind))
    if numbers:
        module.__dict__[OWN_HOOKS] = numbers


class NamedHook:
    """A hook ``with_kwargs`` of the model's, which finds arguments by the names that the forward gives them.

    Layers get what they require by position. The module has the names of what was named.

    Args:
        function: the hook.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], *out: Any) -> Any:
        names = module.__dict__.get(NAMED_NOW) or module.__dict__.get(BY_NAME, ())
        if not names or len(args) < len(names):
            return self.function(module, args, kwargs, *out)
        first = len(args) - len(names)
        given = self.function(module, args[:first], dict(zip(names, args[first:], strict=True)) | kwargs, *out)
        if out or not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], dict):
            return given
        args, kwargs = given[0], dict(given[1])
        return (*args, *(kwargs.pop(name) for name in names if name in kwargs)), kwargs


def keep_names(module: nn.Module, where: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Let hooks of a module find by name what its caller named; those of tools are told that they do not.

    Args:
        where: the module's place.
        before, after: the keywords of the call as it is written, and as the module gets them.

    Returns:
        The names of arguments that the module gets by position, if it has such hooks.
    """
    moved = tuple(name for name in before if name not in after)
    own, others = module.__dict__.get(OWN_HOOKS, ()), False
    for kind in ("_forward_pre_hooks", "_forward_hooks") if moved else ():
        hooks = getattr(module, kind)
        for number in getattr(module, f"{kind}_with_kwargs"):
            hook = hooks.get(number)
            if hook is None or isinstance(hook, NamedHook) or _is_ours(hook):
                continue
            if number in own:
                hooks[number] = NamedHook(hook)
            else:
                others = True
    if others:
        warn(
            f"{type(module).__name__} {where} has hooks with `with_kwargs=True` that were registered after it was "
            f"prepared, and is called with {listed(f'`{name}`' for name in moved)} by name: these hooks find it among "
            "the positional arguments, and not among the keywords. Let the hook take it from there, or register it "
            "before the model is prepared.",
            QuantizationWarning,
        )
    return moved


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
