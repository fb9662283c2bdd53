"""Runs of a model that leave no trace in it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.nn.qat.half import Float16

_HOOKS = nn.Module().__dict__.keys() - {"training", "_parameters", "_buffers", "_modules"}


def _contents(value: Any) -> Any:
    """A copy of a container that a forward may fill; None for anything else."""
    return value.copy() if isinstance(value, (dict, list, set, deque)) else None


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, (list, deque)):
        container.clear()
        container.extend(contents)
    else:
        container.clear()
        container.update(contents)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever a run changes is as it was afterwards: buffers, modes, attributes of modules, random numbers."""
    attributes = [
        (m, {k: (v, _contents(v)) for k, v in m.__dict__.items() if k not in _HOOKS}) for m in model.modules()
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random_states = (random.getstate(), torch.get_rng_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(random_states[0])
        torch.set_rng_state(random_states[1])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for module, before in attributes:
            for name in module.__dict__.keys() - before.keys() - _HOOKS:
                del module.__dict__[name]
            for name, (value, contents) in before.items():
                module.__dict__[name] = value
                if contents is not None:
                    _refill(value, contents)
            if isinstance(module, Float16):
                module._float.training = module.training
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
