"""Tensors that a forward makes while it is traced, and writes traced values into: ``canvas[:, :3] = x``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from horizon_plugin_pytorch.asking.stack import user_line
from horizon_plugin_pytorch.errors import TraceError
from horizon_plugin_pytorch.nested import map_tensors, tensors_of
from horizon_plugin_pytorch.qtensor import is_metadata
from horizon_plugin_pytorch.runtime.leaf import first_proxy
from horizon_plugin_pytorch.runtime.stochastic import draws
from horizon_plugin_pytorch.writing import written

Clone = Callable[[Tensor], torch.fx.Proxy]


class MadeTensors:
    """Ordinary tensors that stand for traced ones, since traced values were written into them.

    Such a tensor is a value of the graph from there on: a copy of what it was, which the graph writes to in each run.

    Args:
        clone: gives a traced copy of an ordinary tensor.
        of_model: tensors of the model. What is written into these stays there, as in float.
    """

    def __init__(self, clone: Clone, of_model: Iterable[Tensor]) -> None:
        self._clone = clone
        self._of_model = {_memory(x) for x in of_model}
        self._found: dict[Hashable, tuple[Tensor, torch.fx.Proxy, str]] = {}
        self.drawn: dict[str, None] = {}  # lines that draw random numbers
        self._new: set[Hashable] = set()  # memory that calls of the forward made
        self._outside: dict[Hashable, tuple[Tensor, str]] = {}  # other memory that it writes to, and the line

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """See whether a call writes traced values into an ordinary tensor."""
        targets = [x for x in (written(func, args, kwargs), kwargs.get("out")) if isinstance(x, Tensor)]
        for x in targets:
            if _memory(x) not in self._new and _memory(x) not in self._of_model:
                self._outside.setdefault(_memory(x), (x, user_line()))
        if targets and first_proxy((args, kwargs)) is not None:
            for x in targets:
                if _memory(x) not in self._of_model and self.traced(x) is None:
                    self._found[_memory(x)] = (x, self._clone(x), user_line())

    def note_results(self, out: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """What a call gives is made by the forward, unless it shows the memory of an argument."""
        results = {_memory(x) for x in tensors_of(out)}
        if results:
            self._new |= results.difference(_memory(x) for x in tensors_of((args, kwargs)))

    def kept(self, later: MadeTensors) -> list[tuple[Tensor, str, torch.fx.Node | None]]:
        """The tensors from outside of the forward that both this trace and a later one write to: a state of the user's.

        Each with the line that writes, and the node that stands for the tensor where that writes traced values.
        """
        both = [memory for memory in self._outside if memory in later._outside]
        return [(*self._outside[m], self._found[m][1].node if m in self._found else None) for m in both]

    @property
    def writes_outside(self) -> bool:
        """Is anything written that is neither of the model, nor known to be made by the forward?"""
        return bool(self._outside)

    def traced(self, x: Tensor) -> torch.fx.Proxy | None:
        """What a tensor stands for; None for a constant.

        Raises:
            TraceError: it shows a part of such a tensor, or the reverse; a graph has no memory that two values share.
        """
        found = self._found.get(_memory(x))
        if found is None:
            return None
        known, proxy, line = found
        if (x.shape, x.stride(), x.storage_offset(), x.dtype) != (
            known.shape, known.stride(), known.storage_offset(), known.dtype,
        ):  # fmt: skip
            raise TraceError(
                f"a tensor is read, and line {line} has written traced values into its memory through a view of it, or "
                "into the tensor that it is a view of. Write to the tensor itself, as in `x[0] = y`, and take views "
                "afterwards."
            )
        return proxy

    def stand_ins(self, values: Any) -> Any:
        """Arguments with what their tensors stand for."""
        return map_tensors(lambda x: x if (proxy := self.traced(x)) is None else proxy, values)


class TracedCalls(TorchFunctionMode):
    """Inside, calls of torch that take such a tensor are traced, and `x[...]` of an ordinary tensor is a function.

    A method ``Tensor.__getitem__`` of Python's own could not be taken back: the interpreter would take tensors for
    sequences ever after, and ``torch.tensor([x, y])`` of single numbers would fail.
    """

    def __init__(self, made: MadeTensors, subscript: Callable) -> None:
        super().__init__()
        self.made, self.subscript = made, subscript

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func) or func == _DTYPE:
            return func(*args, **kwargs)
        self.made.note(func, args, kwargs)
        if self.made and any(self.made.traced(x) is not None for x in tensors_of((args, kwargs))):
            args, kwargs = self.made.stand_ins((args, kwargs))
            return self._traced(func, args, kwargs)
        if draws(func):
            self.made.drawn[user_line()] = None
        out = self.subscript(*args) if func is torch.Tensor.__getitem__ else func(*args, **kwargs)
        self.made.note_results(out, args, kwargs)
        return out

    def _traced(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.__getitem__:
            return self.subscript(*args)
        if name == "__get__":
            return getattr(args[0], func.__self__.__name__)
        if is_tensor_method_or_property(func) and isinstance(args[0], torch.fx.Proxy):
            return getattr(args[0], name)(*args[1:], **kwargs)
        return torch.fx.Proxy.__torch_function__(func, (), args, kwargs)


_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]


def _memory(x: Tensor) -> Hashable:
    return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)  # a sparse tensor has none of its own
