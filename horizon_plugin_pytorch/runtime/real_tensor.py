"""Float16 and high-precision results inside a model that runs its own forward: functions on them have modules, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.in_place import follow_views, stale_error
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.running import interceptor
from horizon_plugin_pytorch.sharing import Spoiled, Write
from horizon_plugin_pytorch.torch_functions import is_metadata, plain_tensors, reads_no_numbers


class RealTensor(Tensor):
    """A result of the quantized part that has no scale, until a DeQuantStub takes it.

    Functions on it are sent to the modules made for them, as functions on QTensors are: code that was not met when the
    model was prepared must not run in float unnoticed.
    """

    _plain: Tensor  # the tensor that is marked
    hands_over = True  # beside a QTensor it is an ordinary tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        model = interceptor()
        if model is not None:
            out = model(func, args, kwargs)
            if out is not NotImplemented:
                return out
        if any(issubclass(t, QTensor) for t in types):  # which knows its numbers; its memory holds integers, or nothing
            return func(*unmarked(args), **unmarked(kwargs))
        with plain_tensors():
            out = func(*args, **kwargs)
        if model is None or reads_no_numbers(func, args, RealTensor):
            return out
        if any(isinstance(x, Tensor) and x.is_floating_point() for x in pytree.tree_leaves(out)):
            model.require_met(func, args, kwargs)
        out = marked(out)
        follow_views(func, args, out, RealTensor)
        return out

    def spoil(self, change: Write) -> None:
        """Refuse readers from now on: a write changed this tensor through another one."""
        _Stale.make_of(self, change)


class _Stale(Spoiled, RealTensor):
    """Such a tensor that was changed through another one; reading it is an error."""

    _valid = RealTensor

    @property
    def _plain(self) -> Tensor:  # type: ignore[override]
        raise stale_error(self._change)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if is_metadata(func):
            with plain_tensors():
                return func(*args, **kwargs or {})
        x = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Stale))
        if func is Tensor.__setitem__ and x is args[0] and x.is_written_back(*args[1:]):
            return x.assign_back(*args[1:])
        raise stale_error(x._change)


class RealOutput(Tensor):
    """Real numbers that leave a model in high precision, without a DeQuantStub, while it trains.

    An output of another layer would be a QTensor there, and code that trains the model says ``out.dequantize()``; of an
    ordinary tensor torch has no gradient for that. All else is as with ordinary tensors, and gives such.

    >>> x = as_output(torch.ones(1, requires_grad=True) * 2)
    >>> x.dequantize()
    tensor([2.], grad_fn=<AliasBackward0>)
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dequantize(self) -> Tensor:
        """The same numbers, as an ordinary tensor."""
        return self.as_subclass(Tensor)


def as_output(tree: Any) -> Any:
    """Results of the quantized part as the caller of a model takes them: ordinary tensors, or a `RealOutput`."""
    return pytree.tree_map(_as_output, unmarked(tree))


def _as_output(x: Any) -> Any:
    is_trained = type(x) is Tensor and x.is_floating_point() and x.requires_grad and not x.is_leaf
    return x.as_subclass(RealOutput) if is_trained else x


def outputs(tree: Any) -> Any:
    """What a model gives: what is marked as a result of the quantized part leaves as `RealOutput`."""
    if not _has_mark(tree):
        return tree
    return pytree.tree_map(lambda x: as_output(x) if isinstance(x, RealTensor) else x, tree)


def marked(tree: Any) -> Any:
    """Float tensors as results of the quantized part."""
    return pytree.tree_map(_marked, tree)


def _marked(x: Any) -> Any:
    if type(x) is not Tensor or not x.is_floating_point():
        return x
    out = x.as_subclass(RealTensor)
    out.__dict__.update(x.__dict__)  # what others note on the tensor
    out._plain = x
    return out


def unmarked(tree: Any) -> Any:
    """Results of the quantized part as ordinary tensors; a result that is marked again and again stays one object."""
    if not _has_mark(tree):  # as in most calls; to build the tree again costs more than a small operator
        return tree
    return pytree.tree_map(lambda x: x._plain if isinstance(x, RealTensor) else x, tree)


def _has_mark(tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return isinstance(tree, RealTensor)
    if isinstance(tree, (tuple, list)):
        return any(map(_has_mark, tree))
    if isinstance(tree, dict):
        return any(map(_has_mark, tree.values()))
    return not pytree.tree_is_leaf(tree)  # a structure of the user's
