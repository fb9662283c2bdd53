"""Graph modules that keep the attributes of the model they were made from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

_INTERNAL = {"training", "_graph", "_code", "meta", "_tracer_cls", "_tracer_extras", "_is_full_backward_hook"}


class GraphModuleWithAttr(torch.fx.GraphModule):
    """A `torch.fx.GraphModule` with the plain attributes of the original model."""

    def __init__(self, root: Any, graph: torch.fx.Graph, class_name: str = "GraphModule") -> None:
        super().__init__(root, graph, class_name)
        if isinstance(root, nn.Module):
            self._take_attributes(root)
            self.train(root.training)

    def _take_attributes(self, source: nn.Module) -> None:
        for name, value in source.__dict__.items():
            if name not in self.__dict__ and name not in _INTERNAL and not name.startswith("_"):
                self.__dict__[name] = value

    def __deepcopy__(self, memo: dict) -> Any:
        out = super().__deepcopy__(memo)
        for name, value in self.__dict__.items():
            if name not in out.__dict__:
                out.__dict__[name] = copy.deepcopy(value, memo)
        out.training = self.training
        return out


class ObservedGraphModule(GraphModuleWithAttr):
    """A prepared model: observers and fake quantizers are in place."""


class QuantizedGraphModule(GraphModuleWithAttr):
    """A converted model: integers only between Quantize and DeQuantize."""
