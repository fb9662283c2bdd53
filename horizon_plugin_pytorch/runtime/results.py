"""What a model takes and gives."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from horizon_plugin_pytorch.nested import map_tensors


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """``|found - wanted| / |wanted|`` (L2 norms); infinite for other shapes, and for NaN or infinity in other places.

    >>> import torch
    >>> relative_error(torch.tensor([3.0, 5.0, math.inf]), torch.tensor([3.0, 4.0, math.inf]))
    0.2
    """
    if found.shape != wanted.shape:
        return math.inf
    is_same = (found == wanted) | ((found != found) & (wanted != wanted))
    difference = torch.where(is_same, 0, found.double() - wanted.double()).norm()
    size = torch.where(wanted.isfinite(), wanted, 0).double().norm().clamp(min=1e-30)
    return float((difference / size).nan_to_num(math.inf))


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
