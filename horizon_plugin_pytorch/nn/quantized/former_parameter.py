"""Parameters of converted layers as the user's forward reads them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.torch_functions import plain_tensors

_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class FormerParameter(Tensor):
    """The numbers of what was a parameter that trains, without a gradient.

    A forward that asks ``if self.conv.weight.requires_grad`` must take the branch that it took before conversion. All
    else is as with ordinary tensors, and gives such: results want no gradient, which nobody could give them.

    >>> import torch
    >>> weight = FormerParameter.of(torch.ones(2))
    >>> weight.requires_grad, (weight * 2).requires_grad
    (True, False)
    """

    hands_over = True  # beside a QTensor it is an ordinary tensor

    @classmethod
    def of(cls, numbers: Tensor) -> FormerParameter:
        """A tensor in the same memory."""
        return numbers.detach().as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == _REQUIRES_GRAD:
            return True
        args, kwargs = pytree.tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def _plain(x: Any) -> Any:
    if not isinstance(x, FormerParameter):
        return x
    with plain_tensors():
        return x.as_subclass(Tensor)
