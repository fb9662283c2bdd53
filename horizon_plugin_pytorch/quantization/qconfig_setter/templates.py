"""Templates of `QconfigSetter`: each changes the formats that those before it gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError
from horizon_plugin_pytorch.quantization.fake_cast import FakeCast, is_cast
from horizon_plugin_pytorch.quantization.passes.graph_view import GraphView, OperatorView
from horizon_plugin_pytorch.quantization.qconfig import QConfig, as_format, format_of, with_format
from horizon_plugin_pytorch.quantization.qconfig_setter.rules import Rule, canonicalize_rules
from horizon_plugin_pytorch.quantization.qconfig_template import (
    GridSampleTemplate,
    HighPrecisionOutputTemplate,
    QconfigTemplate,
    by_name,
    most_sensitive,
    warn_unknown,
)


def _integer_part(part: Any, reference: Any) -> Any:
    """A part that knows an observer: itself, or else the reference's."""
    return part if part is not None and not is_cast(part) else reference


def _output(view: GraphView, operator: OperatorView, dtype: Any, threshold: float | None, reference: QConfig) -> Any:
    """What an operator's output becomes in a format."""
    current = view.qconfig(operator) or reference
    if dtype is None:
        dtype = format_of(_integer_part(current.activation, reference.activation))
    if dtype is torch.float32:
        is_accumulator = view.has_real_output(operator) and view.is_output(operator)
        return None if is_accumulator else FakeCast.with_args(dtype=torch.float32)
    return with_format(_integer_part(current.activation, reference.activation), dtype, threshold)


def set_inputs(
    view: GraphView,
    operator: OperatorView,
    dtypes: Sequence[Any],
    thresholds: Sequence[Any],
    reference: QConfig,
    why: str,
) -> None:
    """Let an operator's operands have formats: through those that give them, or by quantizing float16 before it."""
    current = view.qconfig(operator) or reference
    producers = view.operand_producers(operator)
    count = max(len(producers), len(dtypes), len(thresholds), 1)
    parts = []
    for position in range(count):
        dtype = dtypes[min(position, len(dtypes) - 1)] if dtypes else None
        threshold = thresholds[min(position, len(thresholds) - 1)] if thresholds else None
        part = (
            current.input[min(position, len(current.input) - 1)] if isinstance(current.input, tuple) else current.input
        )
        base = _integer_part(part, _integer_part(reference.input, reference.activation))
        wanted = format_of(base) if dtype is None else dtype
        parts.append(part if dtype is None and threshold is None else with_format(base, wanted, threshold))
        if not isinstance(wanted, QuantDType) or (dtype is None and threshold is None):
            continue
        for producer in producers[position] if position < len(producers) else ():
            given = view.qconfig(producer)
            if given is not None and isinstance(format_of(given.activation), QuantDType):
                changed = with_format(
                    given.activation, format_of(given.activation) if dtype is None else dtype, threshold
                )
                view.set(producer, given._replace(activation=changed), f"input of {operator.path}: {why}")
    same = all(part == parts[0] for part in parts)
    current = current._replace(input=parts[0] if same else tuple(parts))
    is_integer = any(isinstance(dtype, QuantDType) for dtype in dtypes)
    if is_integer and operator.is_gemm and not operator.has_weight and is_cast(current.activation):
        # Integers are multiplied to integers; what follows in float16 takes them as they are.
        current = current._replace(activation=with_format(_integer_part(None, reference.activation), qint16))
    view.set(operator, current, why)


class ModuleNameTemplate(QconfigTemplate):
    """Formats by the path of a module; a container's reaches all that is in it, and ``""`` is the whole model.

    Args:
        config_mapping: for each path a format (of the output); ``{"input": ..., "weight": ..., "output": ...}``, where
            `input` may be a list, one for each operand; or ``{"dtype": ..., "threshold": ...}``, which fixes the scale
            to ``threshold / 128`` in int8 and ``threshold / 32768`` in int16. Both may be dictionaries, too.
        freeze: let no later rule change it, neither a template nor a correction.

    >>> template = ModuleNameTemplate({"": qint8, "head": qint16, "quant": {"dtype": qint16, "threshold": 200.0}})
    """

    def __init__(self, config_mapping: Mapping[str, Any], freeze: bool = False) -> None:
        self.rules, self.freeze = canonicalize_rules(config_mapping), freeze

    def apply(self, view: GraphView, qconfig: QConfig) -> None:
        for operator, name in by_name(view, self.rules, "ModuleNameTemplate").items():
            self._set(view, operator, self.rules[name], qconfig, f"ModuleNameTemplate {name!r}")

    def _set(self, view: GraphView, operator: OperatorView, rule: Rule, reference: QConfig, why: str) -> None:
        if rule.inputs or rule.input_thresholds:
            set_inputs(view, operator, rule.inputs, rule.input_thresholds, reference, why)
        current = view.qconfig(operator) or reference
        if rule.output is not None or rule.output_threshold is not None:
            part = _output(view, operator, rule.output, rule.output_threshold, reference)
            current = current._replace(activation=part)
        if (rule.weight is not None or rule.weight_threshold is not None) and operator.has_weight:
            part = _weight(current, rule.weight, rule.weight_threshold, reference)
            current = current._replace(weight=part)
        view.set(operator, current, why, self.freeze)


def _weight(current: QConfig, dtype: Any, threshold: float | None, reference: QConfig) -> Any:
    base = _integer_part(current.weight, reference.weight)
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
                set_inputs(view, operator, (self.input_dtype,), (), qconfig, "ConvDtypeTemplate")


class MatmulDtypeTemplate(QconfigTemplate):
    """Formats of the operands of every product of matrices: one for both, or one for each.

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


class SensitivityTemplate(QconfigTemplate):
    """A higher precision for the most sensitive operators of a table.

    Args:
        sensitive_table: rows as ``torch.load`` gives them, the most sensitive first.
        topk_or_ratio: how many rows (int), or which share of them (float).
        sensitive_type: rows of ``activation``, of ``weight``, or of ``both``.
        low_precision_dtype: what has this format
        high_precision_dtype: gets this one.

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
        is_ratio = isinstance(topk_or_ratio, float)
        topk, ratio = (None, topk_or_ratio) if is_ratio else (topk_or_ratio, None)
        self.rows = most_sensitive(sensitive_table, topk, ratio, kinds[sensitive_type])  # type: ignore[arg-type]
        self.low, self.high = as_format(low_precision_dtype), as_format(high_precision_dtype)

    def apply(self, view: GraphView, qconfig: QConfig) -> None:
        warn_unknown(view, self.rows, "SensitivityTemplate")
        for row in self.rows:
            operator = view.named(row.name)
            current = None if operator is None else view.qconfig(operator)
            if operator is None or current is None:
                continue
            why = f"sensitivity table rank {row.rank}"
            if (
                row.kind == "activation"
                and current.activation is not None
                and format_of(current.activation) == self.low
            ):
                part = _output(view, operator, self.high, None, qconfig)
                view.set(operator, current._replace(activation=part), why)
            elif row.kind == "weight" and operator.has_weight and format_of(current.weight) == self.low:
                part = _weight(current, self.high, None, qconfig)
                view.set(operator, current._replace(weight=part), why)


class SetDynamicQuantTemplate(QconfigTemplate):
    """Dynamic quantization of operators by type; this version does not have it.

    Raises:
        NotImplementedError: always.
    """

    def __init__(self, op_kwargs: Mapping[type, Mapping[str, Any]]) -> None:
        raise NotImplementedError(
            "SetDynamicQuantTemplate: dynamic quantization, whose scales are computed while the model runs, is not "
            "available in this version. Use qint16 or torch.float16 for these operators, with ModuleNameTemplate."
        )


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
