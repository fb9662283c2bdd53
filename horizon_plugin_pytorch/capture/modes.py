"""Branches on `self.training`: what a traced forward would have done in the other mode."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch
import torch.fx
from torch import nn

from horizon_plugin_pytorch.asking.functions import is_user_function, names_in
from horizon_plugin_pytorch.asking.stack import error_line
from horizon_plugin_pytorch.capture.absent import Traced, first_difference, steps, trace_steps
from horizon_plugin_pytorch.capture.given import Arguments
from horizon_plugin_pytorch.errors import QuantizationWarning, warn


def tell_modes(model: nn.Module, arguments: Arguments, graph: torch.fx.Graph, traced: Traced) -> None:
    """Warn of a forward that does something else in the other mode: the graph has one of them for ever.

    The model is traced once more, if its code names `training` at all.

    Args:
        graph: of the model in the mode that it is in.
        traced: traces the model.
    """
    if not _names_training(model):
        return
    modes = {module: module.training for module in model.modules()}
    try:
        other = trace_steps(model.train(not modes[model]), arguments, traced)
        line = first_difference(_without_switches(steps(graph)), _without_switches(other))
    except Exception as error:
        line = error_line(error)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if line is not None:
        here, there = ("train", "eval") if model.training else ("eval", "train")
        warn(
            f"`{type(model).__name__}` is traced in {here} mode, and its forward does something else in {there} mode"
            f"{f' ({line})' if line else ''}. The prepared model does what it does in {here} mode, after `train()` and "
            "`eval()` alike. Prepare with `PrepareMethod.JIT_STRIP`, whose model runs its own forward; mark what "
            "depends on the mode with `horizon_plugin_pytorch.utils.fx_helper.wrap()`; or prepare in the mode that "
            "you run it in.",
            QuantizationWarning,
        )


def _names_training(model: nn.Module) -> bool:
    """True if a method of the user's modules names `training`."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    members = (inspect.unwrap(getattr(value, "__func__", value)) for cls in classes for value in vars(cls).values())
    functions = (f for f in members if isinstance(f, FunctionType) and is_user_function(f))
    return any("training" in names_in(f) for f in functions)


def _without_switches(calls: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Calls without the switch of dropout functions, which become modules and follow the mode."""

    def plain(call: Any) -> Any:
        op, target, args, kwargs = call
        if "dropout" not in getattr(target, "__name__", ""):
            return call
        settings = {name: value for name, value in kwargs.items() if name not in ("training", "train")}
        return op, target, tuple(None if isinstance(value, bool) else value for value in args), settings

    return [(plain(call), line) for call, line in calls]
