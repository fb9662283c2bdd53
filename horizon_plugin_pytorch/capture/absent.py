"""Arguments that may be left out: what a traced forward would have done without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx
from torch import nn

from horizon_plugin_pytorch.capture.given import Arguments, Place
from horizon_plugin_pytorch.errors import QuantizationWarning, source_line, warn

Traced = Callable[[nn.Module, Arguments], tuple[Any, torch.fx.Graph]]


def tell_absent(model: nn.Module, absent: Iterable[str], where: str) -> None:
    """Say that arguments count as left out, since the forward cannot be followed with them."""
    shown = ", ".join(f"`{name}`" for name in absent)
    warn(
        f"`{type(model).__name__}` is traced as if {shown} were left out: with them given symbolic trace cannot follow "
        f"it{f' at {where}' if where else ''}, and there are no example_inputs to say how it is called. A call that "
        "gives them is refused. Prepare with example_inputs, or by running the model (`PrepareMethod.JIT_STRIP`).",
        QuantizationWarning,
    )


def follow_absent(model: nn.Module, arguments: Arguments, graph: torch.fx.Graph, traced: Traced) -> None:
    """Find the arguments that were taken as given, and without which the forward would have done something else.

    Whether code asks ``mask is None`` cannot be seen; that it does something else can.

    Args:
        graph: of the model with all of them given.
        traced: traces the model.
    """
    optional = () if arguments.has_example else tuple(arguments.optional)
    groups = [frozenset((name,)) for name in optional]
    if len(optional) > 1:
        groups.append(frozenset(optional))
    told: set[str] = set()
    for absent in groups:
        if absent <= told:
            continue
        line = _difference(model, graph, absent, traced)
        for name in sorted(absent) if line is not None else ():
            arguments.guard.rely(Place(name), "given", True, None, str(line))
        told |= absent if line else frozenset()
    if told:
        shown = ", ".join(f"`{name}`" for name in sorted(told))
        facts = arguments.guard.facts.values()
        lines = ", ".join(sorted({fact.line for fact in facts if fact.question == "given" and fact.line}))
        warn(
            f"`{type(model).__name__}` is traced as if {shown} were given, and its forward does something else "
            f"without ({lines}). A call that leaves it out is refused. Prepare with example_inputs like the calls to "
            "come, or by running the model (`PrepareMethod.JIT_STRIP`).",
            QuantizationWarning,
        )


def _difference(model: nn.Module, graph: torch.fx.Graph, absent: frozenset[str], traced: Traced) -> str | None:
    """A line that runs only with or only without some arguments; None if there is no such line."""
    without = _steps_of(model, absent, absent, traced)
    line = None if without is None else first_difference(steps(graph, absent), without)
    if without is None or line is None:
        return "" if without is None else None
    # The forward may keep something, so that the order of traces matters.
    again = _steps_of(model, frozenset(), absent, traced)
    return line if again is None else first_difference(again, without)


def _steps_of(
    model: nn.Module, absent: frozenset[str], hidden: frozenset[str], traced: Traced
) -> list[tuple[Any, str]] | None:
    """What a trace of the model does; None if it cannot be traced so."""
    try:
        return trace_steps(model, Arguments(model, None, absent), traced, hidden)
    except Exception:
        return None


def trace_steps(
    model: nn.Module, arguments: Arguments, traced: Traced, hidden: frozenset[str] = frozenset()
) -> list[tuple[Any, str]]:
    """What another trace of the model does. The model stays as it is."""
    constants = set(model._buffers) | set(vars(model))
    try:
        return steps(traced(model, arguments)[1], hidden)
    finally:
        for name in [n for n in (*model._buffers, *vars(model)) if n.startswith("_tensor_constant")]:
            if name not in constants:
                delattr(model, name)


def steps(graph: torch.fx.Graph, hidden: frozenset[str] = frozenset()) -> list[tuple[Any, str]]:
    """The calls of a graph in a form that can be compared, with their lines; hidden inputs count as None."""
    found: dict[torch.fx.Node, Any] = {}
    calls: list[tuple[Any, str]] = []

    def refer(value: Any) -> Any:
        return torch.fx.node.map_arg(value, lambda node: found[node])

    for node in graph.nodes:
        name = str(node.target).lstrip("*")
        if node.op == "placeholder":
            found[node] = None if name in hidden else f"%{name}"
            continue
        is_constant = node.op == "get_attr" and name.startswith("_tensor_constant")
        target = "_tensor_constant" if is_constant else node.target
        calls.append(((node.op, target, refer(node.args), refer(node.kwargs)), source_line(node.stack_trace)))
        found[node] = f"%{len(calls)}"
    return calls


def first_difference(one: list[tuple[Any, str]], other: list[tuple[Any, str]]) -> str | None:
    """The line of the first call in which two lists of them differ; None if they are alike."""
    for (step, line), (other_step, other_line) in zip(one, other, strict=False):
        if step != other_step:
            lines = (
                (other_line, line) if step[0] == "output" else (line, other_line)
            )  # an output has no line of its own
            return lines[0] or lines[1]
    longer = max(one, other, key=len)
    return None if len(one) == len(other) else longer[min(len(one), len(other))][1]
