"""A model that keeps its forward: its calls find the modules that were made for them."""

from __future__ import annotations

import torch
from torch import fx

from horizon_plugin_pytorch.capture.leaves import runs_as_one
from horizon_plugin_pytorch.capture.region import called_path
from horizon_plugin_pytorch.errors import source_line
from horizon_plugin_pytorch.nn.qat.half import Float16
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.operators.calls import is_cast
from horizon_plugin_pytorch.operators.table import row_named, row_of_module
from horizon_plugin_pytorch.passes.preparation import RecordedPreparation
from horizon_plugin_pytorch.runtime.call_site import CallSite, ScopeHooks, scoped_modules
from horizon_plugin_pytorch.runtime.children import hide_added
from horizon_plugin_pytorch.runtime.dispatch import Dispatcher, FusedMember, FusedStep, NeverMet, OnCpu
from horizon_plugin_pytorch.runtime.hooks import keep
from horizon_plugin_pytorch.runtime.located import FusedAway
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.torch_functions import REAL


def note_calls(prep: RecordedPreparation) -> None:
    """Note which calls the runs met, before passes change the graph."""
    nodes = prep.graph.nodes
    prep.casts = _float_casts(prep.graph)
    prep.met = frozenset(site for node in nodes if (site := notes(node).site) is not None)
    prep.called = frozenset(path for node in nodes if (path := called_path(prep.model, node)) is not None)


def _float_casts(graph: fx.Graph) -> frozenset[CallSite]:
    """Call sites of a recorded graph that cast float tensors to float32."""
    return frozenset(
        site
        for node in graph.nodes
        if (site := notes(node).site) is not None
        and is_cast(site.name)
        and isinstance(node.args[0], fx.Node)
        and notes(node.args[0]).dtype in REAL
        and notes(node).dtype == torch.float32
    )


def note_scopes(prep: RecordedPreparation) -> None:
    """Note the modules whose forwards are the user's, and the functions that they call in eval mode.

    Passes add modules, which are no scopes; and calls have their own places since `unshare`.
    """
    prep.scopes = list(scoped_modules(prep.root, runs_as_one))
    deployed = [notes(node) for node in prep.graph.nodes if not notes(node).is_training_only]
    prep.deployed = [known.site for known in deployed if known.site is not None]


def attach_dispatcher(prep: RecordedPreparation) -> None:
    """Let the model send its calls to their modules while it runs."""
    is_mixed = prep.hybrid is not None or any(isinstance(m, Float16) for m in prep.root.modules())
    is_mixed = is_mixed or any(node.target is torch.empty for node in prep.graph.nodes)
    prep.dispatcher = Dispatcher(
        prep.sites, _on_cpu(prep), is_mixed, prep.casts, prep.met, prep.called, _functionals_on_cpu(prep)
    )
    for path, module in prep.scopes:
        ScopeHooks(path, prep.dispatcher).attach(module)
        hide_added(module, prep.children.get(prep.own.original(path), ()))


def _on_cpu(prep: RecordedPreparation) -> dict[CallSite, str]:
    """The calls that run on the CPU, with the stub before each; modules there get a hook that does the same."""
    sites: dict[CallSite, str] = {}
    modules: dict[str, str] = {}
    for node in prep.graph.nodes:
        path, known = called_path(prep.model, node), notes(node)
        if not known.runs_on_cpu:
            continue
        if known.site is not None:
            sites[known.site] = sites.get(known.site) or known.dequantized_by
        elif path is not None and node.op == "call_module":
            modules[path] = modules.get(path) or known.dequantized_by
    for path, stub in modules.items():
        OnCpu(stub).attach(prep.root.get_submodule(path))
    return sites


def _functionals_on_cpu(prep: RecordedPreparation) -> dict[str, str]:
    """The FloatFunctionals that run on the CPU, with the stub before each."""
    found: dict[str, str] = {}
    for node in prep.graph.nodes:
        path, known = called_path(prep.model, node), notes(node)
        if node.op != "call_method" or path is None or not known.runs_on_cpu:
            continue
        found[path] = found.get(path) or known.dequantized_by
    return found


def guard_fused(prep: RecordedPreparation) -> None:
    """Let the model see at run time that fused modules, and stubs, run as they did when it was recorded."""
    assert prep.dispatcher is not None
    called = set()
    steps: dict[str, list[FusedStep]] = {}
    for node in prep.graph.nodes:
        called.add(called_path(prep.model, node))
        modules = {path: prep.root.get_submodule(path) for path in notes(node).members}
        group = tuple(path for path, m in modules.items() if path == node.target or isinstance(m, FusedAway))
        shapes = dict(zip(modules, notes(node).has_shape, strict=False))
        for index, path in enumerate(group):
            steps.setdefault(path, []).append(
                FusedStep(group, index, source_line(node.stack_trace), shapes.get(path, True))
            )
    for path, of_path in steps.items():
        FusedMember(of_path, prep.dispatcher).attach(prep.model.get_submodule(path))
    for path, module in prep.root.named_modules():
        row = row_of_module(type(module))
        if row is not None and row.is_stub and path not in called:
            keep(module.register_forward_pre_hook, NeverMet(path))


def mark_accumulators(prep: RecordedPreparation) -> None:
    """Tell modules that their accumulators leave as float."""
    for path in {called_path(prep.model, node): None for node in prep.graph.nodes if node in prep.region}:
        module = None if path is None else prep.root.get_submodule(path)
        if isinstance(module, QATModule):
            row = row_named(module.operator)
            is_real = row is not None and row.has_real_output
            module.is_accumulator = is_real and module.activation_post_process is None
