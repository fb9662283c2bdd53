"""Runs of a traced model that begin in the middle, with what its nodes gave before."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen

from horizon_plugin_pytorch.nested import map_tensors
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import current_forward


@dataclass(frozen=True)
class Snapshot:
    """Where a run stood.

    Args:
        at: the number of the node that comes next.
        values: what nodes before it gave, of those that are still needed.
    """

    at: int
    values: dict[fx.Node, Any]


Before = Callable[[Callable[[], Snapshot]], None]


class ResumableGraph:
    """The nodes of a traced model, which run one by one from any of them.

    A model that keeps its own forward cannot begin in the middle: it has no nodes.

    Args:
        model: traced.

    >>> import torch
    >>> model = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Sigmoid()))
    >>> graph, found = ResumableGraph(model), []
    >>> with graph.run_from(None, before=lambda take: found.append(take())):
    ...     _ = model(torch.zeros(1))
    >>> with graph.run_from(found[1]):  # behind the ReLU, so that it does not run on this
    ...     model(torch.ones(1))
    tensor([0.5000])
    """

    def __init__(self, model: fx.GraphModule) -> None:
        self._model = model
        self._nodes = list(model.graph.nodes)
        self._signature = inspect.signature(model.forward)
        last = {source: node for node in self._nodes for source in node.all_input_nodes}
        self._dead: dict[fx.Node, list[fx.Node]] = {}  # by node, what nobody needs when it has run
        for node in self._nodes:
            self._dead.setdefault(last.get(node, node), []).append(node)

    @classmethod
    def of(cls, model: nn.Module) -> ResumableGraph | None:
        """That of a model, if it runs as its graph says."""
        if not isinstance(model, fx.GraphModule) or "forward" in model.__dict__:
            return None
        return cls(model) if type(model.graph._codegen) is CodeGen else None

    @contextmanager
    def run_from(self, start: Snapshot | None, before: Before | None = None) -> Iterator[None]:
        """Calls of the model begin at a snapshot meanwhile, whatever their arguments are.

        Args:
            start: None is the beginning.
            before: is called before every node behind the arguments, with a function that gives a snapshot there.
        """

        @functools.wraps(self._model.forward)  # `arguments_of` asks for its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(start or self._at_arguments(args, kwargs), before)

        self._model.__dict__["forward"] = forward
        try:
            yield
        finally:
            del self._model.__dict__["forward"]

    def _at_arguments(self, args: tuple, kwargs: dict[str, Any]) -> Snapshot:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        values = {node: bound.arguments[str(node.target).lstrip("*")] for node in placeholders}
        return Snapshot(0, values)

    def _run(self, start: Snapshot, before: Before | None) -> Any:
        values = start.values if start.at == 0 else _copied(start.values)
        for at in range(start.at, len(self._nodes)):
            node = self._nodes[at]
            if node.op == "placeholder":
                continue
            if before is not None:
                before(lambda at=at: Snapshot(at, _copied(values)))  # type: ignore[misc]
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return args[0]
            values[node] = self._called(node, args, kwargs)
            for dead in self._dead.get(node, ()):
                del values[dead]
        raise AssertionError("a graph ends with its output")

    def _called(self, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if node.op == "call_module":
            return self._model.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if node.op == "get_attr":
            return functools.reduce(getattr, target.split("."), self._model)
        return target(*args, **kwargs)


def _copied(values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Values that later writes in place do not reach. What shares memory, or is one tensor, does so in the copy.

    Such a write makes a QTensor another one, and its memory stays as it is.
    """
    memo: dict[int, Any] = {}
    made: dict[int, Tensor] = {}

    def one(x: Tensor) -> Tensor:
        if id(x) in made:
            return made[id(x)]
        if isinstance(x, QTensor):
            alias = made[id(x)] = x.alias()
            alias._belong(current_forward())  # an earlier forward made it, on the same batch
            return alias
        return made.setdefault(id(x), copy.deepcopy(x.detach(), memo))

    return {node: x if node.op == "get_attr" else map_tensors(one, x) for node, x in values.items()}
