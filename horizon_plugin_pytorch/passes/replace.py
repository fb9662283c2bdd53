"""Functions and tensor methods become modules, so that each has a place for its quantization parameters."""

from __future__ import annotations

import inspect
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.capture.container_writes import CONTAINER_REMEDY, is_of_container
from horizon_plugin_pytorch.capture.numbers import note_numbers, places_of_numbers, with_numbers
from horizon_plugin_pytorch.capture.region import (
    Region,
    called_path,
    has_stub,
    is_code,
    is_constant,
    is_fact,
    is_size,
    module_at,
    operands,
    row_of_node,
)
from horizon_plugin_pytorch.config.choice import NO_SETTER, Choice, inherited_choice
from horizon_plugin_pytorch.config.resolve import needs_activation
from horizon_plugin_pytorch.errors import (
    QuantizationWarning,
    UnsupportedOperatorError,
    at,
    listed,
    source_line,
    warn,
)
from horizon_plugin_pytorch.fake_quant.fake_cast import is_cast
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nn.quantized.functional_modules import row_name_of
from horizon_plugin_pytorch.nn.stubs import QuantStub
from horizon_plugin_pytorch.operators.table import (
    AS_IT_IS,
    NO_FORM,
    Binder,
    Call,
    Kind,
    NotBindable,
    Operator,
    ScaleRule,
    Trait,
    advice_for,
    row_named,
    row_of_function,
    row_of_method,
    row_of_module,
)
from horizon_plugin_pytorch.runtime.call_site import Variant
from horizon_plugin_pytorch.runtime.node_notes import inherit, notes
from horizon_plugin_pytorch.runtime.stochastic import BY_CHANCE
from horizon_plugin_pytorch.runtime.wrapped import name_of


def _spell(node: fx.Node) -> str:
    if node.op == "call_method":
        return f"torch.Tensor.{node.target}"
    module = getattr(node.target, "__module__", "") or ""
    name = getattr(node.target, "__name__", str(node.target))
    return f"{module.removeprefix('_')}.{name}" if module else f"torch.{name}"


def _unsupported(
    what: str, node: fx.Node, march: March, row: Operator | None, advice: str = ""
) -> UnsupportedOperatorError:
    where = at(str(node.target) if node.op == "call_module" else notes(node).scope, source_line(node.stack_trace))
    if is_of_container(node):
        return UnsupportedOperatorError(f"`{node.target}` {where} {CONTAINER_REMEDY}")
    if row is not None and row.support(march) is None:
        advice = (
            f"it is supported on {', '.join(row.march_names)}. Choose one of these with set_march, replace it by a "
            "supported operator, or move it after the DeQuantStub"
        )
    elif row is not None:
        advice = advice or "these arguments have no quantized form; write it with simpler operators"
    else:
        advice = advice_for(node.target) or NO_FORM
    return UnsupportedOperatorError(f"`{what}` {where} has no quantized form on {march}: {advice}.")


def binder_of(node: fx.Node) -> tuple[Operator, Binder] | None:
    """The row and binder of a function or tensor method."""
    if node.op == "call_function":
        return row_of_function(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    return row_of_method(str(node.target), node.args, node.kwargs) if node.op == "call_method" else None


GENERATED = "_generated_"


def _free_name(model: Any, scope: str, operator: str, counters: dict[tuple[str, str], int]) -> str:
    """A name for a generated module that nothing in the scope has: neither of an earlier pass, nor of the user's."""
    while True:
        index = counters.get((scope, operator), 0)
        counters[scope, operator] = index + 1
        name = f"{GENERATED}{operator}_{index}"
        if not _has_attribute(model, scope, name):
            return f"{scope}.{name}" if scope else name


def replace_functions(
    model: fx.GraphModule, quantized: Region, choices: dict[str, Choice], march: March
) -> fx.GraphModule:
    """Replace every function and method in the quantized part that needs a scale of its own.

    Raises:
        UnsupportedOperatorError: for an operator of the quantized part that has no quantized form.
    """
    counters: dict[tuple[str, str], int] = {}
    _check_memory(model, quantized, choices)
    for node in list(model.graph.nodes):
        if node not in quantized or node.op == "placeholder" or is_code(model, node):
            continue  # wrapped code takes what it is given, and quantizes it where it meets quantized tensors
        if _is_float(model, node, choices):
            _leave_alone(model, node)
            continue  # the user keeps this part float; a QTensor that reaches it raises with a remedy
        _check_seen(node)
        if notes(node).is_chance:
            _variants(model, node).append(BY_CHANCE)
            continue
        if called_path(model, node) is not None:
            called = row_of_node(model, node)
            if called is not None:
                _spare_results(node, called)
            is_scalar = node.op == "call_method" and str(node.target).endswith("_scalar")  # of a FloatFunctional
            if called is None or not (called.is_real or is_scalar):
                _quantize_constants(model, node, quantized, choices, counters)
            continue
        if node.kwargs.get("out") is not None:
            where = at(notes(node).scope, source_line(node.stack_trace))
            raise UnsupportedOperatorError(
                f"`{_spell(node)}` {where} has no quantized form with `out`: use its result."
            )
        _check_real(node, quantized)
        found = binder_of(node)
        if found is None:
            is_read = is_fact(node) or node.target is getattr
            if not (is_read or getattr(node.target, "__horizon_leaf__", False)):
                raise _unsupported(_spell(node), node, march, None)
            continue
        row, bind = found
        if row.qat is None:  # it keeps the scale, and runs as it is
            if row.support(march) is None:
                raise _unsupported(_spell(node), node, march, row)
            if row.is_source:
                _quantize_constants(model, node, quantized, choices, counters)
            continue
        if row.needs_qconfig and quantized.kinds(node) in ((Kind.INDEX,), (Kind.BOOL,)):
            _leave_alone(model, node)
            continue  # a choice between positions, by booleans of the quantized part; or a write of booleans
        call, module, advice, numbers = _bound(model, node, row, bind)
        if call is AS_IT_IS and row.support(march) is not None:
            _leave_alone(model, node)
            continue
        if call is None or module is None or row.support(march) is None:
            raise _unsupported(_spell(node), node, march, row, advice)
        written = None if call.method is None else row_named(row_name_of(call.method, call.args))
        if written is not None and written.support(march) is None:
            raise _unsupported(f"{_spell(node)} with a number", node, march, written)
        new = _replace(model, node, row.name, call, module, choices, counters, numbers)
        quantized.replace(node, new)
        _quantize_constants(model, new, quantized, choices, counters)
    model.recompile()
    return model


# Operators one of whose operands may be a number; others take tensors only, such as `torch.maximum`.
_TAKES_NUMBERS = frozenset(
    "add sub mul div pow where masked_fill assign eq ne lt le gt ge add_scalar mul_scalar".split()
)


def _bound(
    model: fx.GraphModule, node: fx.Node, row: Operator, bind: Binder
) -> tuple[Call | None, nn.Module | None, str, tuple[int, ...]]:
    """A function's call as a module takes it, that module, what to write instead if there is none, and which of its
    arguments are tensors that were read as numbers.
    """
    call, module, advice, before = None, None, "", (node.args, node.kwargs)
    for is_eager in (False, True):
        is_taken = is_eager or row.name in _TAKES_NUMBERS
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
    if row.name != "div" or not (isinstance(divisor, fx.Node) and is_size(divisor)):
        return call, module
    with node.graph.inserting_before(node):
        reciprocal = node.graph.call_function(operator.truediv, (1.0, divisor))
    product = bind(x, 1.0)
    assert isinstance(product, Call)
    return replace(product, args=(x, reciprocal)), product.make()


def _is_float(model: fx.GraphModule, node: fx.Node, choices: dict[str, Choice]) -> bool:
    """Is the module that a node calls without a qconfig, or the module whose forward calls a function?"""
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    path = called_path(model, node)
    choice = inherited_choice(choices, notes(node).scope if path is None else path)
    return choice is None or choice.qconfig is None


def _check_real(node: fx.Node, quantized: Region) -> None:
    """Insist that functions of this package which compute in float do it outside of the quantized part."""
    remedy = getattr(node.target, "__horizon_float__", "")
    if remedy and any(quantized.has_scale(source) for source in node.all_input_nodes):
        where = at(notes(node).scope, source_line(node.stack_trace))
        raise UnsupportedOperatorError(f"`{_spell(node)}` {where} computes in float and gets a QTensor: {remedy}.")


def _check_seen(node: fx.Node) -> None:
    """Insist that the prepared model sees what is computed."""
    if notes(node).is_unseen:
        raise UnsupportedOperatorError(
            f"`{node.target}` {at(notes(node).scope, source_line(node.stack_trace))} is called by code that torch does "
            "not report, such as a function of `torch.jit.script` or a C++ extension, and cannot be quantized there. "
            "Use the Python function itself, or put a DeQuantStub before and a QuantStub after it."
        )


def _check_memory(model: fx.GraphModule, quantized: Region, choices: dict[str, Choice]) -> None:
    """Insist that no quantized tensor is changed behind its back, and that none is written into a state of the model.

    Raises:
        UnsupportedOperatorError: names the call that reads, and the one that wrote.
    """
    for node in model.graph.nodes:
        known = notes(node)
        by, given_by = known.stale_by, known.handed_out_stale
        known.stale_by = known.handed_out_stale = None  # a copy of the graph would copy these nodes
        if _is_float(model, node, choices):
            continue  # torch does there what it does in float
        if by is not None and any(quantized.has_scale(n) for n in (*node.all_input_nodes, by)):
            raise _stale(f"`{_called(node)}` {at(notes(node).scope, source_line(node.stack_trace))} reads", by)
        if given_by is not None and (quantized.has_scale(node) or quantized.has_scale(given_by)):
            raise _stale("the model gives", given_by)
        target = node.args[0] if known.writes and node.args else None
        is_state = isinstance(target, fx.Node) and target.op == "get_attr" and called_path(model, node) is None
        if is_state and quantized.has_scale(node):
            raise UnsupportedOperatorError(
                f"`{_called(node)}` {at(known.scope, source_line(node.stack_trace))} would write quantized values "
                f"into `{target.target}`, a parameter or buffer; write to a `clone()` of it."  # type: ignore[union-attr]
            )


def _called(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else _spell(node)


def _stale(reader: str, by: fx.Node) -> UnsupportedOperatorError:
    line = source_line(by.stack_trace)
    return UnsupportedOperatorError(
        f"{reader} a tensor whose memory `{_called(by)}`{f' ({line})' if line else ''} changed in place through "
        "another tensor, such as a view, which tensors with a scale cannot express. Write to the tensor itself, as in "
        "`x[:, 0] = y`, or make a new one, as in `x = x + 1`."
    )


def _spare_results(node: fx.Node, row: Operator) -> None:
    """Leave out results that nobody reads, where a module can; arguments that the user gives by position stay."""
    for position, arguments in row.unless_read.items():
        readers = [user for user in node.users if user.users]
        is_read = any(user.target is not operator.getitem or user.args[1] == position for user in readers)
        if readers and not is_read and len(node.args) <= 3:
            node.kwargs = {**node.kwargs, **arguments}


def replace_fusable(model: fx.GraphModule, choices: dict[str, Choice]) -> fx.GraphModule:
    """Replace the functions that fusion knows (add, relu) wherever they are, and leave all others."""
    counters: dict[tuple[str, str], int] = {}
    for node in list(model.graph.nodes):
        found = binder_of(node) if called_path(model, node) is None else None
        if found is None or found[0].name not in ("add", "relu", "relu6"):
            continue
        call = found[1](*node.args, **node.kwargs)
        if call is not None and call.method in (None, "add") and all(isinstance(a, fx.Node) for a in call.args):
            _replace(model, node, found[0].name, call, call.make(), choices, counters)
    model.recompile()
    return model


def _replace(
    model: fx.GraphModule,
    node: fx.Node,
    name: str,
    call: Call,
    module: nn.Module,
    choices: dict[str, Choice],
    counters: dict[tuple[str, str], int],
    numbers: tuple[int, ...] = (),
) -> fx.Node:
    """Put a generated module in place of a function node; a line that runs again calls the same module."""
    scope = notes(node).scope
    variants = _variants(model, node)
    path = next((v.path for v in variants if not v.differences(call, lambda path: None)), "")
    if not path:
        path = _wrapped_path(model, node, call) or _repetition(model, node) or _free_name(model, scope, name, counters)
        model.add_submodule(path, module.train(model.training))
        variants.append(Variant.of(path, call, numbers))
        for setting in call.settings.values():
            if isinstance(setting, fx.Node) and notes(setting).is_weight:
                notes(setting).weight_of = (*notes(setting).weight_of, path)
    choices.setdefault(path, (inherited_choice(choices, scope) or Choice(None)).below())
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


def _wrapped_path(model: fx.GraphModule, node: fx.Node, call: Call) -> str:
    """The module of a call in code that tracing does not enter; "" for other calls."""
    known = notes(node)
    if not known.is_wrapped or known.site is None:
        return ""
    scope, name = known.scope, name_of(known.site, call)
    while _has_attribute(model, scope, f"{GENERATED}{name}"):  # of another function of the same name
        name = f"{name}_"
    known.generated_name = name
    return f"{scope}.{GENERATED}{name}".lstrip(".")


def _variants(model: fx.GraphModule, node: fx.Node) -> list[Variant]:
    """The modules that were made for the call site of a node; none for nodes that were traced."""
    site = notes(node).site
    return [] if site is None else model.__dict__.setdefault("sites", {}).setdefault(site, [])


def _repetition(model: fx.GraphModule, node: fx.Node) -> str:
    """The name for a line that runs again and has own scales; other lines keep theirs, with own scales or without."""
    site = notes(node).site
    if site is None or not site.occurrence:
        return ""
    sites = model.__dict__["sites"]
    variants, first = sites[site], sites.get(replace(site, occurrence=0), [])
    known = first[len(variants)] if len(variants) < len(first) else None
    return f"{known.path}_call_{site.occurrence}" if isinstance(known, Variant) else ""


def _leave_alone(model: fx.GraphModule, node: fx.Node) -> None:
    """The call site is known, and has no module."""
    _variants(model, node)


def _quantize_constants(
    model: fx.GraphModule,
    node: fx.Node,
    quantized: Region,
    choices: dict[str, Choice],
    counters: dict[tuple[str, str], int],
) -> None:
    """Parameters and buffers that meet quantized tensors get a QuantStub, except before a QuantStub and as indices."""
    row = row_of_node(model, node)
    if row is not None and row.is_quant:
        return
    indices = _indices(node) if row is not None and row.is_source else None
    counts = _counts(node, row)
    for source in list(node.all_input_nodes):
        if source in quantized or source is indices:
            continue
        is_number = is_constant(model, source) or (source in counts and is_constant(model, source, counts[source]))
        if not is_number or _stays_real(model, node, source):
            continue
        outer = (inherited_choice(choices, notes(node).scope) or Choice(None)).below()
        insert_stub(model, node, source, quantized, choices, counters, outer, "quantize constant")


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _counts(node: fx.Node, row: Operator | None) -> dict[fx.Node, tuple[torch.dtype, ...]]:
    """Operands that may be integers or booleans and count as numbers, with those types."""
    counts = None if row is None else row.counts
    if counts is None:
        return {}
    args = node.args[1:] if node.op == "call_method" else node.args
    types = (*_INTEGERS, torch.bool) if counts.has_booleans else _INTEGERS
    found: list[fx.Node] = []
    fx.node.map_arg(args[counts.first : counts.end], lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return dict.fromkeys(found, types)


def _indices(node: fx.Node) -> Any:
    """The argument of an embedding that selects rows."""
    position, name = (1, "indices") if node.target is torch.embedding else (0, "input")
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


ASIDE = "_generated_stubs"


def insert_stub(
    model: fx.GraphModule,
    node: fx.Node,
    source: fx.Node,
    region: Region,
    choices: dict[str, Choice],
    counters: dict[tuple[str, str], int],
    choice: Choice,
    made_by: str,
    places: list[int] | None = None,
    requantizes: bool = False,
) -> None:
    """Put a QuantStub of that qconfig between a node and one of its inputs.

    Args:
        places: which leaves of the node's arguments; None means all that are `source`.
        requantizes: give integers the stub's format too, rather than let them pass.
    """
    # A call that is written once and runs again has one stub for each of its arguments.
    stubs: dict[Any, str] = {} if isinstance(model, fx.GraphModule) else model.__dict__.setdefault("stubs", {})
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    if places is None:
        places = [i for i, leaf in enumerate(leaves) if leaf is source]
    key = called_path(model, node), places[0]
    path = stubs.get(key, "")
    if not path:
        scope = str(node.target).rpartition(".")[0] if node.op == "call_module" else notes(node).scope
        scope = _home(model, scope)
        path = _stub_path(node, scope, places[0])
        if not path or _has_attribute(model, *path.rpartition(".")[::2]):
            path = _free_name(model, scope, "quant", counters)
        stubs[key] = path
        made = QuantStub().train(model.training)
        made.requantizes, made.may_be_constant = requantizes, not requantizes
        model.add_submodule(path, made)
        choices.setdefault(path, choice)
    with model.graph.inserting_before(node):
        stub = model.graph.call_module(path, (source,))
    made_notes = inherit(stub, node, made_by)
    made_notes.members, made_notes.is_made = (), True
    region.add(stub)
    node.args, node.kwargs = pytree.tree_unflatten([stub if i in places else x for i, x in enumerate(leaves)], spec)


def _stub_path(node: fx.Node, scope: str, place: int) -> str:
    """The stub of a call in code that tracing does not enter; "" for other calls."""
    name = notes(node).generated_name
    return "" if name is None else f"{scope}.{GENERATED}quant_{name}_{place}".lstrip(".")


class Aside(nn.Module):
    """Has the generated stubs of an `nn.Sequential`, which runs all its children: as one of them it does nothing."""

    def forward(self, x: Any) -> Any:
        """The same."""
        return x


def _home(model: fx.GraphModule, scope: str) -> str:
    """Where a generated stub can be: not in a list, whose elements somebody runs one after the other."""
    lists = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    while scope and isinstance(model.get_submodule(scope), lists):
        scope = scope.rpartition(".")[0]
    if scope or not isinstance(model.get_submodule(""), lists):
        return scope
    if not _has_attribute(model, "", ASIDE):
        model.add_submodule(ASIDE, Aside())
    return ASIDE


def _has_attribute(model: fx.GraphModule, scope: str, name: str) -> bool:
    """Does the module at a path have anything of that name? A dynamic block is not there before something is in it."""
    try:
        return hasattr(model.get_submodule(scope), name)
    except AttributeError:
        return False


def _stays_real(model: fx.GraphModule, node: fx.Node, source: fx.Node) -> bool:
    """Does the module that a node calls take this input as real numbers?"""
    row = row_of_node(model, node) if node.op == "call_module" else None
    if row is None or not row.real_inputs:
        return False
    names = inspect.signature(module_at(model, str(node.target)).forward).parameters
    others = [
        v for name, v in [*zip(names, node.args, strict=False), *node.kwargs.items()] if name not in row.real_inputs
    ]
    met: list[fx.Node] = []
    fx.node.map_arg(others, lambda other: met.append(other) or other)  # type: ignore[func-returns-value]
    return source not in met


def check_modules(model: fx.GraphModule, quantized: Region, choices: dict[str, Choice], march: March) -> None:
    """Insist that every module of the quantized part has a quantized form; fusion has run, so a folded one is gone.

    Raises:
        UnsupportedOperatorError: names the module that has none.
        QuantizationConfigError: names the operator that has no high-precision output.
    """
    for node in model.graph.nodes:
        path = called_path(model, node)
        if path is None or node not in quantized:
            continue
        module, choice = module_at(model, path), choices.get(path)
        if choice is not None and choice.qconfig is None:
            continue
        if node.op == "call_method":
            _check_method(node, path, choice, march)
            continue
        row = row_of_module(type(module))
        _check_size(node, row, march)
        if row is not None and row.support(march) is not None:
            continue
        if row is None and not type(module).__module__.startswith("torch."):
            continue  # a module of the user's that symbolic trace was told not to look into
        raise _unsupported(f"{type(module).__module__}.{type(module).__name__}", node, march, row)


def _check_size(node: fx.Node, row: Operator | None, march: March) -> None:
    """Insist that a transposed convolution is not given the size of its result, by which it chooses its padding."""
    if row is None or not row.name.startswith("conv_transpose"):
        return
    if node.kwargs.get("output_size") is not None or any(size is not None for size in node.args[1:]):
        advice = "give the layer the size once, by its `output_padding`, instead of `output_size` at each call"
        raise _unsupported(str(node.target), node, march, row, advice)


def check_operands(model: fx.GraphModule, quantized: Region, choices: dict[str, Choice]) -> None:
    """Insist that float inputs of a recorded model reach its integer operators through a QuantStub.

    Raises:
        UnsupportedOperatorError: names the operator that would compute with numbers that have no scale.
    """
    if not has_stub(model):
        return
    for node in model.graph.nodes:
        path = called_path(model, node)
        row = row_of_node(model, node) if path is not None and node in quantized else None
        choice = choices.get(path or "")
        is_integer = choice is not None and choice.qconfig is not None and not is_cast(choice.qconfig.activation)
        if row is None or row.is_quant or row.is_real or getattr(row.qat, "takes_real", False):
            continue
        if not is_integer or notes(node).is_training_only:
            continue
        for source in operands(model, node):
            is_float = notes(source).dtype == torch.float32 and notes(source).is_beside is False
            is_known = quantized.kinds(source) or notes(source).runs_on_cpu
            if is_float and not is_known and not _stays_real(model, node, source):
                raise UnsupportedOperatorError(
                    f"`{row.name}` {at(path or '', source_line(node.stack_trace))} takes a float tensor that the model "
                    "is given or computes of its inputs outside of the quantized part, and that has no scale. Put a "
                    "QuantStub where it enters the quantized part, as in `self.quant_mask(mask)`."
                )


def warn_unquantized(model: fx.GraphModule, quantized: Region, choices: dict[str, Choice]) -> None:
    """Name what stays float in the quantized part because it has no qconfig: it cannot run there."""
    float_modules, left, total = [], [], 0
    for node in model.graph.nodes:
        path, row = called_path(model, node), row_of_node(model, node) if node in quantized else None
        if row is None or row.qat is None or not row.needs_qconfig:
            continue
        if path is None and quantized.kinds(node) in ((Kind.INDEX,), (Kind.BOOL,)):
            continue  # left alone, whatever the qconfig
        total += 1
        choice = inherited_choice(choices, notes(node).scope if path is None else path)
        if choice is None or choice.qconfig is None:
            left.append(choice)
            where = at(notes(node).scope if path is None else path, source_line(node.stack_trace))
            float_modules.append(f"{_spell(node)} {where}" if path is None else where.removeprefix("at "))
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


def warn_quotients(model: fx.GraphModule, quantized: Region) -> None:
    """Name the logarithms of quotients: these span more than one scale can hold, as in the inverse of sigmoid."""
    places: dict[str, None] = {}
    for node in model.graph.nodes:
        row = row_of_node(model, node) if node in quantized else None
        sources = operands(model, node) if row is not None and Trait.LOGARITHM in row.traits else []
        names = [found.name for found in (row_of_node(model, source) for source in sources) if found is not None]
        if "div" in names:
            places[at(notes(node).scope, source_line(node.stack_trace)).removeprefix("at ")] = None
    if places:
        warn(
            f"`{model._get_name()}`: the logarithm of a quotient ({', '.join(places)}): a quotient of numbers near 0 "
            "spans more than one scale can hold, and its small values are lost. Write `torch.log(x) - torch.log(y)`; "
            "for the inverse of sigmoid, `torch.logit(x, eps)`.",
            QuantizationWarning,
        )


def warn_shared(model: fx.GraphModule, quantized: Region, choices: dict[str, Choice]) -> None:
    """Name the modules that several lines call although they have one scale: it must fit the results of all calls."""
    calls: dict[int, tuple[str, list[str]]] = {}
    for node in model.graph.nodes:
        path = called_path(model, node)
        row = None if path is None or node not in quantized else row_of_node(model, node)
        if path is None or row is None or row.scale_rule is not ScaleRule.OWN:
            continue
        choice = choices.get(path)
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
        warn(
            f"`{model._get_name()}`: one scale must fit the results of several calls of {shown}, and the call with the "
            "smaller values loses precision. Give each call a module of its own, or scales of its own (own_scales=True "
            "of `prepare`). A layer that is called several times to share its weights can stay as it is if its results "
            "have similar ranges.",
            QuantizationWarning,
        )


def _check_method(node: fx.Node, path: str, choice: Choice | None, march: March) -> None:
    """Insist that the march has the operator of a FloatFunctional's method, and that it can give what is asked."""
    row = row_named(row_name_of(str(node.target), node.args[1:]))
    assert row is not None
    if row.support(march) is None:
        raise _unsupported(f"FloatFunctional.{node.target}", node, march, row)
    if choice is None or choice.qconfig.activation is not None or row.has_real_output:
        return
    raise needs_activation(f"`{node.target}` {at(path, source_line(node.stack_trace))}")
