"""Writes in place to quantized tensors, and who must not be read after one.

A quantized tensor cannot be written to: the new values have another scale. So the object that the user has becomes the
result (`become`), and whatever shows the same memory in float is stale (`sharing.py` knows who): reading it is an error
that names the write. Real values that were lent to the user's code are stale in the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch import sharing
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import UnsupportedOperatorError
from horizon_plugin_pytorch.function_handlers import calling_line, described
from horizon_plugin_pytorch.running import current, runs_unseen_code
from horizon_plugin_pytorch.torch_functions import METADATA_FUNCTIONS, REVEALING, plain_tensors
from horizon_plugin_pytorch.untraced import is_traced
from horizon_plugin_pytorch.writing import written


class TensorWithScale(Tensor):
    """A tensor that shares no memory with others, because what is written has a scale of its own."""

    def alias(self) -> TensorWithScale:
        """Another tensor object of the same values."""
        raise NotImplementedError

    def overwrite(self, other: Tensor) -> bool:
        """Take the numbers and the scale of another tensor, in the same memory; says whether that could be."""
        return False


@contextmanager
def counting_writes() -> Iterator[None]:
    """Torch counts the writes to tensors that are made in here, also where somebody uses `torch.inference_mode`."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


# What gives a view or a copy, as it finds the memory.
_AS_FOUND = frozenset("reshape flatten unflatten ravel contiguous reshape_as to cpu cuda".split())


def follow_views(func: Callable, args: tuple, out: Any, kind: type) -> None:
    """Note which results show the memory of the tensor that a function was called on.

    Args:
        kind: of tensors that are followed.
    """
    source = args[0] if args else None
    if not isinstance(source, kind):
        return
    if (
        issubclass(kind, TensorWithScale) and func is Tensor.__getitem__ and _selects_position(args[1])
    ):  # `index_select` makes it here
        sharing.join(source, out, None)
        return
    may_show = getattr(func, "__name__", "") in _AS_FOUND
    for part in (out,) if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else ():
        if isinstance(part, kind):
            sharing.follow_view(source, part, may_show)


def _selects_position(index: Any) -> bool:
    """Has an index that gives a view in float a computed position, as in ``x[:, i]``?"""
    parts = index if isinstance(index, tuple) else (index,)
    positions = [part for part in parts if isinstance(part, Tensor) and part.dim() == 0 and part.dtype != torch.bool]
    others = (part for part in parts if not any(part is position for position in positions))
    return bool(positions) and all(part is None or isinstance(part, (int, slice, type(...))) for part in others)


def become(x: Tensor, other: Tensor) -> None:
    """Let every name of `x` see `other`, as after a write in place; `other` is not to be used any more.

    >>> from horizon_plugin_pytorch.qtensor import bool_qtensor
    >>> x = torch.zeros(1)
    >>> become(x, bool_qtensor(torch.tensor([True]), is_integer=True))
    >>> type(x).__name__
    'QTensor'
    """
    # torch.utils.swap_tensors refuses tensors that a view or autograd holds; these keep the old values, as they should.
    x.__class__, other.__class__ = other.__class__, x.__class__
    x.__dict__, other.__dict__ = other.__dict__, x.__dict__
    torch._C._swap_tensor_impl(x, other)  # type: ignore[attr-defined]


FOLLOWERS: weakref.WeakSet[Any] = weakref.WeakSet()  # are told, by `follow(x, other)`, what a tensor shows now


def show(x: Tensor, other: Tensor) -> None:
    """Let every name of `x` see `other`, as after a write in place; `other` stays what it is, for who watches the run.

    >>> from horizon_plugin_pytorch.qtensor import bool_qtensor
    >>> x, other = torch.zeros(1), bool_qtensor(torch.tensor([True]), is_integer=True)
    >>> show(x, other)
    >>> type(x).__name__, type(other).__name__
    ('QTensor', 'QTensor')
    """
    become(x, other.alias() if isinstance(other, TensorWithScale) else other)
    for follower in FOLLOWERS:
        follower.follow(x, other)


def settled(func: Callable, args: tuple, kwargs: dict, out: Any) -> Any:
    """The result of a call; of one that writes in place, the tensor that it writes to, which has that value now."""
    target = written(func, args, kwargs)
    if not isinstance(target, Tensor) or not isinstance(out, Tensor) or out is target:
        return out
    if type(target) is Tensor and isinstance(out, TensorWithScale):
        require_own_memory(target, described(func))
        increment_version(target)  # what it is lent of sees that it was written to
    write(target, out, described(func), args[1] if func is Tensor.__setitem__ else ...)
    return target


def require_own_memory(x: Tensor, by: str) -> None:
    """Insist that no other tensor shows the memory of an ordinary tensor that becomes a quantized one.

    Args:
        by: the call that writes to it, with its line.

    Raises:
        UnsupportedOperatorError: where another does.
    """
    if sharing.is_shown_elsewhere(x):
        raise UnsupportedOperatorError(
            f"{by} writes quantized values into an ordinary tensor whose memory another tensor shows, which would not "
            "see them. Write to the tensor itself and not to a view, as in `x[0, :4] = y` rather than `x[0][:4] = y`, "
            "and take views of it afterwards."
        )


def write(target: Tensor, out: Tensor, by: str, index: Any = ...) -> None:
    """Give a tensor another value, which all its names see; others that show its memory in float are stale.

    Args:
        by: the call that writes, with its line.
        index: the part that it writes.
    """
    if sharing.is_same_memory(target, out):  # `x.squeeze_()` changes no value
        _require_untraced(by)
        become(target, out)
        sharing.take_place(target)
        return
    sharing.forget(out)
    settle = sharing.note_write(target, by, index, writes_back=runs_unseen_code())
    if not is_traced():
        show(target, out)
    elif not (isinstance(target, TensorWithScale) and target.overwrite(out)):
        _require_untraced(by)
    settle()


def _require_untraced(by: str) -> None:
    if is_traced():
        raise UnsupportedOperatorError(
            f"{by} writes to a quantized tensor, which `torch.jit.trace` cannot follow. Use the form that gives a new "
            "tensor; or trace what the converted model computes, which has no writes: "
            "`torch.jit.trace(record_program(model, inputs).graph_module, inputs)`."
        )


def stale_error(change: sharing.Write) -> UnsupportedOperatorError:
    """The error for who reads, now, a tensor that was changed through another one."""
    run = current()
    scope = f" at `{run.scope}`" if run is not None and run.scope else ""
    return UnsupportedOperatorError(
        f"a tensor that is read{scope}{calling_line()} was changed in place by {change.by} through another tensor that "
        "shows its memory, such as a view or the other side of a stub, which quantized tensors cannot express. Write "
        "to the tensor itself, as in `x[:, 0] = y`, or make a new one, as in `x = x + 1`."
    )


class LentValuesError(UnsupportedOperatorError):
    """A quantized tensor is read that is one in float with an ordinary tensor which was written to.

    Args:
        by: who made the one of the other, with its line.
        reader: who reads it.
    """

    def __init__(self, by: str, reader: str) -> None:
        self.by = by
        super().__init__(
            f"{reader} reads a quantized tensor that {by} turned into an ordinary one, or made of one, which was "
            "changed in place afterwards: in float both are one tensor, but a quantized tensor shares no memory with "
            "others. Change a copy (`r = self.dequant(y).clone()`), or make a new tensor, as in "
            "`r = self.dequant(y) * 2`; a change that is meant for both belongs before the stub."
        )

    def read_by(self, reader: str) -> LentValuesError:
        """The error with another reader."""
        return LentValuesError(self.by, reader)


show_at("qtensor", LentValuesError)


def reader() -> str:
    """The user's code that reads something now."""
    run = current()
    return f"The code{f' of `{run.scope}`' if run is not None and run.scope else ''}{calling_line()}"


class StaleValues(sharing.Spoiled, Tensor):
    """Real values of a quantized tensor that was changed in place since; in float they are changed as well."""

    _valid = Tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "Stale()"

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in METADATA_FUNCTIONS and func not in REVEALING:
            with plain_tensors():
                return func(*args, **kwargs or {})
        raise stale_error(next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, StaleValues))._change)
