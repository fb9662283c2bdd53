"""How often each module of a model is called in one forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.analysis.calls import Recording, record_calls
from horizon_plugin_pytorch.analysis.report import called_times_table
from horizon_plugin_pytorch.analysis.rows import CalledTimes
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.errors import require_module
from horizon_plugin_pytorch.nested import fresh
from horizon_plugin_pytorch.runtime.arguments import arguments_of
from horizon_plugin_pytorch.watch.module_watch import ModuleWatch
from horizon_plugin_pytorch.watch.undisturbed import undisturbed


def get_module_called_count(
    model: nn.Module,
    example_inputs: Any,
    check_leaf_module: Callable[[nn.Module], bool] | None = None,
    print_tabulate: bool = True,
) -> dict[str, int]:
    """Count how often each operator of a model is called in one forward: 0 is not used, 2 and more is shared.

    A module that has several names is counted under the first. Each method of a FloatFunctional is a call.

    Args:
        model: float, prepared or converted; it is not changed.
        example_inputs: the model's arguments, as `prepare` takes them.
        check_leaf_module: which modules to count; inside these nothing is counted. None counts the operators: modules
            of torch and of this package, and those that are marked with `wrap`.
        print_tabulate: print the table.

    Raises:
        CheckError: when the model fails on these inputs.

    >>> net = nn.Sequential(nn.Linear(2, 2), act := nn.ReLU(), nn.Linear(2, 2), act)
    >>> counts = get_module_called_count(net, torch.ones(1, 2))
    name      called times
    ------  --------------
    0                    1
    1                    2
    2                    1
    """
    require_module(model, "get_module_called_count")
    counts = called_counts(record_calls(model, example_inputs), model, example_inputs, check_leaf_module)
    if print_tabulate:
        print(called_times_table([CalledTimes(name, count) for name, count in counts.items()]))
    return counts


def called_counts(
    recording: Recording,
    model: nn.Module,
    example_inputs: Any,
    check_leaf_module: Callable[[nn.Module], bool] | None = None,
) -> dict[str, int]:
    """What `get_module_called_count` gives, of a run that is recorded; modules that are no operators run once more."""
    recording.require_end("get_module_called_count")
    counts = recording.counts
    if check_leaf_module is None:
        return counts
    chosen = _chosen(model, check_leaf_module)
    others = {path: module for path, module in chosen.items() if path not in counts}
    called = {**counts, **(_counts_of(model, example_inputs, others) if others else {})}
    return {path: called[path] for path in chosen}


def _chosen(model: nn.Module, is_chosen: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """The modules that the user wants to be counted, by their first paths; a model that has modules is none itself."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not path and model._modules:
            continue
        if not any(path.startswith(f"{above}.") for above in found) and is_chosen(module):
            found[path] = module
    return found


def _counts_of(model: nn.Module, example_inputs: Any, modules: dict[str, nn.Module]) -> dict[str, int]:
    """Count the calls of modules that are no operators, or parts of one."""
    args, kwargs = arguments_of(model, example_inputs, None)
    called: Counter[str] = Counter()
    with undisturbed(model), torch.no_grad(), ModuleWatch(modules, before=lambda call: called.update([call.path])):
        model.eval()
        model(*fresh(args), **fresh(kwargs))
    return {path: called[path] for path in modules}


show_at("utils.quant_profiler", get_module_called_count)
