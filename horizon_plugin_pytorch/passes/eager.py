"""The passes of eager mode, in their order: modules become QAT modules, and the user's calls stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from horizon_plugin_pytorch.capture.captured import Captured
from horizon_plugin_pytorch.capture.leaves import is_leaf
from horizon_plugin_pytorch.config.graph_view import GraphView, ModuleView
from horizon_plugin_pytorch.errors import QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.nn.qat.module import QATModule
from horizon_plugin_pytorch.nn.qat.notes import share_notes
from horizon_plugin_pytorch.operators.table import row_of_module
from horizon_plugin_pytorch.passes.batches import follow_batches
from horizon_plugin_pytorch.passes.inputs import warn_unfit
from horizon_plugin_pytorch.passes.pipeline import (
    choose,
    choose_by_setters,
    find_lines,
    find_region,
    find_tied,
    note_choices,
    tie,
    warn_wide,
)
from horizon_plugin_pytorch.passes.preparation import RecordedPreparation
from horizon_plugin_pytorch.passes.skipped import note_skipped
from horizon_plugin_pytorch.passes.states import refuse_states_when_running
from horizon_plugin_pytorch.passes.steps import Pass, on_root
from horizon_plugin_pytorch.passes.swap import to_qat
from horizon_plugin_pytorch.running import HYBRID
from horizon_plugin_pytorch.runtime.dispatch import OnCpu
from horizon_plugin_pytorch.runtime.float_parts import keep_float


@dataclass
class EagerPreparation(RecordedPreparation):
    """The user has written stubs and FloatFunctional: there is nothing to replace, and a graph is good to have.

    Args:
        has_graph: was the model run on example inputs? Without, `model` has a graph of nothing.
        takes_integers: may modules without a qconfig take quantized tensors, as real values?
    """

    has_graph: bool = False
    takes_integers: bool = False

    @property
    def is_seen_by_setters(self) -> bool:
        """Do setters choose by the graph, so that only its quantized part changes?"""
        return self.has_graph and self.qconfig_setter is not None

    def view(self) -> GraphView:
        return super().view() if self.has_graph else ModuleView(self.root, self.choices, self.march)


def tell_unseen(prep: EagerPreparation) -> None:
    """Say what setters do not see without a graph."""
    if prep.qconfig_setter is not None and not prep.has_graph:
        warn(
            "prepare_qat: without example_inputs setters see modules, not what feeds them: no output is in high "
            "precision, and no grid of grid_sample is int16. Give example_inputs.",
            QuantizationWarning,
        )


def follow_graph(prep: EagerPreparation) -> None:
    """Note what setters, who saw the graph, leave as it comes, and which modules are in the quantized part."""
    if prep.is_seen_by_setters:
        warn_unfit(prep)
        note_skipped(prep)
        find_lines(prep)


def swap_modules(prep: EagerPreparation) -> None:
    """Put QAT modules in place of those that have a qconfig, in the quantized part if it is known: even of the root."""
    lines = prep.lines if prep.is_seen_by_setters else None
    prep.model = Captured(to_qat(prep.root, prep.choices, prep.march, lines), prep.graph)


def keep_others_float(prep: EagerPreparation) -> None:
    """Let modules without a qconfig refuse quantized tensors, or take them as real values."""
    if prep.takes_integers:
        _accept_integers(prep.root)
        prep.root.__dict__[HYBRID] = True
    else:
        keep_float((path, m) for path, m in prep.root.named_modules() if row_of_module(type(m)) is not None)


def _accept_integers(model: nn.Module) -> None:
    for module in list(model.children()):
        if isinstance(module, QATModule):
            module.is_hybrid = True
        row = row_of_module(type(module))
        if isinstance(module, (QATModule, FakeQuantize)) or (row is not None and row.qat is None):
            continue  # the last ones move what they get, with its scale
        if is_leaf(module):
            OnCpu().attach(module)
        else:
            _accept_integers(module)


def warn_nothing(prep: EagerPreparation) -> None:
    """Say that no module has a qconfig."""
    if not any(isinstance(m, QATModule) and m.fake_quantizers() for m in prep.root.modules()):
        warn(
            f"`{prep.name}`: no module has a qconfig, so nothing is quantized. Set one before: "
            "`model.qconfig = default_qat_8bit_fake_quant_qconfig`.",
            QuantizationWarning,
        )


EAGER: tuple[Pass, ...] = (
    Pass(find_region),
    Pass(find_tied),
    Pass(choose),
    Pass(tell_unseen),
    Pass(choose_by_setters),
    Pass(follow_graph),
    Pass(swap_modules),
    Pass(tie),
    Pass(keep_others_float),
    Pass(warn_nothing),
    Pass(on_root(follow_batches)),
    Pass(on_root(refuse_states_when_running)),
    Pass(warn_wide),
    Pass(on_root(share_notes)),
    Pass(note_choices),
)
