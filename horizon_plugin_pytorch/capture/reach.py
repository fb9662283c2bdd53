"""The modules that a function of the user's may call, as its code names them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

from horizon_plugin_pytorch.asking.functions import is_user_function, names_in

# Names that stand for any child: `for layer in self.children()`, `getattr(self, name)`.
_ANY = frozenset("children named_children modules named_modules get_submodule getattr _modules __dict__ vars".split())


def modules_named_by(function: Any, owner: nn.Module, is_certain: bool = False) -> list[nn.Module]:
    """Children of `owner` that a function, or one that it calls, names; with all that is inside them.

    What a function does is not known before it runs. It names the modules that it calls: ``self.conv(x)``.

    Args:
        is_certain: leave out those that it may find in other ways, as ``self.children()``.
    """
    found: dict[int, nn.Module] = {}
    pending, seen = [function], set()
    while pending:
        here = inspect.unwrap(pending.pop())
        here = getattr(here, "__func__", here)
        here = getattr(here, "func", here)  # functools.partial
        if not isinstance(here, FunctionType) or here in seen or not is_user_function(here):
            continue
        seen.add(here)
        names = names_in(here)
        if names & _ANY and not is_certain:
            found.update((id(child), child) for child in owner.children())
        for name in names:
            value = _attribute(owner, name)
            found.update((id(module), module) for module in _modules_in(value))
            pending += [v for v in (value, here.__globals__.get(name)) if callable(v) and not isinstance(v, nn.Module)]
        pending += [cell.cell_contents for cell in here.__closure__ or () if _is_function(cell)]
    inside = {id(m): m for module in found.values() for m in module.modules() if m is not owner}
    return list(inside.values())


def _is_function(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionType)
    except ValueError:  # not set yet
        return False


def _attribute(owner: nn.Module, name: str) -> Any:
    """An attribute of a module; properties are given as their functions, and nothing is run."""
    for known in (owner._modules, owner.__dict__):
        if name in known:
            return known[name]
    source = owner.__dict__.get("_source_class") or type(owner)  # of a graph module, the class of the user's model
    member = inspect.getattr_static(source, name, None)
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return member if isinstance(member, FunctionType) else None


def _modules_in(value: Any) -> Iterator[nn.Module]:
    """Modules in an attribute: itself, or those of a list or dictionary."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _modules_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _modules_in(part)
