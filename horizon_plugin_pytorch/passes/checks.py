"""What cannot be quantized is refused, with the module and the line."""

from __future__ import annotations

from torch import fx

from horizon_plugin_pytorch.capture.region import called_path, has_stub, module_at, operands, row_of_node
from horizon_plugin_pytorch.config.choice import Choice, inherited_choice
from horizon_plugin_pytorch.config.resolve import needs_activation
from horizon_plugin_pytorch.errors import UnsupportedOperatorError, at, source_line
from horizon_plugin_pytorch.fake_quant.fake_cast import is_cast
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nn.quantized.functional_modules import row_name_of
from horizon_plugin_pytorch.operators.table import Kind, Trait, row_named, row_of_module
from horizon_plugin_pytorch.passes.generated import stays_real
from horizon_plugin_pytorch.passes.preparation import Preparation
from horizon_plugin_pytorch.passes.refusals import called_name, spelled, unsupported
from horizon_plugin_pytorch.runtime.node_notes import notes
from horizon_plugin_pytorch.torch_functions import REAL


def is_float(prep: Preparation, node: fx.Node) -> bool:
    """Is the module that a node calls without a qconfig, or the module whose forward calls a function?"""
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    path = called_path(prep.model, node)
    choice = inherited_choice(prep.choices, notes(node).scope if path is None else path)
    return choice is None or choice.qconfig is None


def check_real(prep: Preparation, node: fx.Node) -> None:
    """Insist that functions of this package which compute in float do it outside of the quantized part."""
    remedy = getattr(node.target, "__horizon_float__", "")
    if remedy and any(prep.region.has_scale(source) for source in node.all_input_nodes):
        where = at(notes(node).scope, source_line(node.stack_trace))
        raise UnsupportedOperatorError(f"`{spelled(node)}` {where} computes in float and gets a QTensor: {remedy}.")


def check_seen(node: fx.Node) -> None:
    """Insist that the prepared model sees what is computed."""
    if notes(node).is_unseen:
        raise UnsupportedOperatorError(
            f"`{node.target}` {at(notes(node).scope, source_line(node.stack_trace))} is called by code that torch does "
            "not report, such as a function of `torch.jit.script` or a C++ extension, and cannot be quantized there. "
            "Use the Python function itself, or put a DeQuantStub before and a QuantStub after it."
        )


def check_memory(prep: Preparation) -> None:
    """Insist that no quantized tensor is changed behind its back, and that none is written into a state of the model.

    Raises:
        UnsupportedOperatorError: names the call that reads, and the one that wrote.
    """
    region = prep.region
    for node in prep.graph.nodes:
        known = notes(node)
        by, given_by = known.stale_by, known.handed_out_stale
        known.stale_by = known.handed_out_stale = None  # a copy of the graph would copy these nodes
        if is_float(prep, node):
            continue  # torch does there what it does in float
        if by is not None and any(region.has_scale(n) for n in (*node.all_input_nodes, by)):
            raise _stale(f"`{called_name(node)}` {at(notes(node).scope, source_line(node.stack_trace))} reads", by)
        if given_by is not None and (region.has_scale(node) or region.has_scale(given_by)):
            raise _stale("the model gives", given_by)
        target = node.args[0] if known.writes and node.args else None
        is_state = isinstance(target, fx.Node) and target.op == "get_attr" and called_path(prep.model, node) is None
        if is_state and region.has_scale(node):
            raise UnsupportedOperatorError(
                f"`{called_name(node)}` {at(known.scope, source_line(node.stack_trace))} would write quantized values "
                f"into {_named(target)}; write to a `clone()` of it."  # type: ignore[arg-type]
            )


def _named(state: fx.Node) -> str:
    """A tensor of the model, as its user knows it."""
    is_unnamed = str(state.target).rpartition(".")[2].startswith(("_tensor_constant", "_constant_"))
    return "a tensor that is no attribute of a module" if is_unnamed else f"`{state.target}`, a tensor of the model"


def _stale(reader: str, by: fx.Node) -> UnsupportedOperatorError:
    line = source_line(by.stack_trace)
    return UnsupportedOperatorError(
        f"{reader} a tensor whose memory `{called_name(by)}`{f' ({line})' if line else ''} changed in place through "
        "another tensor, such as a view, which tensors with a scale cannot express. Write to the tensor itself, as in "
        "`x[:, 0] = y`, or make a new one, as in `x = x + 1`."
    )


def check_modules(prep: Preparation) -> None:
    """Insist that every module of the quantized part has a quantized form; fusion has run, so a folded one is gone.

    Raises:
        UnsupportedOperatorError: names the module that has none.
        QuantizationConfigError: names the operator that has no high-precision output.
    """
    march = prep.march
    for node in prep.graph.nodes:
        path = called_path(prep.model, node)
        if path is None or node not in prep.region:
            continue
        module, choice = module_at(prep.model, path), prep.choices.get(path)
        if choice is not None and choice.qconfig is None:
            continue
        if node.op == "call_method":
            _check_method(node, path, choice, march)
            continue
        row = row_of_module(type(module))
        if row is not None and row.support(march) is not None:
            continue
        if row is None and not type(module).__module__.startswith("torch."):
            continue  # a module of the user's that symbolic trace was told not to look into
        raise unsupported(f"{type(module).__module__}.{type(module).__name__}", node, march, row)


def check_sizes(prep: Preparation) -> None:
    """Insist that no transposed convolution is given the size of its result, by which it chooses its padding.

    Before fusion, which takes the layer's input alone.
    """
    for node in prep.graph.nodes:
        row = row_of_node(prep.model, node) if node.op == "call_module" and node in prep.region else None
        if row is None or Trait.SIZED not in row.traits:
            continue
        choice = prep.choices.get(str(node.target))
        is_sized = node.kwargs.get("output_size") is not None or any(size is not None for size in node.args[1:])
        if is_sized and (choice is None or choice.qconfig is not None):
            advice = "give the layer the size once, by its `output_padding`, instead of `output_size` at each call"
            raise unsupported(str(node.target), node, prep.march, row, advice)


def _check_method(node: fx.Node, path: str, choice: Choice | None, march: March) -> None:
    """Insist that the march has the operator of a FloatFunctional's method, and that it can give what is asked."""
    row = row_named(row_name_of(str(node.target), node.args[1:]))
    assert row is not None
    if row.support(march) is None:
        raise unsupported(f"FloatFunctional.{node.target}", node, march, row)
    if choice is None or choice.qconfig.activation is not None or row.has_real_output:
        return
    raise needs_activation(f"`{node.target}` {at(path, source_line(node.stack_trace))}")


def check_operands(prep: Preparation) -> None:
    """Insist that float inputs of a recorded model reach its integer operators through a QuantStub.

    Raises:
        UnsupportedOperatorError: names the operator that would compute with numbers that have no scale.
    """
    model, region = prep.model, prep.region
    if not has_stub(model):
        return
    for node in prep.graph.nodes:
        path = called_path(model, node)
        row = row_of_node(model, node) if path is not None and node in region else None
        choice = prep.choices.get(path or "")
        is_integer = choice is not None and choice.qconfig is not None and not is_cast(choice.qconfig.activation)
        if row is None or row.is_quant or row.is_real or getattr(row.qat, "takes_real", False):
            continue
        if not is_integer or notes(node).is_training_only:
            continue
        for source in operands(model, node):
            is_float = notes(source).dtype in REAL and notes(source).is_constant is False
            kinds = region.kinds(source)  # positions have no scale, and so has what is made of them (`i.float()`)
            is_known = (kinds and set(kinds) != {Kind.INDEX}) or notes(source).runs_on_cpu
            if is_float and not is_known and not stays_real(model, node, source):
                raise UnsupportedOperatorError(
                    f"`{row.name}` {at(path or '', source_line(node.stack_trace))} takes a float tensor that the model "
                    "is given, or computes of its inputs outside of the quantized part, or of positions, and that has "
                    "no scale. Put a QuantStub where it enters the quantized part, as in `self.quant_mask(mask)`."
                )
