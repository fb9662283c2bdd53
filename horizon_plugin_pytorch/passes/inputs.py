"""Operands in the formats that operators ask for: a QuantStub where what comes is float16, or wider than asked."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from horizon_plugin_pytorch.capture.region import Region, called_path, operands, row_of_node
from horizon_plugin_pytorch.config.choice import Choice, Step
from horizon_plugin_pytorch.dtype import QuantDType
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, at, listed, source_line, warn
from horizon_plugin_pytorch.fake_quant.dynamic import is_dynamic
from horizon_plugin_pytorch.fake_quant.fake_cast import is_cast
from horizon_plugin_pytorch.fake_quant.qconfig import asked_input, format_of, spell, with_format
from horizon_plugin_pytorch.nn.qat.gemm import has_integer_weight
from horizon_plugin_pytorch.operators.table import ScaleRule
from horizon_plugin_pytorch.passes.generated import insert_stub
from horizon_plugin_pytorch.passes.preparation import Preparation


def fit_inputs(prep: Preparation) -> None:
    """Put a QuantStub between a result and an integer operator that takes it in another format.

    Float16 becomes what somebody asked of the operator's `input`, or else the format of its output; where that is real,
    the format in which float16 operators before it got their numbers. Integers become what somebody asked of the
    `input` where that is narrower or has a fixed scale; a wider format would add nothing.

    Raises:
        QuantizationConfigError: for an integer operator whose qconfig has no format for float16.
    """
    model, region = prep.model, prep.region
    wanted = _wanted(prep)
    for node in list(model.graph.nodes):
        parts = wanted.get(called_path(model, node) or "", {}) if node in region else {}
        leaves = _scaled_leaves(model, node, region) if parts else []
        for source in dict.fromkeys(source for _, source in leaves):
            places = [(leaf, parts.get(i)) for i, (leaf, s) in enumerate(leaves) if s is source]
            groups: list[tuple[Any, list[int]]] = []
            for leaf, part in places:  # operands that are one tensor share a stub if they want the same
                known = next((group for wish, group in groups if wish == part), None)
                if known is None:
                    groups.append((part, known := []))
                known.append(leaf)
            for part, chosen in groups:
                if part is not None:
                    _insert(prep, node, source, chosen, part)


def _insert(prep: Preparation, node: fx.Node, source: fx.Node, places: list[int], part: Any) -> None:
    path, choices = called_path(prep.model, node), prep.choices
    assert path is not None
    asked = next((step.rule for step in reversed(choices[path].steps) if step.input), "")
    step = Step(f"input of {path}{f': {asked}' if asked else ''}", output=spell(part))
    stub = Choice(choices[path].qconfig._replace(activation=part), steps=(step,))
    insert_stub(prep, node, source, stub, "fit input", places, requantizes=True)


def warn_unfit(prep: Preparation) -> None:
    """Say which operands stay in the format in which they come, where nothing can be put before an operator.

    Raises:
        QuantizationConfigError: for float16 that reaches an integer operator.
    """
    wanted = _wanted(prep, is_fitted=False)
    if wanted:
        warn(
            f"{listed(f'`{path}`' for path in wanted)} "
            f"{'take' if len(wanted) > 1 else 'takes'} inputs as they come, not in the format asked for: eager mode "
            "puts no QuantStub between two formats. Use `prepare` with PrepareMethod.JIT_STRIP.",
            QuantizationWarning,
        )


def _wanted(prep: Preparation, is_fitted: bool = True) -> dict[str, dict[int, Any]]:
    """For each module, what quantizes which of its operands. A module that is called again has the same for all.

    Args:
        is_fitted: is a QuantStub put there? Float16 cannot do without.
    """
    model, region, choices = prep.model, prep.region, prep.choices
    given: dict[fx.Node, Any] = {}  # what quantizes or casts results
    behind: dict[fx.Node, Any] = {}  # for results that are cast, what quantized the numbers that they are made of
    wanted: dict[str, dict[int, Any]] = {}
    for node in model.graph.nodes:
        if node not in region:
            continue
        path = called_path(model, node)
        qconfig = _qconfig(choices, path)
        behind[node] = _widest([behind.get(source, given.get(source)) for source in node.all_input_nodes])
        if qconfig is None or not _has_own_scale(model, node):  # it moves values, and keeps their format
            found = [given[source] for source in node.all_input_nodes if source in given]
            if found:
                given[node] = next((part for part in found if is_cast(part)), found[0])
            continue
        is_half = is_cast(qconfig.activation)
        if qconfig.activation is not None:
            given[node] = qconfig.activation
            if not is_half:
                behind[node] = qconfig.activation
        has_integers = not is_half or (qconfig.weight is not None and not is_cast(qconfig.weight))
        row = row_of_node(model, node)
        if row is None or row.is_quant or (is_half and not (has_integers and has_integer_weight(row))):
            continue
        for position, (_, source) in enumerate(_scaled_leaves(model, node, region)):
            if is_cast(given.get(source)) and not is_fitted:
                raise QuantizationConfigError(
                    f"the integer operator {at(path or '', source_line(node.stack_trace))} takes a float16 result, and "
                    "eager mode puts no QuantStub between two formats. Put one there in the model, give this operator "
                    "float16, too, or use `prepare` with PrepareMethod.JIT_STRIP."
                )
            part = _fitting(qconfig, position, given.get(source), behind.get(source), path or "")
            if part is not None:
                wanted.setdefault(path or "", {})[position] = part
    return wanted


def _fitting(qconfig: Any, position: int, given: Any, behind: Any, path: str) -> Any:
    """What quantizes an operand that comes in a format; None if it can be taken as it is.

    Args:
        given: what quantized or cast the operand.
        behind: for an operand that was cast, what quantized the numbers that it is made of.
    """
    asked = asked_input(qconfig, position)
    if is_dynamic(asked):
        return None
    if is_cast(given):
        return _of_real(qconfig, asked, behind, path)
    if given is None or asked is None or asked.is_default or is_cast(asked):
        return None
    wish, comes = format_of(asked), format_of(given)
    scale = asked.kwargs.get("scale")
    has_own_scale = scale is not None and scale != given.kwargs.get("scale")
    is_narrower = isinstance(wish, QuantDType) and isinstance(comes, QuantDType) and wish.bits < comes.bits
    return asked if is_narrower or has_own_scale else None


def _of_real(qconfig: Any, asked: Any, behind: Any, path: str) -> Any:
    """What quantizes real numbers for an integer operator: what was asked, or its own format with its own observer."""
    has_format = asked is not None and not is_cast(asked)
    if has_format and not asked.is_default:
        return asked
    # An output in high precision or in float16 says nothing; its default input has the format that it had before.
    is_integer = qconfig.activation is not None and not is_cast(qconfig.activation)
    own = qconfig.activation if is_integer else _widest([asked, behind])
    if own is None:
        raise QuantizationConfigError(
            f"the integer operator {at(path)} takes a float16 result, and its qconfig says no integer format for "
            "it: give the qconfig an `input`."
        )
    if has_format:
        return with_format(asked, format_of(own))
    is_fixed = own.kwargs.get("scale") is not None  # which is that of other numbers
    return with_format(None if is_fixed else own, format_of(own))


def _widest(parts: list[Any]) -> Any:
    """The part with the widest integer format, if any has one."""
    found = [part for part in parts if part is not None and not is_cast(part)]
    return max(found, key=lambda part: format_of(part).bits, default=None)  # type: ignore[union-attr]


def _scaled_leaves(model: fx.GraphModule, node: fx.Node, region: Region) -> list[tuple[int, fx.Node]]:
    """The operands that have scales, each with its position among all leaves of the arguments."""
    inputs = set(operands(model, node))
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [(i, x) for i, x in enumerate(leaves) if isinstance(x, fx.Node) and x in inputs and region.has_scale(x)]


def _qconfig(choices: dict[str, Choice], path: str | None) -> Any:
    choice = None if path is None else choices.get(path)
    return None if choice is None else choice.qconfig


def _has_own_scale(model: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_method":  # of a FloatFunctional
        return True
    row = row_of_node(model, node)
    return row is not None and row.scale_rule in (ScaleRule.OWN, ScaleRule.FIXED)
