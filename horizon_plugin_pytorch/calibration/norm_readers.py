"""Who reads the result of a norm, through what only moves its numbers, and why that lets a norm stay as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from torch import fx, nn

from horizon_plugin_pytorch.calibration.called_modules import CalledModules, Modules
from horizon_plugin_pytorch.errors import at, source_line
from horizon_plugin_pytorch.passes.inplace import asks_only, call_name
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.torch_functions import SAME_MEMORY, SAME_MEMORY_MODULES

# Functions and methods that move numbers. `pad` adds zeros, which a factor leaves as they are and a shift does not.
MOVING = SAME_MEMORY | {"clone", "roll"}
NORMS = (nn.LayerNorm, nn.RMSNorm)
SHARED = "it is called more than once, or something else reads its parameters"


def refusal(
    norm: fx.Node, called: CalledModules, takes: Callable[[fx.Node, fx.Node], bool], moving: Set[str] = MOVING
) -> str:
    """Who reads a result and is not taken by a function; empty if everything is. What moves numbers is followed.

    Args:
        takes: is given a node that reads and the node that it reads; notes it and says True if it takes it.
        moving: names of the functions and methods that only move numbers.
    """
    pending, seen = [norm], {norm}
    while pending:
        node = pending.pop()
        if not node.users:
            return "nothing in the graph reads its result"
        for user in node.users:
            if takes(user, node):
                continue
            if moves(user, called, moving) and keeps_channels(user, node):
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
            elif not asks_only(user):
                return _told(user, called.at(user))
    return ""


def _told(user: fx.Node, module: Any) -> str:
    """Who reads a result and cannot make up for a change of it."""
    if user.op == "output":
        return "its result leaves the model, or code that no graph shows reads it"
    what = f"`{user.target}` ({type(module).__name__})" if module is not None else f"`{call_name(user)}`"
    reads = f"{what} {at(notes(user).scope, source_line(user.stack_trace))} reads its result"
    if type(module) not in (nn.Linear, nn.MultiheadAttention):
        return reads
    return f"{reads}, which is shared, has no plain weight and bias, or takes other things or not all channels"


def add_others(
    model: nn.Module, graphs: Sequence[fx.Graph], modules: Modules, kept: Iterable[str], left: dict[str, str]
) -> None:
    """Say why norms stay as they are that are neither to be changed (`kept`) nor said of anything (`left`)."""
    called = {str(n.target) for graph in graphs for n in graph.nodes if n.op == "call_module"}
    reached, told = ({id(modules[path]) for path in paths} for paths in (called, {*kept, *left}))
    for path, module in model.named_modules():
        if not isinstance(module, NORMS) or id(module) in told:
            continue
        around = next((p for p in _around(path) if p in called), None)
        if id(module) in reached:
            left[path] = "other batches take another way through it or through what reads it"
        elif around is None:
            left[path] = "no batch reaches it"
        else:
            left[path] = f"it is a part of `{around}` ({type(modules[around]).__name__}), which is not looked into"


def _around(path: str) -> list[str]:
    """The paths of all modules around one."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


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
