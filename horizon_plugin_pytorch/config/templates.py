"""Templates of `QconfigSetter`: each changes the formats that those before it gave."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from horizon_plugin_pytorch.config.graph_view import GraphView, OperatorView
from horizon_plugin_pytorch.config.rules import Rule, canonicalize_rules
from horizon_plugin_pytorch.config.sensitivity import most_sensitive, warn_unknown
from horizon_plugin_pytorch.config.setters import (
    GridSampleTemplate,
    HighPrecisionOutputTemplate,
    QconfigTemplate,
    by_name,
)
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant.dynamic import DynamicFakeQuantize, is_dynamic
from horizon_plugin_pytorch.fake_quant.fake_cast import FakeCast, is_cast
from horizon_plugin_pytorch.fake_quant.qconfig import (
    QConfig,
    as_format,
    asked_input,
    default_weight,
    format_of,
    with_format,
    with_output,
)
from horizon_plugin_pytorch.nn.intrinsic import FusedModule


def _integer_part(part: Any, reference: Any) -> Any:
    """A part that knows an observer: itself, or else the reference's."""
    return part if part is not None and not is_cast(part) and not is_dynamic(part) else reference


def _output(view: GraphView, operator: OperatorView, dtype: Any, threshold: float | None, reference: QConfig) -> Any:
    """What an operator's output becomes in a format."""
    current = view.qconfig(operator) or reference
    if dtype is None:
        dtype = format_of(_integer_part(current.activation, reference.activation))
    if dtype is torch.float32:
        is_accumulator = view.has_real_output(operator) and view.is_output(operator)
        return None if is_accumulator else FakeCast.with_args(dtype=torch.float32)
    return with_format(_integer_part(current.activation, reference.activation), dtype, threshold)


def set_output(
    view: GraphView, operator: OperatorView, current: QConfig, part: Any, why: str, freeze: bool = False
) -> None:
    """Give an operator an output; what was asked before of those that take it gives way to it.

    A shared taker whose calls get operands in several formats takes them as they come.
    """
    if part is None and operator.has_weight and is_cast(current.weight):  # there is no accumulator of integers
        part = FakeCast.with_args(dtype=format_of(current.weight))
    if not view.set(operator, with_output(current, part), why, freeze):
        return
    given = format_of(part)
    if not isinstance(given, QuantDType):
        return
    for taker, position in view.takers(operator):
        qconfig = view.qconfig(taker)
        asked: Any = None if qconfig is None else asked_input(qconfig, position)
        if not _is_asked(asked) or format_of(asked) == given:
            continue
        producers = view.operand_producers(taker)
        parts = [asked_input(qconfig, i) for i in range(max(len(producers), position + 1))]
        comes = {format_of(found.activation) for p in producers[position] if (found := view.qconfig(p)) is not None}
        parts[position] = with_format(asked, given) if comes == {given} else replace(asked, is_default=True)
        view.set(taker, qconfig._replace(input=_joined(parts)), f"what {operator.path} gives: {why}")


def _is_asked(part: Any) -> bool:
    """Did somebody ask for this integer format?"""
    return part is not None and not is_cast(part) and not is_dynamic(part) and not part.is_default


def _joined(parts: Sequence[Any]) -> Any:
    """One part for all operands, or a tuple."""
    is_one = all(part == parts[0] and _is_asked(part) == _is_asked(parts[0]) for part in parts)
    return parts[0] if is_one else tuple(parts)


def set_inputs(
    view: GraphView,
    operator: OperatorView,
    dtypes: Sequence[Any],
    thresholds: Sequence[Any],
    reference: QConfig,
    why: str,
) -> None:
    """Let an operator's operands have formats.

    Where all that take a result ask for one format, it is given in that. A result that others take in another one is
    given in the widest, and a QuantStub makes the narrower one (see `passes.inputs`).
    """
    current = view.qconfig(operator) or reference
    producers = view.operand_producers(operator)
    parts, changed = [], []
    for position in range(max(len(producers), len(dtypes), len(thresholds), 1)):
        dtype = dtypes[min(position, len(dtypes) - 1)] if dtypes else None
        threshold = thresholds[min(position, len(thresholds) - 1)] if thresholds else None
        part = asked_input(current, position)
        if dtype is not None or threshold is not None:
            base = _integer_part(part, _integer_part(reference.input, reference.activation))
            part = with_format(base, format_of(base) if dtype is None else dtype, threshold)
            changed.append(position)
        parts.append(part)
    current = current._replace(input=_joined(parts))
    is_integer = any(isinstance(dtype, QuantDType) for dtype in dtypes)
    if is_integer and operator.is_gemm and not operator.has_weight and is_cast(current.activation):
        # Integers are multiplied to integers; what follows in float16 takes them as they are.
        current = current._replace(activation=with_format(_integer_part(None, reference.activation), qint16))
    view.set(operator, current, why)
    for position in changed:
        for producer in producers[position] if position < len(producers) else ():
            _give(view, producer, parts[position], f"input of {operator.path}: {why}")


def _give(view: GraphView, producer: OperatorView, part: Any, why: str) -> None:
    """Let a result have the format that one of its takers asks for, if the others can live with it."""
    given = view.qconfig(producer)
    if given is None or is_cast(part) or not isinstance(format_of(given.activation), QuantDType):
        return
    wish, comes, scale = format_of(part), format_of(given.activation), part.kwargs.get("scale")
    assert isinstance(wish, QuantDType) and isinstance(comes, QuantDType)
    takers = [asked_input(view.qconfig(taker), position) for taker, position in view.takers(producer)]
    is_agreed = not view.is_seen(producer) and all(
        _is_asked(asked) and format_of(asked) == wish and asked.kwargs.get("scale") == scale for asked in takers
    )
    if not is_agreed and comes.bits >= wish.bits:
        return
    threshold = None if scale is None or not is_agreed else float(scale) * -wish.min
    view.set(producer, given._replace(activation=with_format(given.activation, wish, threshold)), why)


class ModuleNameTemplate(QconfigTemplate):
    """Formats by the path of a module; a container's reaches all that is in it, and ``""`` is the whole model.

    Args:
        config_mapping: for each path a format (of the output); ``{"input": ..., "weight": ..., "output": ...}``, where
            `input` may be a list, one for each operand; or ``{"dtype": ..., "threshold": ...}``, which fixes the scale
            to ``threshold / 128`` in int8 and ``threshold / 32768`` in int16. Both may be dictionaries, too. A further
            key ``"dynamic"`` has what `SetDynamicQuantTemplate` takes, for linear layers, ``"products"`` the two
            formats of the products inside of attention; ``"freeze": True`` freezes this path.
        freeze: let no later rule change it, neither a template nor a correction.

    >>> template = ModuleNameTemplate({"": qint8, "head": qint16, "quant": {"dtype": qint16, "threshold": 200.0}})
    """

    def __init__(self, config_mapping: Mapping[str, Any], freeze: bool = False) -> None:
        self.rules, self.freeze = canonicalize_rules(config_mapping), freeze

    def apply(self, view: GraphView, qconfig: QConfig) -> None:
        for operator, name in by_name(view, self.rules, "ModuleNameTemplate").items():
            self._set(view, operator, self.rules[name], qconfig, f"ModuleNameTemplate {name!r}")
            members = operator.members
            is_before_add = operator.has_add and name in members[: members.index(operator.path)]
            if is_before_add and self.rules[name].output_threshold is not None:
                warn(
                    f"ModuleNameTemplate: {name!r} is fused with the addition `{operator.path}`, and its threshold "
                    f"{self.rules[name].output_threshold} fixes the range of the sum. Check that the sum stays within "
                    f"it; name `{operator.path}` to say so, or prepare with FuseMode.NoFuse.",
                    QuantizationWarning,
                )

    def _set(self, view: GraphView, operator: OperatorView, rule: Rule, reference: QConfig, why: str) -> None:
        if rule.dynamic is not None and getattr(operator.row.qat, "takes_dynamic", False):
            set_dynamic(view, operator, rule.dynamic, reference, why)
        elif rule.inputs or rule.input_thresholds:
            set_inputs(view, operator, rule.inputs, rule.input_thresholds, reference, why)
        if rule.products and operator.products_take:
            set_products(view, operator, rule.products, reference, why)
        current = view.qconfig(operator) or reference
        part = current.activation
        if rule.output is not None or rule.output_threshold is not None:
            part = _output(view, operator, rule.output, rule.output_threshold, reference)
        if (rule.weight is not None or rule.weight_threshold is not None) and operator.has_weight:
            weight = _weight(current, rule.weight, rule.weight_threshold, reference)
            current = current._replace(weight=weight)
        set_output(view, operator, current, part, why, self.freeze or rule.freeze)


def _weight(current: QConfig, dtype: Any, threshold: float | None, reference: QConfig) -> Any:
    base = _integer_part(current.weight, _integer_part(reference.weight, default_weight()))
    return with_format(base, format_of(base) if dtype is None else dtype, threshold)


class ConvDtypeTemplate(QconfigTemplate):
    """Formats of the input and the weight of every convolution and linear layer.

    >>> template = ConvDtypeTemplate(input_dtype=qint8, weight_dtype=qint8)
    """

    def __init__(self, input_dtype: Any = None, weight_dtype: Any = None) -> None:
        self.input_dtype = None if input_dtype is None else as_format(input_dtype)
        self.weight_dtype = None if weight_dtype is None else as_format(weight_dtype)

    def apply(self, view: GraphView, qconfig: QConfig) -> None:
        for operator in [found for found in view if found.has_weight]:
            if self.weight_dtype is not None:
                current = view.qconfig(operator) or qconfig
                part = _weight(current, self.weight_dtype, None, qconfig)
                view.set(operator, current._replace(weight=part), "ConvDtypeTemplate")
            if self.input_dtype is not None:
                # What a fused add adds is no input of the layer.
                wanted = (self.input_dtype, None) if operator.has_add else (self.input_dtype,)
                set_inputs(view, operator, wanted, (), qconfig, "ConvDtypeTemplate")


def set_products(view: GraphView, operator: OperatorView, dtypes: Sequence[Any], reference: QConfig, why: str) -> None:
    """Let the products of matrices inside of an operator, as of attention, have formats of their operands."""
    current = view.qconfig(operator) or reference
    if not all(isinstance(dtype, QuantDType) for dtype in dtypes):
        if not is_cast(current.activation):
            warn(
                f"{why}: the products inside of `{operator.path}` are of integers. Give the whole operator float16, "
                f"ModuleNameTemplate({{{operator.path!r}: torch.float16}}), or its products qint16.",
                QuantizationWarning,
            )
        return
    if is_cast(current.activation):  # as for a product alone: integers are multiplied to integers
        view.set(operator, current._replace(activation=with_format(None, qint16)), why)
    if operator.products_take == "operands":  # the query, the key and the value
        set_inputs(view, operator, (dtypes[0], dtypes[1], dtypes[1]), (), reference, why)
    view.set_products(operator, (dtypes[0], dtypes[1]), why)


class MatmulDtypeTemplate(QconfigTemplate):
    """Formats of the operands of every product of matrices: one for both, or one for each.

    Those inside of attention are meant too: query and key, the weights and the value.

    >>> template = MatmulDtypeTemplate(input_dtypes=[qint8, qint16])
    """

    def __init__(self, input_dtypes: Any = qint8) -> None:
        listed = input_dtypes if isinstance(input_dtypes, (tuple, list)) else (input_dtypes, input_dtypes)
        if len(listed) != 2:
            raise QuantizationConfigError(f"MatmulDtypeTemplate: a matmul has two operands, got {len(listed)} formats.")
        self.input_dtypes = tuple(as_format(dtype) for dtype in listed)

    def apply(self, view: GraphView, qconfig: QConfig) -> None:
        for operator in [found for found in view if found.is_gemm and not found.has_weight]:
            set_inputs(view, operator, self.input_dtypes, (), qconfig, "MatmulDtypeTemplate")
        for operator in [found for found in view if found.products_take]:
            set_products(view, operator, self.input_dtypes, qconfig, "MatmulDtypeTemplate")


class SensitivityTemplate(QconfigTemplate):
    """A higher precision for the most sensitive operators of a table.

    Args:
        sensitive_table: rows as ``torch.load`` gives them, the most sensitive first.
        topk_or_ratio: how many rows (int), or which share of them (float).
        sensitive_type: rows of ``activation``, of ``weight``, or of ``both``.
        low_precision_dtype: what has this format
        high_precision_dtype: gets this one; a layer with float16 weights has a float16 result, too.

    >>> template = SensitivityTemplate([["conv", "activation", "Conv2d", 1.5, "qint8"]], topk_or_ratio=1)
    """

    def __init__(
        self,
        sensitive_table: Sequence[Any],
        topk_or_ratio: float,
        sensitive_type: str = "both",
        low_precision_dtype: Any = qint8,
        high_precision_dtype: Any = qint16,
    ) -> None:
        kinds = {"activation": ("activation",), "weight": ("weight",), "both": ("activation", "weight")}
        if sensitive_type not in kinds:
            raise QuantizationConfigError(f"sensitive_type must be one of {', '.join(kinds)}, got {sensitive_type!r}.")
        if isinstance(topk_or_ratio, bool) or not isinstance(topk_or_ratio, (int, float)):
            raise QuantizationConfigError(
                f"topk_or_ratio must be a whole number of rows, or a share between 0.0 and 1.0, got {topk_or_ratio!r}."
            )
        is_ratio = isinstance(topk_or_ratio, float)
        topk, ratio = (None, topk_or_ratio) if is_ratio else (topk_or_ratio, None)
        self.rows = most_sensitive(sensitive_table, topk, ratio, kinds[sensitive_type])  # type: ignore[arg-type]
        self.low, self.high = as_format(low_precision_dtype), as_format(high_precision_dtype)

    def apply(self, view: GraphView, qconfig: QConfig) -> None:
        warn_unknown(view, self.rows, "SensitivityTemplate")
        for row, operator in ((found, operator) for found in self.rows for operator in view.every(found.name)):
            current = view.qconfig(operator)
            if current is None:
                continue
            why = f"sensitivity table rank {row.rank}"
            if (
                row.kind == "activation"
                and current.activation is not None
                and format_of(current.activation) == self.low
            ):
                part = _output(view, operator, self.high, None, qconfig)
                set_output(view, operator, current, part, why)
            elif row.kind == "weight" and operator.has_weight and format_of(current.weight) == self.low:
                current = current._replace(weight=_weight(current, self.high, None, qconfig))
                part = current.activation
                if is_cast(current.weight):  # it computes in that format, with its result
                    part = _output(view, operator, self.high, None, qconfig)
                set_output(view, operator, current, part, why)


class SetDynamicQuantTemplate(QconfigTemplate):
    """Let linear layers quantize their inputs while the model runs, each row by its own range.

    Nothing is calibrated for these inputs. The products are summed in integers, and the result is float32, or float16
    where it was. Give the template after those that set formats; one that sets the input of a layer takes it back.

    Args:
        op_kwargs: for each type of layer (`torch.nn.Linear`), ``block_size``, how many values share a scale (``"full"``
            for all of a row), and ``dim``, the axis: -1, the input features.

    >>> template = SetDynamicQuantTemplate(op_kwargs={nn.Linear: {"block_size": "full", "dim": -1}})
    """

    def __init__(self, op_kwargs: Mapping[type, Mapping[str, Any]]) -> None:
        self.op_kwargs = {cls: dict(kwargs) for cls, kwargs in op_kwargs.items()}
        for cls, kwargs in self.op_kwargs.items():
            if not isinstance(cls, type) or not issubclass(cls, nn.Linear):
                name = getattr(cls, "__name__", repr(cls))
                raise QuantizationConfigError(f"SetDynamicQuantTemplate is for torch.nn.Linear, not for {name}.")
            unknown = [key for key in kwargs if key not in ("block_size", "dim")]
            if unknown or kwargs.get("dim", -1) != -1:
                raise QuantizationConfigError(
                    f"SetDynamicQuantTemplate: {cls.__name__} takes block_size and dim, which is -1 (the products that "
                    f"are summed must have one scale); got {kwargs}."
                )
            DynamicFakeQuantize(**kwargs)  # says what is wrong

    def apply(self, view: GraphView, qconfig: QConfig) -> None:
        found = [(operator, kwargs) for operator in view if (kwargs := self._kwargs(operator)) is not None]
        for operator, kwargs in found:
            set_dynamic(view, operator, kwargs, qconfig, "SetDynamicQuantTemplate")
        if not found:
            names = ", ".join(cls.__name__ for cls in self.op_kwargs)
            warnings.warn(
                f"SetDynamicQuantTemplate changes nothing: the quantized part of the model has no {names}.",
                QuantizationWarning,
                stacklevel=2,
            )

    def _kwargs(self, operator: OperatorView) -> dict[str, Any] | None:
        layer = operator.module.conv if isinstance(operator.module, FusedModule) else operator.module
        return next((kwargs for cls, kwargs in self.op_kwargs.items() if isinstance(layer, cls)), None)


def set_dynamic(
    view: GraphView, operator: OperatorView, kwargs: Mapping[str, Any], reference: QConfig, why: str
) -> None:
    """Let a linear layer quantize its input while the model runs; its result is real."""
    current = view.qconfig(operator) or reference
    output, weight = current.activation, current.weight
    if isinstance(format_of(output), QuantDType):
        output = FakeCast.with_args(dtype=torch.float32)
    if not isinstance(format_of(weight), QuantDType):
        weight = default_weight()
    part = DynamicFakeQuantize.with_args(**kwargs)
    view.set(operator, current._replace(activation=output, weight=weight, input=part), why)


def get_common_templates() -> list[QconfigTemplate]:
    """What `QconfigSetter` adds after the user's templates: outputs in high precision, int16 grids.

    >>> [type(template).__name__ for template in get_common_templates()]
    ['HighPrecisionOutputTemplate', 'GridSampleTemplate']
    """
    return [HighPrecisionOutputTemplate(), GridSampleTemplate()]


def get_compat_templates() -> list[QconfigTemplate]:
    """What the setters of `qconfig_template` do beyond one format for all; the same rules today.

    >>> [type(template).__name__ for template in get_compat_templates()]
    ['HighPrecisionOutputTemplate', 'GridSampleTemplate']
    """
    return get_common_templates()


show_at(
    "quantization.qconfig_setter.templates",
    set_output,
    set_inputs,
    ModuleNameTemplate,
    ConvDtypeTemplate,
    set_products,
    MatmulDtypeTemplate,
    SensitivityTemplate,
    SetDynamicQuantTemplate,
    set_dynamic,
    get_common_templates,
    get_compat_templates,
)
