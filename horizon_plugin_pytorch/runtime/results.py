"""What a model takes and gives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from horizon_plugin_pytorch.nested import map_tensors


def own_tensors(tree: Any) -> Any:
    """The same arguments with tensors of their own: a forward may write to what it is given.

    >>> import torch
    >>> x = torch.zeros(1)
    >>> own_tensors((x,))[0].add_(1), x
    (tensor([1.]), tensor([0.]))
    """
    made: dict[int, Tensor] = {}

    def own(x: Any) -> Any:
        if type(x) is not Tensor:
            return x
        if id(x) not in made:
            made[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return made[id(x)]

    return map_tensors(own, tree)
