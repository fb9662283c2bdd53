"""The calls of a forward without their tensors."""

from __future__ import annotations

from typing import Any

from torch import nn

from horizon_plugin_pytorch.nested import tensors_of
from horizon_plugin_pytorch.watch.flow import Flow
from horizon_plugin_pytorch.watch.operator_call import OperatorCall
from horizon_plugin_pytorch.watch.watch import Watch


class CallLog:
    """Keeps the calls of the last forward that it was told of, without their tensors.

    Args:
        model: whose calls they are.

    Attributes:
        calls: in the order of the run.
        producers: for each call the calls, by index, that gave its inputs; None for inputs and constants of the model.
        returned: the calls that gave what the model returned, as far as `end` was told.

    >>> import torch
    >>> net = nn.Sequential(nn.ReLU(), nn.Sigmoid())
    >>> log = CallLog.of(net, torch.ones(2))
    >>> [call.name for call in log.calls], log.producers, log.returned
    (['0', '1'], [[None], [0]], [1])
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[OperatorCall] = []
        self.producers: list[list[int | None]] = []
        self.returned: list[int] = []
        self._flow = Flow()

    @classmethod
    def of(cls, model: nn.Module, *args: Any, **kwargs: Any) -> CallLog:
        """The calls of one forward."""
        log = cls(model)
        with Watch(model, log):
            log.end(model(*args, **kwargs))
        return log

    def __call__(self, call: OperatorCall) -> None:
        if call.index == 0:
            self.calls, self.producers, self.returned = [], [], []
        self.producers.append(self._flow.producers(call.inputs))
        self._flow.add(call)
        self.calls.append(call.released())

    def end(self, out: Any) -> None:
        """The forward has returned."""
        found = self._flow.producers(tensors_of(out))
        self.returned = sorted({index for index in found if index is not None})
