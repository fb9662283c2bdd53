"""What is called several times in one forward of a model has one range for all these calls."""

from __future__ import annotations

from collections import Counter

from torch import nn

from horizon_plugin_pytorch.capture.region import called_path
from horizon_plugin_pytorch.capture.wrapped import wrapped_modules
from horizon_plugin_pytorch.notes import hidden, keep_hidden
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.runtime.hooks import keep
from horizon_plugin_pytorch.runtime.leaf import LeafCode
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase

_JOINS = "joins_calls"  # a note of models with wrapped code: do calls count together while training, too?


def join_calls(prep: Preparation) -> None:
    """Let all calls of a module in one forward count as one batch; averaged, the first would count most.

    Where the user does not ask for it while training, in CALIBRATION only.
    """
    model, root, region, is_always = prep.model, prep.root, prep.region, prep.joins_calls
    calls = Counter(path for node in model.graph.nodes if node in region and (path := called_path(model, node)))
    unseen = prep.called_unseen(is_certain=False)
    for path, count in calls.items():
        parent, module = root.get_submodule(path.rpartition(".")[0]), root.get_submodule(path)
        may_repeat = type(parent) is nn.Module  # a dynamic block is recorded once and runs any number of times
        if count > 1 or may_repeat or id(module) in unseen:
            _join(module, is_always)
    for path in wrapped_modules(model):  # such code may be a loop
        _join(root.get_submodule(path), is_always)
    if _has_code(root):
        keep_hidden(root, _JOINS, is_always)


def join_late_calls(root: nn.Module, module: nn.Module) -> None:
    """Let all calls of a module that was made for a line of wrapped code, which may be a loop, count as one batch.

    Args:
        root: the prepared model.
    """
    is_always = hidden(root, _JOINS, bool)
    if is_always is not None:  # else it is a pickle of before, which has no hook
        _join(module, is_always)


def follow_batches(model: nn.Module) -> None:
    """Tell observers that join calls when a forward of the model begins, also those that are not there yet."""
    joins = any(observer.counts_together or observer.joins_calibration for observer in _observers(model))
    if joins or hidden(model, _JOINS, bool) is not None:
        keep(model.register_forward_pre_hook, _begin_batch)


def _has_code(root: nn.Module) -> bool:
    return any(isinstance(module, LeafCode) for module in root.modules())


def _join(module: nn.Module, is_always: bool) -> None:
    for observer in _observers(module):
        if not observer.is_per_channel:
            observer.counts_together, observer.joins_calibration = is_always, not is_always


def _observers(module: nn.Module) -> list[ObserverBase]:
    """The observers in a module, to which other threads may add modules at the same time."""
    found, waiting, met = list[ObserverBase](), [module], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in met:
            continue
        met.add(id(one))
        if isinstance(one, ObserverBase):
            found.append(one)
        children = one._modules  # of a scripted module they are no dictionary
        values = dict.values(children) if isinstance(children, dict) else children.values()
        waiting += [child for child in tuple(values) if child is not None]
    return found


def _begin_batch(model: nn.Module, args: tuple) -> None:
    for observer in _observers(model):
        if observer.counts_together or observer.joins_calibration:
            observer.begin_batch()
