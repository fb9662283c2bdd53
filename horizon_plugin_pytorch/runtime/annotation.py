"""Texts that tell what a model's outputs are.

No document defines these functions. Their names say what they do: an annotation is set on a tensor inside a model, and
read where the model's outputs are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.nested import leaves
from horizon_plugin_pytorch.runtime.leaf import leaf

_NAME = "_horizon_annotation"


@leaf
def set_annotation(tensor: Tensor, annotation: str) -> Tensor:
    """Say what a tensor is; the same tensor comes back. What is computed from it has no annotation.

    In a model, annotate its outputs after the DeQuantStub.

    >>> boxes = set_annotation(torch.zeros(2, 4), "boxes of cars")
    >>> get_output_annotation([boxes, torch.zeros(2)])
    ['boxes of cars', None]
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"set_annotation takes a tensor, got {type(tensor).__name__}; annotate each output by itself.")
    if not isinstance(annotation, str):
        raise TypeError(f"set_annotation takes a text, got {annotation!r}.")
    tensor.__dict__[_NAME] = annotation
    return tensor


def get_output_annotation(model: Any, *inputs: Any) -> list[str | None]:
    """The annotations of a model's outputs, in order; None for an output without one.

    Args:
        model: the outputs themselves, in tuples, lists and dicts; or a model.
        inputs: the model's arguments, on which it is run; a model that was traced (`prepare_qat_fx`, `convert_fx`)
            needs none.

    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return {"score": set_annotation(x + 1, "of a car"), "rest": x}
    >>> get_output_annotation(Net(), torch.zeros(1)), get_output_annotation(Net()(torch.zeros(1)))
    (['of a car', None], ['of a car', None])
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "get_output_annotation: TorchScript keeps no annotations. Give it the model that was traced, and its "
            "arguments."
        )
    if not isinstance(model, nn.Module):
        return [getattr(x, "__dict__", {}).get(_NAME) for x in leaves((model, *inputs)) if isinstance(x, Tensor)]
    if inputs:
        with torch.no_grad():
            return get_output_annotation(model(*inputs))
    if isinstance(model, fx.GraphModule):
        return _of_graph(model)
    raise TypeError(
        f"get_output_annotation: `{type(model).__name__}` is known by running it: give its arguments too, or what it "
        "gives, `get_output_annotation(model(x))`."
    )


def _of_graph(model: fx.GraphModule) -> list[str | None]:
    found: list[str | None] = []

    def look(node: fx.Node) -> fx.Node:
        is_set = node.op == "call_function" and node.target is set_annotation
        given = (*node.args, *node.kwargs.values())
        found.append(str(given[1]) if is_set else None)
        return node

    output = next(node for node in model.graph.nodes if node.op == "output")
    fx.node.map_arg(output.args, look)
    return found


show_at("annotation", set_annotation, get_output_annotation)
