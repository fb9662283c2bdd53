"""Runs of a model that a tool watches: in eval mode, on a device of choice, with nothing of the model changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.asking.stack import error_line
from horizon_plugin_pytorch.errors import CheckError, at
from horizon_plugin_pytorch.fake_quant.states import frozen_scales
from horizon_plugin_pytorch.nested import map_tensors
from horizon_plugin_pytorch.nn.qat.composite import hidden_parts
from horizon_plugin_pytorch.nn.transformer import hides_operators, plain_transformers
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.watch.undisturbed import undisturbed
from horizon_plugin_pytorch.watch.watch import Consumer, Watch


class WatchedRun:
    """A model with its inputs, ready to run as often as is wanted.

    Args:
        inputs: the model's arguments, as `prepare` takes them.
        device: where to run; None leaves model and inputs where they are. A model that is elsewhere is copied.
        who: the tool that was asked, for messages.
        infer: runs a model on inputs, ``infer(model, inputs)``; None calls it with them.

    Attributes:
        model, inputs: where they run.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        device: torch.device | str | None,
        who: str,
        infer: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._who, self._infer = who, infer
        if device is not None:
            device = usable_device(device, who)
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            if any(is_elsewhere(x.device, device) for x in (*model.parameters(), *model.buffers())):
                model = copy.deepcopy(model).to(device)
            inputs = map_tensors(lambda x: x.to(device), inputs)
        self.model, self.inputs = model, inputs
        self._args, self._kwargs = arguments_of(model, inputs, None) if infer is None else ((), {})

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the inputs for one run, which may write to them."""
        return map_tensors(lambda x: x.clone(), (self._args, self._kwargs))

    def __call__(self) -> Any:
        """Run it once; each run has inputs of its own."""
        if self._infer is not None:
            return self._infer(self.model, map_tensors(lambda x: x.clone(), self.inputs))
        args, kwargs = self.arguments()
        return self.model(*args, **kwargs)

    def watch(self, consumer: Consumer) -> Any:
        """Run it once and tell a consumer of each call.

        Raises:
            CheckError: the model fails on these inputs.
        """
        with undisturbed_evaluation(self.model), Watch(self.model, consumer) as watch:
            try:
                return self()
            except CheckError:
                raise
            except Exception as error:
                place = at(watch.failed_in or "", error_line(error))
                text = f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
                raise CheckError(f"{self._who}: the model failed {place}: {text}.") from error


def unfolded(model: nn.Module) -> nn.Module:
    """A float model as `prepare` takes it: where torch's transformer layers run as one, a copy that shows what they do.

    The copy has the model's own weights. Where the model cannot be copied, it stays as it is.

    >>> net = nn.TransformerEncoderLayer(8, 2)
    >>> unfolded(net).linear1.weight is net.linear1.weight, unfolded(net.linear1) is net.linear1
    (True, True)
    """
    if not hides_operators(model):
        return model
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    try:
        return plain_transformers(copy.deepcopy(model, shared))
    except Exception:  # what a module may hold that cannot be copied is not for us to know
        return model


def usable_device(device: torch.device | str, who: str) -> torch.device:
    """A device that torch can use here.

    Raises:
        CheckError: it cannot.

    >>> usable_device("cpu", "featuremap_similarity")
    device(type='cpu')
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        text = str(error).splitlines()[0].rstrip(".")
        raise CheckError(f"{who}: the device {str(device)!r} cannot be used here: {text}.") from error
    return found


def is_elsewhere(held: torch.device, wanted: torch.device) -> bool:
    """Is what lies on one device not on the other, such as on the second GPU?

    >>> is_elsewhere(torch.device("cuda:1"), torch.device("cuda:0"))
    True
    >>> is_elsewhere(torch.device("cpu"), torch.device("cpu:0"))
    False
    """
    is_other_one = None not in (held.index, wanted.index) and held.index != wanted.index
    return held.type != wanted.type or is_other_one


@contextmanager
def undisturbed_evaluation(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, with the scales that the model has; all is as it was afterwards."""
    with undisturbed(model), hidden_parts(), frozen_scales(model), torch.no_grad():
        if any(module.training for module in model.modules()):  # a change of mode drops what QAT modules keep
            model.eval()
        yield
