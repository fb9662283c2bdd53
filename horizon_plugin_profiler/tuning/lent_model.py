"""A model that the user's function may do with as it likes: afterwards it is as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from horizon_plugin_pytorch.march import get_march, set_march
from horizon_plugin_pytorch.watch.undisturbed import undisturbed


@contextmanager
def lent(model: nn.Module) -> Iterator[None]:
    """Whatever happens to the model in here is undone: weights, buffers, modes, parts, hooks; and so is another march.

    All mixtures are measured on one model, so what a function leaves in it would be part of all later values. Random
    numbers begin anew each time: differences between two mixtures are theirs, and the same call gives the same answer.
    """
    march, numbers = get_march(), np.random.get_state()
    parameters = [(p, p.data, p.data.clone(), p.requires_grad, p.grad) for p in model.parameters()]
    hooks = [
        (value, value.copy()) for m in model.modules() for name, value in vars(m).items() if name.endswith("_hooks")
    ]
    try:
        with undisturbed(model):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        set_march(march)
        np.random.set_state(numbers)
        for found, before in hooks:
            found.clear()
            found.update(before)
        for parameter, data, values, is_trained, gradient in parameters:
            if not torch.equal(data, values):
                with torch.inference_mode(data.is_inference()), torch.no_grad():
                    data.copy_(values)
            if parameter.data.data_ptr() != data.data_ptr() or parameter.dtype != data.dtype:
                parameter.data = data
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
            parameter.grad = gradient
