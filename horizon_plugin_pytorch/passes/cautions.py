"""Warnings about the quantized part as a whole."""

from __future__ import annotations

from horizon_plugin_pytorch.capture.region import called_path, module_at, operands, row_of_node
from horizon_plugin_pytorch.config.choice import NO_SETTER, inherited_choice
from horizon_plugin_pytorch.errors import QuantizationWarning, at, listed, source_line, warn, warn_once
from horizon_plugin_pytorch.fake_quant.fake_cast import is_cast
from horizon_plugin_pytorch.operators.table import Kind, ScaleRule, Trait
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.passes.refusals import spelled
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.runtime.stochastic import is_draw


def warn_unquantized(prep: Preparation) -> None:
    """Name what stays float in the quantized part because it has no qconfig: it cannot run there."""
    model, region, choices = prep.model, prep.region, prep.choices
    float_modules, left, total = [], [], 0
    for node in prep.graph.nodes:
        path, row = called_path(model, node), row_of_node(model, node) if node in region else None
        if row is None or row.qat is None or not row.needs_qconfig:
            continue
        if path is None and region.kinds(node) in ((Kind.INDEX,), (Kind.BOOL,)):
            continue  # left alone, whatever the qconfig
        total += 1
        choice = inherited_choice(choices, notes(node).scope if path is None else path)
        if choice is None or choice.qconfig is None:
            left.append(choice)
            where = at(notes(node).scope if path is None else path, source_line(node.stack_trace))
            float_modules.append(f"{spelled(node)} {where}" if path is None else where.removeprefix("at "))
    if not float_modules:
        return
    if len(float_modules) == total:
        text = (
            "no module has a qconfig, so nothing is quantized. Give a setter, such as "
            "`qconfig_setter=default_qat_qconfig_setter`, or one qconfig for the whole model, `qconfig_dict={'': "
            "default_qat_8bit_fake_quant_qconfig}` or `model.qconfig = ...`."
        )
    else:
        shown = listed(float_modules)
        unset = sum(1 for choice in left if choice and any(step.rule == NO_SETTER for step in choice.steps))
        text = (
            f"no setter gives {shown} a qconfig. One for single operators (sensitive_op_..., ModuleNameQconfigSetter) "
            "needs one for all others behind it: `qconfig_setter=(that, default_calibration_qconfig_setter)`."
            if unset == len(left)
            else f"{shown} has qconfig None but gets quantized tensors, on which a float module cannot run. Give it a "
            "qconfig, or put a DeQuantStub before and a QuantStub after it."
        )
    warn(f"`{model._get_name()}`: {text}", QuantizationWarning)


def warn_quotients(prep: Preparation) -> None:
    """Name the logarithms of quotients: these span more than one scale can hold, as in the inverse of sigmoid."""
    model, region = prep.model, prep.region
    places: dict[str, None] = {}
    for node in prep.graph.nodes:
        row = row_of_node(model, node) if node in region else None
        sources = operands(model, node) if row is not None and Trait.LOGARITHM in row.traits else []
        names = [found.name for found in (row_of_node(model, source) for source in sources) if found is not None]
        if "div" in names:
            places[at(notes(node).scope, source_line(node.stack_trace)).removeprefix("at ")] = None
    if places:
        warn_once(
            f"`{model._get_name()}`: the logarithm of a quotient ({', '.join(places)}): a quotient of numbers near 0 "
            "spans more than one scale can hold, and its small values are lost. Write `torch.log(x) - torch.log(y)`; "
            "for the inverse of sigmoid, `torch.logit(x, eps)`.",
            QuantizationWarning,
        )


def warn_shared(prep: Preparation) -> None:
    """Name the modules that several lines call although they have one scale: it must fit the results of all calls."""
    model, region = prep.model, prep.region
    calls: dict[int, tuple[str, list[str]]] = {}
    for node in prep.graph.nodes:
        path = called_path(model, node)
        row = None if path is None or node not in region else row_of_node(model, node)
        if path is None or row is None or row.scale_rule is not ScaleRule.OWN:
            continue
        choice = prep.choices.get(path)
        activation = None if choice is None or choice.qconfig is None else choice.qconfig.activation
        if activation is not None and not is_cast(activation):
            calls.setdefault(id(module_at(model, path)), (path, []))[1].append(source_line(node.stack_trace))
    shared = [
        f"`{path}` ({len(lines)} calls, {', '.join(dict.fromkeys(line for line in lines if line))})"
        for path, lines in calls.values()
        if len(lines) > 1
    ]
    if shared:
        shown = listed(shared)
        warn_once(
            f"`{model._get_name()}`: one scale must fit the results of several calls of {shown}, and the call with the "
            "smaller values loses precision. Give each call a module of its own, or scales of its own (own_scales=True "
            "of `prepare`). A layer that is called several times to share its weights can stay as it is if its results "
            "have similar ranges.",
            QuantizationWarning,
        )


def warn_random(prep: Preparation) -> None:
    """Name the lines that draw random numbers in eval mode too: nobody can repeat what the model computes."""
    lines = {
        source_line(node.stack_trace): None
        for node in prep.graph.nodes
        if is_draw(node) and not notes(node).is_training_only
    }
    if lines:
        warn(
            f"`{prep.name}`: its forward draws random numbers in eval mode, too ({listed(lines)}): two runs of the "
            "prepared or converted model differ, and an exported file has those for ever that are drawn when it is "
            "written. Draw them only `if self.training`, or make them an input of the model.",
            QuantizationWarning,
        )
