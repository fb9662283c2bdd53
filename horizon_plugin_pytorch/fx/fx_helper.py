"""Marking code that symbolic trace must not look into."""

from __future__ import annotations

import functools
from typing import Any

import torch.fx
from torch import nn

from horizon_plugin_pytorch.fx.tracer import add_leaf_class


def wrap(obj: Any = None, skip_compile: bool = False) -> Any:
    """Make a function or a module class a leaf of symbolic trace.

    Use it as ``@wrap()``, ``@wrap`` or ``wrap("name")`` at module level.

    >>> @wrap()
    ... class Decode(nn.Module):
    ...     pass
    """
    if obj is None or isinstance(obj, bool):
        return lambda real: wrap(real, skip_compile)
    if isinstance(obj, type) and issubclass(obj, nn.Module):
        add_leaf_class(obj)
        return obj
    if callable(obj):
        return _leaf_function(obj)
    return torch.fx.wrap(obj)


def _leaf_function(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        proxies = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.fx.Proxy)]
        if proxies:
            return proxies[0].tracer.create_proxy("call_function", call, args, kwargs)
        return function(*args, **kwargs)

    call.__horizon_leaf__ = True  # type: ignore[attr-defined]
    return call
