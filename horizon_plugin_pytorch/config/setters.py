"""Setters: rules that give every operator of a prepared model its number formats.

A setter is handed to `prepare` (or to `prepare_qat_fx`) as `qconfig_setter`: one, or a tuple from high to low priority.
A module's own ``qconfig`` attribute beats them all.

=======================================================  ========================================================
setter                                                   what it gives
=======================================================  ========================================================
``default_calibration_qconfig_setter``,                  int8; outputs in high precision where that is possible;
``default_qat_qconfig_setter``,                          int16 where coordinates for grid_sample are computed
``default_qat_fixed_act_qconfig_setter``
``calibration_8bit_weight_16bit_act_qconfig_setter``,    int16 with int8 weights; outputs in high precision
``qat_8bit_weight_16bit_act_qconfig_setter``,
``qat_8bit_weight_16bit_fixed_act_qconfig_setter``
``sensitive_op_...(table, topk=..., ratio=...)``         int16 for the most sensitive operators of a table
``ModuleNameQconfigSetter({path: qconfig})``             qconfigs by name
``TemplateQconfigSetter(qconfig, [template, ...])``      one qconfig for all, and templates that change it
=======================================================  ========================================================

``calibration`` observes ranges as calibration does, ``qat`` as training does, and ``fixed_act`` keeps the scales that
calibration gave. Where a chip does not have a format, int16 becomes int8 (see `passes.correct`). Every step keeps its
reason; `explain` prints them.

>>> import torch
>>> from horizon_plugin_pytorch.march import March, set_march
>>> from horizon_plugin_pytorch.quantization.quantize_fx import prepare_qat_fx
>>> from horizon_plugin_pytorch.quantization.stubs import QuantWrapper
>>> set_march(March.NASH_M)
>>> net = QuantWrapper(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Sigmoid(), torch.nn.Conv2d(2, 1, 1)))
>>> qat = prepare_qat_fx(net, qconfig_setter=default_qat_qconfig_setter)
>>> qat.module.get_submodule("0").activation_post_process.dtype
'qint8'
>>> qat.module.get_submodule("2").activation_post_process is None
True
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from operator import getitem
from typing import Any

from torch import fx

from horizon_plugin_pytorch.config.correct import correct_formats
from horizon_plugin_pytorch.config.graph_view import GraphView, OperatorView
from horizon_plugin_pytorch.config.resolve import check_qconfig
from horizon_plugin_pytorch.config.sensitivity import most_sensitive, warn_unknown
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.dtype import qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, listed, warn, warn_once
from horizon_plugin_pytorch.fake_quant.qconfig import (
    TRAINING_OBSERVER,
    QConfig,
    format_of,
    get_qconfig,
    unasked,
    with_format,
    with_output,
)
from horizon_plugin_pytorch.march import March
from horizon_plugin_pytorch.nn.qat.gemm import is_half
from horizon_plugin_pytorch.operators.table import Kind, Trait
from horizon_plugin_pytorch.runtime.node_notes import notes

__all__ = [
    "GridSampleTemplate",
    "HighPrecisionOutputTemplate",
    "ModuleNameQconfigSetter",
    "QconfigSetterBase",
    "QconfigTemplate",
    "SensitiveOpQconfigSetter",
    "TemplateQconfigSetter",
    "calibration_8bit_weight_16bit_act_qconfig_setter",
    "default_calibration_qconfig_setter",
    "default_qat_fixed_act_qconfig_setter",
    "default_qat_qconfig_setter",
    "qat_8bit_weight_16bit_act_qconfig_setter",
    "qat_8bit_weight_16bit_fixed_act_qconfig_setter",
    "sensitive_op_8bit_weight_16bit_act_calibration_setter",
    "sensitive_op_8bit_weight_16bit_act_qat_setter",
    "sensitive_op_8bit_weight_16bit_fixed_act_qat_setter",
    "sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter",
    "sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter",
    "sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter",
]


class QconfigSetterBase:
    """Base of setters. Override `qconfig_for`, or `apply` for rules that look at more than one operator.

    >>> class Int16Stubs(QconfigSetterBase):
    ...     def qconfig_for(self, operator):
    ...         return get_qconfig(out_dtype=qint16) if operator.row.name == "quant" else None
    >>> Int16Stubs().name
    'Int16Stubs'
    """

    @property
    def name(self) -> str:
        """What `explain` calls it."""
        return type(self).__name__

    def qconfig_for(self, operator: OperatorView) -> QConfig | None:
        """The qconfig of one operator; None leaves it to setters of lower priority."""
        return None

    def apply(self, view: GraphView) -> None:
        """Set choices of a prepared graph."""
        for operator in view:
            qconfig = self.qconfig_for(operator)
            if qconfig is not None:
                view.set(operator, qconfig, self.name)

    def __repr__(self) -> str:
        return f"{self.name}()"

    def finish(self, view: GraphView) -> None:
        """Called when all setters have run and illegal formats are corrected: look, do not change."""


def given_setters(setters: Any) -> list[Any]:
    """What was given as `qconfig_setter`, as a list.

    Raises:
        QuantizationConfigError: for anything that is no setter.
    """
    given = list(setters) if isinstance(setters, (tuple, list)) else [setters]
    for setter in given:
        if isinstance(setter, type) or not callable(getattr(setter, "apply", None)):
            name = getattr(setter, "__name__", repr(setter))
            raise QuantizationConfigError(
                f"qconfig_setter: `{name}` is not a setter. Give one of `quantization.qconfig_template`, a "
                "`QconfigSetter`, or a tuple of them, from high to low priority; those that take a table or names are "
                "called with them first."
            )
    return given


def apply_setters(view: GraphView, setters: Any) -> None:
    """Run setters on a graph: the lowest priority first, so that a higher one has the last word; then correct formats.

    Args:
        setters: one, or several from high to low priority.
    """
    given = given_setters(setters)
    if len(view) and all(view.is_fixed(operator) for operator in view):
        warn(
            "qconfig attributes of the model decide every operator, and the setter changes nothing. Remove the "
            "attributes (`del model.qconfig`), or do not give a setter.",
            QuantizationWarning,
        )
    for setter in reversed(given):
        setter.apply(view)
    correct_formats(view)
    view.finish()
    for setter in given:
        getattr(setter, "finish", lambda view: None)(view)


def note_float(view: GraphView, setters: Any) -> None:
    """Ask setters, before anything is fused, what they leave float: that is not fused, and runs as it is written.

    Only these choices are noted; the setters run again on the fused graph.
    """
    asked = view.asking()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they say it again when they run
        for setter in reversed(given_setters(setters)):
            setter.apply(asked)
    asked.finish()
    for operator in asked:
        choice = asked.choices.get(operator.path)
        if choice is not None and choice.qconfig is None:
            view.choices[operator.path] = choice


# -- templates


class QconfigTemplate:
    """Base of templates: a rule that changes what a setter gave."""

    def apply(self, view: GraphView, qconfig: QConfig) -> None:
        """Change choices of a prepared graph.

        Args:
            qconfig: the setter's own, which most operators have.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"


def require_templates(templates: Any, what: str) -> None:
    """Insist on a list of templates.

    Raises:
        QuantizationConfigError: for anything else.
    """
    if not isinstance(templates, Iterable):
        raise QuantizationConfigError(f"{what}: templates must be a list of templates, got {templates!r}.")
    for template in templates:
        if isinstance(template, type) or not callable(getattr(template, "apply", None)):
            name = f"the class {template.__name__}" if isinstance(template, type) else repr(template)
            raise QuantizationConfigError(
                f"{what}: {name} is not a template; HighPrecisionOutputTemplate() or ModuleNameTemplate({{'': qint8}}) "
                "would be one."
            )


class HighPrecisionOutputTemplate(QconfigTemplate):
    """Outputs in high precision: the accumulator of a convolution, linear layer or matmul leaves as it is.

    It must be taken by DeQuantStubs or the model's output only. What a deployed model has nothing for may be between:
    the `nn.Identity` that fusion before prepare leaves behind, a clone, a Dropout. A warning names the outputs where it
    is not possible.
    """

    def apply(self, view: GraphView, qconfig: QConfig) -> None:
        kept: dict[str, str] = {}
        for operator in _exits(view):
            current = view.qconfig(operator)
            if (
                current is None
                or current.activation is None
                or view.is_fixed(operator)
                or is_half(operator.row, current)
            ):
                continue
            obstacle = _why_not_real(view, operator)
            if obstacle:
                kept[operator.path] = obstacle
            else:
                why = f"high-precision output ({accumulator(view.march)})"
                view.set(operator, with_output(current, None), why)
        if kept:
            shown = listed((f"`{path}` ({why})" for path, why in kept.items()), most=8)
            warn_once(
                f"outputs that are not in high precision: {shown}. Only a convolution, a linear layer "
                "or a matmul directly before the DeQuantStub has it; move what follows behind the DeQuantStub if the "
                "precision matters.",
                QuantizationWarning,
            )


def accumulator(march: March) -> str:
    """What a chip gives as a high-precision output: nash-b float, the others their accumulators.

    >>> accumulator(March.NASH_M), accumulator(March.NASH_B)
    ('int32', 'float')
    """
    return "float" if march in (March.NASH_B, March.NASH_B_LITE, March.NASH_B_PLUS) else "int32"


def _exits(view: GraphView) -> list[OperatorView]:
    """The operators whose values leave the quantized part, in the order of the graph."""
    found: dict[OperatorView, None] = {}
    for node in view.graph.nodes:
        if view.is_exit(node):
            for source in node.all_input_nodes:
                if Kind.QUANTIZED in view.region.kinds(source) and not _is_left_aside(source):
                    found.update(dict.fromkeys(view.sources(source)))
    return [operator for operator in view if operator in found and not operator.row.is_quant]


def _is_left_aside(node: fx.Node) -> bool:
    """Is it one of several results, which nobody reads, such as the last state of a GRU?"""
    return node.target is getitem and notes(node).is_unread


def _why_not_real(view: GraphView, operator: OperatorView) -> str:
    """Why a result cannot leave in high precision; empty if it can."""
    if not view.has_real_output(operator):
        return f"{operator.row.name} has none"
    if view.is_output(operator):
        return ""
    other = next(c for c in view.takers_as_it_is(operator) if not view.is_exit(c.node))
    return f"{other.name} takes it too" if not other.keeps_format else f"{other.name} is between"


class GridSampleTemplate(QconfigTemplate):
    """int16 for coordinates: from the grid of every grid_sample and warp back to the first layer or QuantStub."""

    def apply(self, view: GraphView, qconfig: QConfig) -> None:
        for node in view.graph.nodes:
            row = view.row(node)
            if node not in view.region or row is None or Trait.SAMPLER not in row.traits:
                continue
            grid = node.kwargs["grid"] if "grid" in node.kwargs else node.args[1]
            where = view.place(node)
            pending, seen = view.sources(grid), set()
            while pending:
                operator = pending.pop(0)
                if operator in seen:
                    continue
                seen.add(operator)
                _raise_to_int16(view, operator, f"computes the grid of {where}")
                if not operator.is_gemm and not operator.row.is_quant:
                    pending += view.producers(operator)


def _raise_to_int16(view: GraphView, operator: OperatorView, why: str) -> None:
    """int8 becomes int16; float16 and high precision stay."""
    current = view.qconfig(operator)
    if current is not None and current.activation is not None and format_of(current.activation) == qint8:
        view.set(operator, current._replace(activation=with_format(current.activation, qint16)), why)


# -- setters


class TemplateQconfigSetter(QconfigSetterBase):
    """One qconfig for every operator, then templates that change it, in their order.

    Args:
        qconfig: for every operator.
        templates: `HighPrecisionOutputTemplate`, `GridSampleTemplate`, or your own `QconfigTemplate`.
        name: what `explain` calls it.

    >>> TemplateQconfigSetter(get_qconfig(), [HighPrecisionOutputTemplate()]).name
    'TemplateQconfigSetter'
    """

    def __init__(self, qconfig: QConfig, templates: Sequence[Any] = (), name: str = "") -> None:
        check_qconfig(qconfig, "TemplateQconfigSetter")
        require_templates(templates, "TemplateQconfigSetter")
        self.qconfig, self.templates, self._name = unasked(qconfig), tuple(templates), name

    @property
    def name(self) -> str:
        return self._name or super().name

    def qconfig_for(self, operator: OperatorView) -> QConfig:
        return self.qconfig

    def apply(self, view: GraphView) -> None:
        super().apply(view)
        for template in self.templates:
            template.apply(view, self.qconfig)

    def __repr__(self) -> str:
        return self._name or f"{self.name}({self.qconfig}, [{', '.join(map(repr, self.templates))}])"


class ModuleNameQconfigSetter(QconfigSetterBase):
    """Qconfigs by the path of a module, as in ``model.named_modules()``; a generated one can be named too.

    A container's reaches all that is in it, the longest path wins, and ``""`` is the whole model. A module that is
    fused into another gives its qconfig to that.

    >>> setter = ModuleNameQconfigSetter({"backbone.conv": get_qconfig(out_dtype=qint16)})
    """

    def __init__(self, module_name_to_qconfig: Mapping[str, Any]) -> None:
        self.module_name_to_qconfig = dict(module_name_to_qconfig)

        for name, qconfig in self.module_name_to_qconfig.items():
            if not isinstance(name, str):
                raise QuantizationConfigError(f"ModuleNameQconfigSetter takes {{path: qconfig}}; {name!r} is no path.")
            check_qconfig(qconfig, f"{name!r} in ModuleNameQconfigSetter")

    def __repr__(self) -> str:
        return f"{self.name}({self.module_name_to_qconfig})"

    def apply(self, view: GraphView) -> None:
        for operator, name in by_name(view, self.module_name_to_qconfig, self.name).items():
            view.set(operator, self.module_name_to_qconfig[name], f"{self.name} {name!r}")


def by_name(view: GraphView, names: Iterable[str], what: str) -> dict[OperatorView, str]:
    """The name that decides each operator: its own, else the last fused into it, else the nearest around it.

    Raises:
        QuantizationConfigError: for a name that the model does not have.
    """
    wanted = set(names)
    found: dict[OperatorView, str] = {}
    for operator in view:
        own = next((name for name in view.names(operator) if name in wanted), None)
        if own is not None:
            found[operator] = own
    unused = sorted(name for name in wanted - set(found.values()) - {""} if not view.may_come(name))
    missing = [name for name in unused if not view.has_module(name)]
    if missing:
        name, paths = missing[0], [path for operator in view for path in operator.members]
        part = view.named(name)
        close = get_close_matches(name, paths, 3)
        hint = f"Did you mean {', '.join(map(repr, close))}?" if close else f"It has {', '.join(map(repr, paths[:6]))}."
        around, _, last = name.rpartition(".")
        if part is not None and last in ("weight", "bias"):
            hint = (
                f"It is a tensor; name the module, with the formats of its parts: {{{around!r}: {{'weight': qint8}}}}."
            )
        elif part is not None:
            hint = f"It is a part of `{part.path}`, whose parts are int16 whatever its qconfig says: name that."
        raise QuantizationConfigError(f"{what} names {', '.join(map(repr, missing))}, not in the model. {hint}")
    idle = [name for name in unused if not any(name in o.members or o.path.startswith(f"{name}.") for o in view)]
    if idle:
        warn(
            f"{what}: {', '.join(map(repr, idle))} has no operator with a format of its own in the quantized part; its "
            "qconfig changes nothing.",
            QuantizationWarning,
        )
    return found


class SensitiveOpQconfigSetter(QconfigSetterBase):
    """int16 for the operators whose activations are the most sensitive; outputs in high precision stay so.

    Weights stay int8, so rows of a table that measure weights are passed over.
    """

    def __init__(
        self,
        qconfig: QConfig,
        table: Sequence[Any],
        topk: int | None = None,
        ratio: float | None = None,
        name: str = "",
    ) -> None:
        self.qconfig, self._name = qconfig, name
        self.rows = most_sensitive(table, topk, ratio, ("activation",))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(row.name for row in self.rows)})"

    @property
    def name(self) -> str:
        return self._name or super().name

    def apply(self, view: GraphView) -> None:
        warn_unknown(view, self.rows, self.name)
        for row in self.rows:
            for operator in view.every(row.name):
                current = view.qconfig(operator)
                if current is None or current.activation is not None:
                    view.set(operator, self.qconfig, f"sensitivity table rank {row.rank}")


def _calibration(dtype: Any) -> QConfig:
    return get_qconfig(out_dtype=dtype)


def _training(dtype: Any, fix_scale: bool = False) -> QConfig:
    return get_qconfig(TRAINING_OBSERVER, out_dtype=dtype, fix_scale=fix_scale)


def _int8(qconfig: QConfig, name: str) -> TemplateQconfigSetter:
    return TemplateQconfigSetter(qconfig, [HighPrecisionOutputTemplate(), GridSampleTemplate()], name)


def _int16(qconfig: QConfig, name: str) -> TemplateQconfigSetter:
    return TemplateQconfigSetter(qconfig, [HighPrecisionOutputTemplate()], name)


default_calibration_qconfig_setter = _int8(_calibration(qint8), "default_calibration_qconfig_setter")
default_qat_qconfig_setter = _int8(_training(qint8), "default_qat_qconfig_setter")
default_qat_fixed_act_qconfig_setter = _int8(_training(qint8, True), "default_qat_fixed_act_qconfig_setter")
calibration_8bit_weight_16bit_act_qconfig_setter = _int16(
    _calibration(qint16), "calibration_8bit_weight_16bit_act_qconfig_setter"
)
qat_8bit_weight_16bit_act_qconfig_setter = _int16(_training(qint16), "qat_8bit_weight_16bit_act_qconfig_setter")
qat_8bit_weight_16bit_fixed_act_qconfig_setter = _int16(
    _training(qint16, True), "qat_8bit_weight_16bit_fixed_act_qconfig_setter"
)


def sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(
    table: Sequence[Any], topk: int | None = None, ratio: float | None = None
) -> SensitiveOpQconfigSetter:
    """int16 for the first `topk` rows of a sensitivity table, or its first share `ratio`; observes as calibration does.

    >>> table = [["backbone.conv", "activation", "Conv2d", 1.5, "qint8"]]
    >>> setter = sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter(table, topk=1)
    """
    return SensitiveOpQconfigSetter(
        _calibration(qint16), table, topk, ratio, "sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter"
    )


def sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter(
    table: Sequence[Any], topk: int | None = None, ratio: float | None = None
) -> SensitiveOpQconfigSetter:
    """The same; observes as training does.

    >>> setter = sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter([], ratio=0.2)
    """
    return SensitiveOpQconfigSetter(
        _training(qint16), table, topk, ratio, "sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter"
    )


def sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter(
    table: Sequence[Any], topk: int | None = None, ratio: float | None = None
) -> SensitiveOpQconfigSetter:
    """The same, for training with the scales that calibration gave.

    >>> setter = sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter([], ratio=0.2)
    """
    return SensitiveOpQconfigSetter(
        _training(qint16, True), table, topk, ratio, "sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter"
    )


# The tuning guide's other spelling.
sensitive_op_8bit_weight_16bit_act_calibration_setter = sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter
sensitive_op_8bit_weight_16bit_act_qat_setter = sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter
sensitive_op_8bit_weight_16bit_fixed_act_qat_setter = sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter

show_at(
    "quantization.qconfig_template",
    QconfigSetterBase,
    QconfigTemplate,
    HighPrecisionOutputTemplate,
    GridSampleTemplate,
    TemplateQconfigSetter,
    ModuleNameQconfigSetter,
    SensitiveOpQconfigSetter,
    sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter,
    sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter,
    sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter,
)
