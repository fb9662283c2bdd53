"""Runs of a model that leave no trace in it."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import immutable_collections

from horizon_plugin_pytorch.capture.plain_state import PlainState
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.runtime.leaf import LeafCode

_FILLED = (dict, list, set, deque)  # containers that a forward may fill
_UNCHANGED = (immutable_collections.immutable_list, immutable_collections.immutable_dict)  # of settings
_HOOKS = nn.Module().__dict__.keys() - {"training", "_parameters", "_buffers", "_modules"}


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, _UNCHANGED):
        return
    if isinstance(container, (list, deque)):
        container.clear()
        container.extend(contents)
    else:
        container.clear()
        container.update(contents)


class _Values:
    """What tensors hold; small ones of a kind are copied and compared in one go, as a model has thousands."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        kinds: dict[Any, list[Tensor]] = defaultdict(list)
        for x in tensors:
            is_small = type(x) is Tensor and x.layout is torch.strided and not x.is_meta and x.numel() <= _SMALL
            kinds[(x.dtype, x.device) if is_small and not x.is_quantized else id(x)].append(x)
        self._kinds = [(group, _joined(group)) for group in kinds.values()]

    def restore(self) -> None:
        """Write back what is another value now."""
        for group, before in self._kinds:
            now = _joined(group, is_copied=False)
            if torch.equal(now, before):
                continue
            if len(group) == 1:
                group[0].copy_(before)
                continue
            sizes = [x.numel() for x in group]
            ends, parts = torch.tensor(sizes, device=before.device).cumsum(0), before.split(sizes)
            for i in torch.bucketize((now != before).nonzero().flatten(), ends, right=True).unique().tolist():
                group[i].copy_(parts[i].reshape(group[i].shape))


_SMALL = 4096


@torch.no_grad()
def _joined(group: list[Tensor], is_copied: bool = True) -> Tensor:
    if len(group) == 1:
        return group[0].clone() if is_copied else group[0]
    return torch.cat([x if x.dim() == 1 else x.reshape(-1) for x in group])


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever a run changes is as it was afterwards: buffers, modes, attributes of modules, random numbers."""
    modules = list(model.modules())
    attributes = [(m, {k: v for k, v in m.__dict__.items() if k not in _HOOKS}) for m in modules]
    kinds = {type(v) for _, of_one in attributes for v in of_one.values()}
    filled = {kind for kind in kinds if issubclass(kind, _FILLED)}
    contents = [(v, v.copy()) for _, of_one in attributes for v in of_one.values() if type(v) in filled]
    buffers = _Values({id(x): x for m in modules for x in m._buffers.values() if x is not None}.values())
    state = PlainState(model)  # what objects hold
    code = {id(m.handler): m.handler for m in modules if isinstance(m, LeafCode) and m.handler is not None}
    met = [(handler, dict(handler.sites), handler.has_run) for handler in code.values()]
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
            module.__dict__.update(before)
            if isinstance(module, Float16):
                module._float.training = module.training
        for container, values in contents:
            _refill(container, values)
        for handler, sites, has_run in met:  # the modules that were made for new calls are gone, too
            _refill(handler.sites, sites)
            handler.has_run = has_run
        buffers.restore()
        state.undo()
