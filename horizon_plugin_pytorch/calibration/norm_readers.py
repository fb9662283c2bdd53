"""Who reads the result of a norm, through what only moves its numbers."""

from __future__ import annotations

from collections.abc import Callable, Set

from torch import fx

from horizon_plugin_pytorch.calibration.called_modules import CalledModules
from horizon_plugin_pytorch.passes.inplace import asks_only, call_name
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.torch_functions import SAME_MEMORY, SAME_MEMORY_MODULES

# Functions and methods that move numbers. `pad` adds zeros, which a factor leaves as they are and a shift does not.
MOVING = SAME_MEMORY | {"clone", "roll"}


def all_taken(
    norm: fx.Node, called: CalledModules, takes: Callable[[fx.Node, fx.Node], bool], moving: Set[str] = MOVING
) -> bool:
    """Is everything that reads a result taken by a function? What moves numbers is followed to those that read it.

    Args:
        takes: is given a node that reads and the node that it reads; notes it and says True if it takes it.
        moving: names of the functions and methods that only move numbers.
    """
    pending, seen = [norm], {norm}
    while pending:
        node = pending.pop()
        if not node.users:
            return False  # it is an output of the model, or nobody needs it
        for user in node.users:
            if takes(user, node):
                continue
            if moves(user, called, moving) and keeps_channels(user, node):
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
            elif not asks_only(user):
                return False
    return True


def moves(node: fx.Node, called: CalledModules, moving: Set[str] = MOVING) -> bool:
    """Does a node give the numbers that it gets, at other places at the most?"""
    module = called.at(node)
    return isinstance(module, SAME_MEMORY_MODULES) if module is not None else call_name(node) in moving


def is_self_attention(attention: fx.Node, source: fx.Node) -> bool:
    """Are query, key and value of a call of attention one tensor?"""
    given = dict(zip(("query", "key", "value"), attention.args, strict=False)) | attention.kwargs
    return all(given.get(name) is source for name in ("query", "key", "value"))


def keeps_channels(node: fx.Node, source: fx.Node) -> bool:
    """Is the last axis still there? Whether it has the same channels is seen when the norm is tried."""
    before, after = notes(source).shape, notes(node).shape
    return after is None or before is None or (bool(after) and after[-1] == before[-1])
