"""Calls that only training makes and that depend on random numbers: stochastic depth, noise, random masks.

They are not deployed, so they have no integer form and no scale of their own: like dropout they compute on real values,
and the result keeps the scale of the quantized tensor it was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.errors import UnsupportedOperatorError, source_line
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.runtime.call_site import Variant
from horizon_plugin_pytorch.runtime.node_notes import notes

BY_CHANCE = Variant("", "by_chance", {})  # in place of a module, at the call sites of such calls
# Functions and tensor methods that draw random numbers.
_RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ uniform_ normal normal_ "
    "log_normal_ cauchy_ exponential_ geometric_ random_ poisson multinomial".split()
)


def mark_stochastic(graph: fx.Graph) -> None:
    """Mark calls (`Notes.is_stochastic`) that only the training run made, if random numbers are among their operands.

    What they alone read belongs to them: the division in ``x.div(keep) * mask``.
    """
    drawn: set[fx.Node] = set()
    for node in graph.nodes:
        is_draw = _name(node) in _RANDOM
        if is_draw or (_is_training_call(node) and any(source in drawn for source in node.all_input_nodes)):
            drawn.add(node)
    found = {node for node in drawn if _is_training_call(node) and _name(node) not in _RANDOM}
    for node in reversed(graph.nodes):
        readers = [user for user in node.users if user.op != "output"]
        if readers and _is_training_call(node) and all(user in found for user in readers):
            found.add(node)
    deployed = {notes(node).site for node in graph.nodes if node not in found}
    for node in found:
        notes(node).is_stochastic = notes(node).site not in deployed


def refuse_stochastic(graph: fx.Graph, is_quantized: Callable[[fx.Node], bool]) -> None:
    """In a traced graph random numbers would stay, also in eval mode: an error that names the line.

    Raises:
        UnsupportedOperatorError: where the quantized part reads random numbers.
    """
    drawn: set[fx.Node] = set()
    for node in graph.nodes:
        reads = [source for source in node.all_input_nodes if source in drawn]
        if reads and is_quantized(node):
            raise UnsupportedOperatorError(
                f"`{_name(node) or node.target}` ({source_line(node.stack_trace)}) computes with random numbers, which "
                "a traced model would draw in eval mode too. Stochastic depth (DropPath) is not there in a model that "
                "is traced in eval mode: call `model.eval()` before, or use `prepare`, whose models follow `train()` "
                "and `eval()`."
            )
        if reads or _name(node) in _RANDOM:
            drawn.add(node)


def by_chance(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function on real values; tensors of real numbers keep the scale of its first quantized operand."""
    source = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, QTensor))
    values = pytree.tree_map(lambda v: v.as_real() if isinstance(v, QTensor) else v, (args, kwargs))
    out = func(*values[0], **values[1])
    return pytree.tree_map(lambda v: source.unrounded(v) if isinstance(v, Tensor) and v.is_floating_point() else v, out)


def _is_training_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and notes(node).is_training_only


def draws(function: Callable) -> bool:
    """Does a function of torch draw random numbers?"""
    return getattr(function, "__name__", "") in _RANDOM


def is_draw(node: fx.Node) -> bool:
    """Does a node draw random numbers?"""
    return _name(node) in _RANDOM


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)) if node.op != "call_module" else ""
