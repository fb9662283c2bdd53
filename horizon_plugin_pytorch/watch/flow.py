"""Which call gave the tensors that another one takes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from horizon_plugin_pytorch.watch.operator_call import OperatorCall


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
        self._given = WeakIdKeyDictionary()

    def add(self, call: OperatorCall) -> None:
        """A call gave its results. Call `producers` before: what is written in place is given anew."""
        if call.index == 0:
            self._given.clear()
        for x in call.outputs:
            self._given[x] = call.index

    def producers(self, tensors: Iterable[Tensor]) -> list[int | None]:
        """For each tensor the index of the call that gave it; None for inputs and constants of the model."""
        return [self._given.get(x) for x in tensors]
