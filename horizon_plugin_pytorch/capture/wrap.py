"""Marking code that symbolic trace must not look into."""

from __future__ import annotations

import builtins
import inspect
from typing import Any

from torch import nn

from horizon_plugin_pytorch.asking.stack import caller_globals
from horizon_plugin_pytorch.capture.leaves import add_leaf_class
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.runtime.leaf import leaf


def wrap(obj: Any = None, skip_compile: bool = False) -> Any:
    """Make a function, a method or a module class a leaf of symbolic trace: recorded as one call, run as it is.

    Use it as ``@wrap()`` or ``@wrap`` on any of these, as ``decode = wrap(decode)``, or at module level as
    ``wrap("decode")``, which replaces the name in that module. The other methods of a module class become leaves too.

    Args:
        obj: what to mark; None gives a decorator.
        skip_compile: accepted for compatibility; nothing is compiled here.

    >>> @wrap()
    ... class Decode(nn.Module):
    ...     pass
    """
    if obj is None or isinstance(obj, bool):
        return wrap
    if isinstance(obj, str):
        return _wrap_name(obj, caller_globals())
    if isinstance(obj, type) and issubclass(obj, nn.Module):
        for name, member in list(vars(obj).items()):
            if inspect.isfunction(member) and name != "forward" and not name.startswith("__"):
                setattr(obj, name, leaf(member))
        add_leaf_class(obj)
        return obj
    if callable(obj) and not isinstance(obj, type):
        return leaf(obj)
    raise TypeError(f"wrap takes a function, a method, a subclass of torch.nn.Module or a name, not {obj!r}.")


def _wrap_name(name: str, module: dict[str, Any]) -> Any:
    found = module.get(name, getattr(builtins, name, None))
    if found is None:
        raise NameError(f'wrap("{name}"): `{module.get("__name__")}` has no such name. Call it below the definition.')
    module[name] = wrap(found)
    return module[name]


show_at("fx.fx_helper", wrap)
