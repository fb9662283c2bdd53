"""The passes of a prepare, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from horizon_plugin_pytorch.capture.graph_module import write_later, write_now
from horizon_plugin_pytorch.capture.region import called_path, has_stub, mark_constants, quantized_nodes
from horizon_plugin_pytorch.capture.wrapped import wrapped_modules
from horizon_plugin_pytorch.config.graph_view import PLACEHOLDER
from horizon_plugin_pytorch.config.resolve import named_modules_of, resolve_qconfigs
from horizon_plugin_pytorch.config.setters import apply_setters, note_float
from horizon_plugin_pytorch.errors import QuantizationWarning, source_line, warn
from horizon_plugin_pytorch.nn.qat.notes import share_notes
from horizon_plugin_pytorch.notes import keep_notes
from horizon_plugin_pytorch.passes.batches import follow_batches, join_calls
from horizon_plugin_pytorch.passes.cautions import warn_quotients, warn_random, warn_shared, warn_unquantized
from horizon_plugin_pytorch.passes.checks import check_modules, check_operands, check_sizes
from horizon_plugin_pytorch.passes.dispatching import (
    attach_dispatcher,
    guard_fused,
    mark_accumulators,
    note_calls,
    note_scopes,
)
from horizon_plugin_pytorch.passes.dropout import follow_training
from horizon_plugin_pytorch.passes.fuse import fuse_graph, shared_with_norm
from horizon_plugin_pytorch.passes.hybrid import split_devices
from horizon_plugin_pytorch.passes.inplace import follow_writes
from horizon_plugin_pytorch.passes.inputs import fit_inputs
from horizon_plugin_pytorch.passes.own_scales import add_names, share_weights, unshare
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.passes.read_tensors import answer_facts, answer_types, mark_reads
from horizon_plugin_pytorch.passes.replace import replace_functions, replace_fusable
from horizon_plugin_pytorch.passes.scores import mark_scores
from horizon_plugin_pytorch.passes.skipped import note_skipped
from horizon_plugin_pytorch.passes.states import refuse_states, warn_states
from horizon_plugin_pytorch.passes.steps import Pass, on_model, on_root, recorded, run_steps, traced
from horizon_plugin_pytorch.passes.stub_links import link_stubs
from horizon_plugin_pytorch.passes.swap import to_qat, warn_int16
from horizon_plugin_pytorch.passes.tied_scales import tie_scales, tied_groups
from horizon_plugin_pytorch.passes.unread import drop_unread
from horizon_plugin_pytorch.passes.wrapped_code import (
    attach_code,
    find_code,
    find_modules_of_code,
    give_code_modules,
    note_float_forms,
)
from horizon_plugin_pytorch.qat_mode import tricks
from horizon_plugin_pytorch.runtime.float_parts import keep_float
from horizon_plugin_pytorch.runtime.stochastic import refuse_stochastic

# -- steps that ask the rooms below


def find_region(prep: Preparation) -> None:
    """Which part of the graph is quantized?"""
    prep.region = quantized_nodes(prep.model, stubbed=prep.stubbed)


def answer_questions(prep: Preparation) -> None:
    """The type of a quantized tensor is float32 to the user's code."""
    answer_types(prep.model, prep.region)


def refuse_random(prep: Preparation) -> None:
    """Random numbers would stay in a traced graph."""
    refuse_stochastic(prep.graph, prep.region.__contains__)


def warn_no_stub(prep: Preparation) -> None:
    """Say that nothing tells where the model is quantized."""
    if has_stub(prep.model) or prep.hybrid is not None or prep.stubbed:
        return
    warn(
        f"`{prep.name}` has no QuantStub. Its modules are prepared as their qconfigs say and can be "
        "trained, but its inputs have no scale: VALIDATION and the converted model need one. Add a QuantStub and "
        "call it on each float input, and a DeQuantStub on each output.",
        QuantizationWarning,
    )


def name_shared_norms(prep: Preparation) -> None:
    """Let layers that share a batch norm have own scales, where the user asks for it."""
    if tricks.fx_force_duplicate_shared_convbn:
        add_names(prep.own, shared_with_norm(prep.model))


def choose(prep: Preparation) -> None:
    """The choice for every path; what is named is meant with all its calls. Setters choose later."""
    given = prep.qconfig_dict if prep.qconfig_setter is None else {"": PLACEHOLDER}
    prep.choices = resolve_qconfigs(prep.root, given)
    prep.own.spread(prep.choices, named_modules_of(given))


def choose_float(prep: Preparation) -> None:
    """Ask setters what they leave float: that is not fused."""
    if prep.is_fused and prep.qconfig_setter is not None:
        note_float(prep.view(), prep.qconfig_setter)


def fuse(prep: Preparation) -> None:
    """Fuse layers with what follows them."""
    if prep.is_fused:
        fuse_graph(prep)


def fuse_everywhere(prep: Preparation) -> None:
    """Fuse layers of a float model with what follows them."""
    if prep.is_fused:
        fuse_graph(prep, is_everywhere=True)


def choose_by_setters(prep: Preparation) -> None:
    """Setters choose formats, now that it is known what is one operator."""
    if prep.qconfig_setter is not None:
        apply_setters(prep.view(), prep.qconfig_setter)


def find_tied(prep: Preparation) -> None:
    """Which modules are to have one scale?"""
    prep.groups = tied_groups(prep.view(), prep.tied) if prep.tied else []


def find_lines(prep: Preparation) -> None:
    """Find the modules that the quantized part calls, its DeQuantStubs included, with the calling lines."""
    lines: dict[str, str] = {}
    for node in prep.graph.nodes:
        path = called_path(prep.model, node)
        if path is not None and (node in prep.region or any(n in prep.region for n in node.all_input_nodes)):
            lines.setdefault(path, source_line(node.stack_trace))
    for path, line in wrapped_modules(prep.model).items():
        lines.setdefault(path, line)
    prep.lines = lines


def swap(prep: Preparation) -> None:
    """Put QAT modules in place of those that have a qconfig; what has none refuses quantized tensors."""
    to_qat(prep.root, prep.choices, prep.march, prep.lines)
    keep_float(((path, prep.root.get_submodule(path)) for path in prep.lines), prep.lines)


def tie(prep: Preparation) -> None:
    """Give groups of modules one scale."""
    tie_scales(prep.root, prep.groups)


def warn_wide(prep: Preparation) -> None:
    """Say what is int16 on a chip of int8."""
    warn_int16(prep.root, prep.march)


def note_choices(prep: Preparation) -> None:
    """Let the model know its chip and why its modules have their formats."""
    keep_notes(prep.root, march=prep.march, choices=prep.choices)


def note_graph(prep: Preparation) -> None:
    """Let a model that keeps its forward know its graph."""
    keep_notes(prep.root, graph=prep.graph)


PIPELINE: tuple[Pass, ...] = (
    # The graph says what happens.
    traced(on_model(write_later)),
    traced(on_model(follow_training)),
    traced(on_model(follow_writes)),
    traced(on_model(drop_unread)),
    traced(on_model(answer_facts)),
    traced(find_code),
    recorded(note_calls),
    recorded(on_model(mark_constants)),
    # What of it is quantized.
    Pass(find_region),
    traced(answer_questions),
    traced(refuse_random),
    recorded(warn_random),
    Pass(refuse_states),
    traced(warn_states),
    Pass(warn_no_stub),
    # Which calls have modules of their own.
    traced(name_shared_norms),
    traced(give_code_modules),
    Pass(unshare),
    traced(find_modules_of_code),
    Pass(choose),
    recorded(note_scopes),
    Pass(split_devices),
    traced(note_float_forms),
    # Operators: one module for each, in the formats that are chosen for it.
    Pass(replace_functions),
    Pass(choose_float),
    Pass(check_sizes),
    Pass(fuse),
    Pass(choose_by_setters),
    Pass(check_modules),
    Pass(warn_unquantized),
    Pass(warn_quotients),
    Pass(warn_shared),
    Pass(fit_inputs),
    Pass(note_skipped),
    Pass(check_operands),
    Pass(find_tied),
    Pass(mark_scores),
    Pass(find_lines),
    # QAT modules.
    Pass(swap),
    Pass(share_weights),
    Pass(join_calls),
    Pass(tie),
    Pass(on_root(follow_batches)),
    Pass(warn_wide),
    Pass(on_root(share_notes)),
    # The prepared model.
    traced(on_model(write_now)),
    traced(attach_code),
    recorded(attach_dispatcher),
    recorded(guard_fused),
    recorded(on_model(link_stubs)),
    recorded(mark_accumulators),
    Pass(on_model(mark_reads)),
    Pass(note_choices),
    recorded(note_graph),
)

# Of `fuse_fx`: a float model comes out.
FUSION: tuple[Pass, ...] = (
    traced(on_model(follow_training)),
    traced(on_model(follow_writes)),
    traced(on_model(drop_unread)),
    Pass(choose),
    Pass(replace_fusable),  # `x + y` must become a module before it can be fused
    Pass(fuse_everywhere),
)


def steps_of(route: type[Preparation], passes: Sequence[Pass] | None = None) -> list[Pass]:
    """The steps of a route.

    Args:
        passes: some of them; None means all of `PIPELINE`.

    >>> from horizon_plugin_pytorch.passes.preparation import TracedPreparation
    >>> [step.name for step in steps_of(TracedPreparation)][:3]
    ['write_later', 'follow_training', 'follow_writes']
    """
    return [step for step in (PIPELINE if passes is None else passes) if step.is_for(route)]


def run_passes(prep: Preparation, passes: Sequence[Pass] | None = None) -> None:
    """Run the steps of a preparation's route, one after the other."""
    run_steps(prep, steps_of(type(prep), passes))
