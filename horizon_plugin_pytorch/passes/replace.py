"""Functions and tensor methods become modules, so that each has a place for its quantization parameters."""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx, nn

from horizon_plugin_pytorch.capture.numbers import note_numbers, places_of_numbers, with_numbers
from horizon_plugin_pytorch.capture.region import called_path, computed_value, is_code, is_fact, is_size, row_of_node
from horizon_plugin_pytorch.config.choice import Choice, inherited_choice
from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at, source_line
from horizon_plugin_pytorch.nn.quantized.functional_modules import row_name_of
from horizon_plugin_pytorch.operators.table import (
    AS_IT_IS,
    Binder,
    Call,
    Kind,
    NotBindable,
    Operator,
    Trait,
    row_named,
    row_of_function,
    row_of_method,
)
from horizon_plugin_pytorch.passes.checks import check_memory, check_real, check_seen, is_float
from horizon_plugin_pytorch.passes.generated import GENERATED, free_name, has_attribute, quantize_constants
from horizon_plugin_pytorch.passes.generated import Aside as Aside  # pickles of before find it here
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.passes.refusals import spelled, unsupported
from horizon_plugin_pytorch.runtime.call_site import Variant
from horizon_plugin_pytorch.runtime.node_notes import inherit, notes
from horizon_plugin_pytorch.runtime.stochastic import BY_CHANCE
from horizon_plugin_pytorch.runtime.wrapped import name_of


def binder_of(node: fx.Node) -> tuple[Operator, Binder] | None:
    """The row and binder of a function or tensor method."""
    if node.op == "call_function":
        return row_of_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    return row_of_method(str(node.target), node.args, node.kwargs) if node.op == "call_method" else None


def replace_functions(prep: Preparation) -> None:
    """Replace every function and method in the quantized part that needs a scale of its own.

    Raises:
        UnsupportedOperatorError: for an operator of the quantized part that has no quantized form.
    """
    model, region, march = prep.model, prep.region, prep.march
    check_memory(prep)
    for node in list(model.graph.nodes):
        if node not in region or node.op == "placeholder" or is_code(model, node):
            continue  # wrapped code takes what it is given, and quantizes it where it meets quantized tensors
        if is_float(prep, node):
            _leave_alone(prep, node)
            continue  # the user keeps this part float; a QTensor that reaches it raises with a remedy
        check_seen(node)
        if notes(node).is_stochastic:
            prep.variants(node).append(BY_CHANCE)
            continue
        if called_path(model, node) is not None:
            called = row_of_node(model, node)
            if called is not None:
                _spare_results(node, called)
            is_scalar = node.op == "call_method" and str(node.target).endswith("_scalar")  # of a FloatFunctional
            if called is None or not (called.is_real or is_scalar):
                quantize_constants(prep, node)
            continue
        if node.kwargs.get("out") is not None:
            where = at(notes(node).scope, source_line(node.stack_trace))
            raise UnsupportedOperatorError(
                f"`{spelled(node)}` {where} has no quantized form with `out`: use its result."
            )
        check_real(prep, node)
        found = binder_of(node)
        if found is None:
            # torch.fx writes a dataclass that the forward returns as a call of its class.
            is_read = is_fact(node) or node.target is getattr or dataclasses.is_dataclass(node.target)
            if not (is_read or getattr(node.target, "__horizon_leaf__", False)):
                raise unsupported(spelled(node), node, march, None)
            continue
        row, bind = found
        if row.qat is None:  # it keeps the scale, and runs as it is
            if row.support(march) is None:
                raise unsupported(spelled(node), node, march, row)
            if row.is_source:
                quantize_constants(prep, node)
            continue
        if row.needs_qconfig and region.kinds(node) in ((Kind.INDEX,), (Kind.BOOL,)):
            _leave_alone(prep, node)
            continue  # a choice between positions, by booleans of the quantized part; or a write of booleans
        call, module, advice, numbers = _bound(model, node, row, bind)
        if call is AS_IT_IS and row.support(march) is not None:
            _leave_alone(prep, node)
            continue
        if call is None or module is None or row.support(march) is None:
            raise unsupported(spelled(node), node, march, row, advice)
        written = None if call.method is None else row_named(row_name_of(call.method, call.args))
        if written is not None and written.support(march) is None:
            raise unsupported(f"{spelled(node)} with a number", node, march, written)
        new = _replace(prep, node, row.name, call, module, numbers)
        region.replace(node, new)
        quantize_constants(prep, new)
    model.recompile()


def _bound(
    model: fx.GraphModule, node: fx.Node, row: Operator, bind: Binder
) -> tuple[Call | None, nn.Module | None, str, tuple[int, ...]]:
    """A function's call as a module takes it, that module, what to write instead if there is none, and which of its
    arguments are tensors that were read as numbers.
    """
    call, module, advice, before = None, None, "", (node.args, node.kwargs)
    for is_eager in (False, True):
        is_taken = is_eager or Trait.NUMBERS in row.traits
        after = with_numbers(model, before, is_eager) if is_taken else before
        try:
            call = bind(*after[0], **after[1])
            module = call.make() if isinstance(call, Call) else None
        except NotBindable as error:
            advice = advice or str(error)
            continue
        except TypeError:  # arguments that the function's signature does not have
            continue
        if isinstance(call, Call):
            call, module = _by_size(node, row, bind, call, module)
        numbers = places_of_numbers(before, after)
        if numbers and notes(node).site is None:
            note_numbers(model, before, after)
        return call, module, advice, numbers
    return None, None, advice, ()


def _by_size(
    node: fx.Node, row: Operator, bind: Binder, call: Call, module: nn.Module | None
) -> tuple[Call, nn.Module | None]:
    """A quotient whose divisor is a size, as ``x / math.sqrt(x.size(-1))``: a product with a number, as by running."""
    x, divisor = (*call.args, None, None)[:2]
    if Trait.QUOTIENT not in row.traits or not (isinstance(divisor, fx.Node) and is_size(divisor)):
        return call, module
    with node.graph.inserting_before(node):
        reciprocal = node.graph.call_function(operator.truediv, (1.0, divisor))
    product = bind(x, 1.0)
    assert isinstance(product, Call)
    return dataclasses.replace(product, args=(x, reciprocal)), product.make()


def _spare_results(node: fx.Node, row: Operator) -> None:
    """Leave out results that nobody reads, where a module can; arguments that the user gives by position stay."""
    for position, arguments in row.unless_read.items():
        readers = [user for user in node.users if user.users]
        is_read = any(user.target is not operator.getitem or user.args[1] == position for user in readers)
        if readers and not is_read and len(node.args) <= 3:
            node.kwargs = {**node.kwargs, **arguments}


def replace_fusable(prep: Preparation) -> None:
    """Replace the functions that fusion knows (add, relu) wherever they are, and leave all others."""
    model = prep.model
    for node in list(model.graph.nodes):
        found = binder_of(node) if called_path(model, node) is None else None
        if found is None or Trait.FUSED not in found[0].traits:
            continue
        call = found[1](*node.args, **node.kwargs)
        if call is not None and call.method in (None, "add") and all(isinstance(a, fx.Node) for a in call.args):
            _replace(prep, node, found[0].name, call, call.make())
    model.recompile()


def _replace(
    prep: Preparation, node: fx.Node, name: str, call: Call, module: nn.Module, numbers: tuple[int, ...] = ()
) -> fx.Node:
    """Put a generated module in place of a function node; a line that runs again calls the same module."""
    model, scope, variants = prep.model, notes(node).scope, prep.variants(node)
    path = next((v.path for v in variants if not v.differences(call, lambda path: None)), "")
    if path:
        _require_one_weight(model, node, path, call)
    else:
        path = _wrapped_path(model, node, call) or _repetition(prep, node) or free_name(prep, scope, name)
        model.add_submodule(path, module.train(model.training))
        variants.append(Variant.of(path, call, numbers))
        for setting in call.settings.values():
            if isinstance(setting, fx.Node) and notes(setting).is_weight:
                notes(setting).weight_of = (*notes(setting).weight_of, path)
    prep.choices.setdefault(path, (inherited_choice(prep.choices, scope) or Choice(None)).below())
    with model.graph.inserting_before(node):
        if call.method is None:
            new = model.graph.call_module(path, call.args, call.kwargs)
        else:
            owner = model.graph.create_node("get_attr", path)
            new = model.graph.call_method(call.method, (owner, *call.args), call.kwargs)
    inherit(new, node, f"replace {name}")
    node.replace_all_uses_with(new)
    model.graph.erase_node(node)
    return new


def _require_one_weight(model: fx.GraphModule, node: fx.Node, path: str, call: Call) -> None:
    """Insist that a line which runs again computes the weight of its layer to the same numbers: integers have one.

    Raises:
        UnsupportedOperatorError: names the line.
    """
    weights = [s for s in call.settings.values() if isinstance(s, fx.Node)]
    first = [n for n in model.graph.nodes if path in notes(n).weight_of] if weights else []
    if not first or first[0] is weights[0]:
        return
    with torch.no_grad():
        is_same = torch.equal(computed_value(model, first[0]), computed_value(model, weights[0]))
    if not is_same:
        raise UnsupportedOperatorError(
            f"`{spelled(node)}` {at(notes(node).scope, source_line(node.stack_trace))} runs several times, with "
            "weights that are computed to different numbers, and is one layer. Write the calls on lines of their "
            "own, or keep the weights as buffers of the model."
        )


def _wrapped_path(model: fx.GraphModule, node: fx.Node, call: Call) -> str:
    """The module of a call in code that tracing does not enter; "" for other calls."""
    known = notes(node)
    if not known.is_wrapped or known.site is None:
        return ""
    scope, name = known.scope, name_of(known.site, call)
    while has_attribute(model, scope, f"{GENERATED}{name}"):  # of another function of the same name
        name = f"{name}_"
    known.generated_name = name
    return f"{scope}.{GENERATED}{name}".lstrip(".")


def _repetition(prep: Preparation, node: fx.Node) -> str:
    """The name for a line that runs again and has own scales; other lines keep theirs, with own scales or without."""
    site = notes(node).site
    if site is None or not site.occurrence:
        return ""
    variants, first = prep.sites[site], prep.sites.get(dataclasses.replace(site, occurrence=0), [])
    known = first[len(variants)] if len(variants) < len(first) else None
    return f"{known.path}_call_{site.occurrence}" if isinstance(known, Variant) else ""


def _leave_alone(prep: Preparation, node: fx.Node) -> None:
    """The call site is known, and has no module."""
    prep.variants(node)
