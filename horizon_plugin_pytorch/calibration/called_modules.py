"""The modules that graphs of a model call, and which of them may be rewritten without anybody else noticing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn


class Group(Hashable, Protocol):
    """Modules that are rewritten together."""

    @property
    def modules(self) -> set[str]:
        """The paths of all of them."""


G = TypeVar("G", bound=Group)
Modules = Mapping[str, Any]


class CalledModules:
    """The modules that one graph calls.

    Args:
        modules: what the graph may call, by path.
        weights: who reads the parameters of the model, in all of its graphs.
    """

    def __init__(self, modules: Modules, graph: fx.Graph, weights: WeightReaders) -> None:
        self.graph, self._weights, self._modules = graph, weights, modules
        self.paths = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        self._calls = Counter(id(self.at(node)) for node in graph.nodes if node.op == "call_module")

    def at(self, node: fx.Node) -> Any:
        """The module that a node calls; None if it calls something else."""
        return self._modules[str(node.target)] if node.op == "call_module" else None

    def is_own(self, module: nn.Module) -> bool:
        """Is a module called once, and does nobody else read its parameters, or those of its parts?"""
        return self._calls[id(module)] == 1 and all(map(self._weights.is_alone, module.modules()))


class WeightReaders:
    """How many modules, other attributes and calls of functions have the memory of a parameter."""

    def __init__(self, model: nn.Module, graphs: Sequence[fx.Graph]) -> None:
        modules = model.modules()
        owners = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values(), *vars(m).values())]
        memory = {path: _memory(t) for path, t in (*model.named_parameters(), *model.named_buffers())}
        reads = {str(n.target) for graph in graphs for n in graph.nodes if n.op == "get_attr"}
        owned = [_memory(t) for t in owners if isinstance(t, Tensor)]
        self._counts = Counter(owned + [memory[p] for p in reads if p in memory])

    def is_alone(self, module: nn.Module) -> bool:
        """Does nobody else read the parameters of a module?"""
        return all(self._counts[_memory(p)] == 1 for p in module._parameters.values() if p is not None)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)


def found_in_all(
    model: nn.Module, graphs: Sequence[fx.Graph], modules: Modules, find: Callable[[CalledModules], Iterable[G]]
) -> list[G]:
    """The groups that are there in each of the graphs that call any of their modules.

    Args:
        model: whose parameters are to be rewritten.
        graphs: recorded on several inputs, which may take different ways through the model.
        modules: what the graphs call, by path.
        find: the groups of one graph.
    """
    weights = WeightReaders(model, graphs)
    every = [CalledModules(modules, graph, weights) for graph in graphs]
    found = [dict.fromkeys(find(called)) for called in every]
    return [
        group
        for group in dict.fromkeys(group for groups in found for group in groups)
        if all(group in groups or not group.modules & called.paths for groups, called in zip(found, every, strict=True))
    ]
