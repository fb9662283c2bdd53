"""What is called several times in one forward of a model has one range for all these calls."""

from __future__ import annotations

from collections import Counter

from torch import nn

from horizon_plugin_pytorch.capture.region import called_path
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.runtime.hooks import keep
from horizon_plugin_pytorch.statistics.observer_base import ObserverBase


def join_calls(prep: Preparation) -> None:
    """Let all calls of a module in one forward count as one batch; averaged, the first would count most.

    Where the user does not ask for it while training, in CALIBRATION only.
    """
    model, root, region, is_always = prep.model, prep.root, prep.region, prep.joins_calls
    calls = Counter(path for node in model.graph.nodes if node in region and (path := called_path(model, node)))
    for path, count in calls.items():
        parent = root.get_submodule(path.rpartition(".")[0])
        may_repeat = type(parent) is nn.Module  # a dynamic block is recorded once and runs any number of times
        if count > 1 or may_repeat:
            for observer in _observers(root.get_submodule(path)):
                if not observer.is_per_channel:
                    observer.counts_together, observer.joins_calibration = is_always, not is_always


def follow_batches(model: nn.Module) -> None:
    """Tell observers that join calls when a forward of the model begins."""
    if any(observer.counts_together or observer.joins_calibration for observer in _observers(model)):
        keep(model.register_forward_pre_hook, _begin_batch)


def _observers(module: nn.Module) -> list[ObserverBase]:
    return [m for m in module.modules() if isinstance(m, ObserverBase)]


def _begin_batch(model: nn.Module, args: tuple) -> None:
    for observer in _observers(model):
        if observer.counts_together or observer.joins_calibration:
            observer.begin_batch()
