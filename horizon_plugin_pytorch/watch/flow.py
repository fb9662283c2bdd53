"""Which call gave the tensors that another one takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from horizon_plugin_pytorch.in_place import FOLLOWERS
from horizon_plugin_pytorch.qtensor import QTensor
from horizon_plugin_pytorch.watch.operator_call import OperatorCall


class TensorNotes:
    """Notes on tensors by their identity. No tensor lives longer for it, and writes in place are followed.

    >>> import torch
    >>> notes, x = TensorNotes(), torch.ones(1)
    >>> notes[x] = "an input"
    >>> notes.get(x), notes.get(torch.ones(1))
    ('an input', None)
    """

    def __init__(self) -> None:
        self._notes = WeakIdKeyDictionary()
        FOLLOWERS.add(self)

    def __setitem__(self, x: Tensor, note: Any) -> None:
        self._notes[x] = note

    def __contains__(self, x: Tensor) -> bool:
        return x in self._notes

    def get(self, x: Tensor, default: Any = None) -> Any:
        """The note on a tensor."""
        return self._notes.get(x, default)

    def clear(self) -> None:
        """Forget all."""
        self._notes.clear()

    def follow(self, x: Tensor, other: Tensor) -> None:
        """`x` shows what `other` shows now."""
        if other in self._notes:
            self._notes[x] = self._notes[other]


def state_of(x: Tensor) -> Any:
    """What is the same as long as nobody writes to a tensor; nothing is, where torch does not count writes.

    >>> import torch
    >>> x = torch.ones(2)
    >>> before = state_of(x)
    >>> before == state_of(x), before == state_of(x.zero_())
    (True, False)
    """
    plain = x.plain() if isinstance(x, QTensor) else x
    return (id(x), plain._version) if type(plain) is Tensor and not plain.is_inference() else object()


class Flow:
    """Remembers which call of a forward gave each tensor, without keeping any.

    >>> import torch
    >>> from horizon_plugin_pytorch.watch import Watch
    >>> flow, found = Flow(), {}
    >>> def note(call):
    ...     found[call.name] = flow.producers(call.inputs)
    ...     flow.add(call)
    >>> net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
    >>> with Watch(net, note):
    ...     _ = net(torch.randn(2))
    >>> found
    {'0': [None], '1': [0]}
    """

    def __init__(self) -> None:
        self._given = TensorNotes()

    def add(self, call: OperatorCall) -> None:
        """A call gave its results. Call `producers` before: what is written in place is given anew."""
        if call.index == 0:
            self._given.clear()
        for x in call.outputs:
            self._given[x] = call.index

    def producers(self, tensors: Iterable[Tensor]) -> list[int | None]:
        """For each tensor the index of the call that gave it; None for inputs and constants of the model."""
        return [self._given.get(x) for x in tensors]
