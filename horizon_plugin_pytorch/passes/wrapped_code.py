"""Code that tracing does not enter, in a traced model: what is known of it, and what is decided when it runs."""

from __future__ import annotations

from horizon_plugin_pytorch.capture.wrapped import (
    attach,
    find_modules,
    place_code,
    with_stubs,
    wrapped_modules,
    wrapped_nodes,
)
from horizon_plugin_pytorch.notes import keep_hidden
from horizon_plugin_pytorch.passes.late_modules import SETTER, make_module
from horizon_plugin_pytorch.passes.preparation import TracedPreparation
from horizon_plugin_pytorch.passes.states import refuse_states_when_running
from horizon_plugin_pytorch.passes.swap import keep_float_forms
from horizon_plugin_pytorch.passes.unmet import keep_unmet


def find_code(prep: TracedPreparation) -> None:
    """Find the calls of such code; one with QuantStubs inside begins a quantized part."""
    prep.code = wrapped_nodes(prep.model)
    prep.stubbed = frozenset(with_stubs(prep.model, prep.code))


def give_code_modules(prep: TracedPreparation) -> None:
    """Give each call in the quantized part a module of its own."""
    prep.code = place_code(prep.model, prep.region, prep.code) if prep.code else []


def find_modules_of_code(prep: TracedPreparation) -> None:
    """Find the modules that such code may call: they are quantized like those that the graph calls."""
    find_modules(prep.model, prep.code, prep.march)


def note_float_forms(prep: TracedPreparation) -> None:
    """Note what modules are before they become QAT modules."""
    prep.float_forms = dict(prep.root.named_modules())


def attach_code(prep: TracedPreparation) -> None:
    """Let such code send functions to modules, which are made when it meets them, and modules run on real numbers."""
    keep_float_forms(prep.root, {path: prep.float_forms[path] for path in wrapped_modules(prep.model)})
    if prep.code:
        attach(prep.model, prep.code, make_module)
        refuse_states_when_running(prep.model)
        keep_hidden(prep.model, SETTER, prep.qconfig_setter)
        keep_unmet(prep.model)
