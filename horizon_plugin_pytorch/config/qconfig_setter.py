"""`QconfigSetter`: formats by templates, with a log of every change."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from pprint import pformat
from typing import Any

import torch

from horizon_plugin_pytorch.config.graph_view import GraphView
from horizon_plugin_pytorch.config.resolve import check_qconfig
from horizon_plugin_pytorch.config.setters import QconfigSetterBase, require_templates
from horizon_plugin_pytorch.config.templates import (
    ConvDtypeTemplate,
    MatmulDtypeTemplate,
    ModuleNameTemplate,
    get_common_templates,
)
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.dtype import QuantDType, qint8, qint16
from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning, warn
from horizon_plugin_pytorch.fake_quant.dynamic import is_dynamic
from horizon_plugin_pytorch.fake_quant.fake_cast import is_cast
from horizon_plugin_pytorch.fake_quant.qconfig import TRAINING_OBSERVER, QConfig, format_of, get_qconfig, unasked
from horizon_plugin_pytorch.files import write_atomically

CHANGELOG, DTYPES, READABLE = "qconfig_changelogs.txt", "qconfig_dtypes.pt", "qconfig_dtypes.pt.py"


class QconfigSetter(QconfigSetterBase):
    """A reference qconfig for every operator, then templates in their order; a later one overrides an earlier one.

    Afterwards formats that the chip does not have are corrected. ``qconfig_changelogs.txt`` says for each operator
    which rules gave it its formats. ``qconfig_dtypes.pt`` has the formats by path, as `ModuleNameTemplate` takes them,
    and ``qconfig_dtypes.pt.py`` the same for people to read.

    Args:
        reference_qconfig: where observers come from, and formats that no template gives.
        templates: `ModuleNameTemplate`, `ConvDtypeTemplate`, `MatmulDtypeTemplate`, `SensitivityTemplate`, ...
        enable_optimize: add `get_common_templates` after them.
        save_dir: where the files go; None writes none.

    >>> from horizon_plugin_pytorch.dtype import qint8, qint16
    >>> from horizon_plugin_pytorch.quantization.qconfig_setter import ConvDtypeTemplate, ModuleNameTemplate
    >>> setter = QconfigSetter(
    ...     reference_qconfig=get_qconfig(),
    ...     templates=[ModuleNameTemplate({"": qint16}), ConvDtypeTemplate(input_dtype=qint16, weight_dtype=qint8)],
    ... )
    """

    def __init__(
        self,
        reference_qconfig: QConfig | None = None,
        templates: Sequence[Any] = (),
        enable_optimize: bool = True,
        save_dir: str | os.PathLike | None = ".",
    ) -> None:
        self.reference_qconfig = unasked(get_qconfig() if reference_qconfig is None else reference_qconfig)
        check_qconfig(self.reference_qconfig, "QconfigSetter's reference_qconfig")
        if not isinstance(templates, Iterable):
            raise QuantizationConfigError(f"QconfigSetter: templates must be a list of templates, got {templates!r}.")
        self.templates = (*templates, *(get_common_templates() if enable_optimize else ()))
        require_templates(self.templates, "QconfigSetter")
        self.save_dir = None if save_dir is None else Path(save_dir)

    def apply(self, view: GraphView) -> None:
        for operator in view:
            view.set(operator, self.reference_qconfig, "reference_qconfig")
        for template in self.templates:
            template.apply(view, self.reference_qconfig)

    def finish(self, view: GraphView) -> None:
        if self.save_dir is None:
            return
        lines = [
            line
            for operator in view
            for line in (f"{operator.path} ({operator.row.name})", *(f"    {step}" for step in view.steps(operator)))
        ]
        rules = {
            o.path: rule_of(qconfig, o.has_weight, view.is_fixed(o), view.products(o))
            for o in view
            if (qconfig := view.qconfig(o)) is not None
        }
        saved = io.BytesIO()
        torch.save(rules, saved)
        readable = f"qconfig_dtypes = {pformat(rules, sort_dicts=False)}\n"
        try:
            self.save_dir.mkdir(parents=True, exist_ok=True)
            write_atomically("".join(f"{line}\n" for line in lines).encode(), self.save_dir / CHANGELOG)
            write_atomically(saved.getvalue(), self.save_dir / DTYPES)
            write_atomically(readable.encode(), self.save_dir / READABLE)
        except OSError as error:
            warn(
                f"QconfigSetter could not write {CHANGELOG} and {DTYPES} into `{self.save_dir}`: {error}. Give it a "
                "save_dir, or save_dir=None to write none.",
                QuantizationWarning,
            )

    def __repr__(self) -> str:
        return f"QconfigSetter({self.reference_qconfig}, templates=[{', '.join(map(repr, self.templates))}])"


def get_int8_gemm_setter(qat: bool = False, fix_scale: bool = False) -> QconfigSetter:
    """int8 for what convolutions, linear layers and products of matrices multiply, int16 for everything else.

    Sums, norms and softmax keep int16, and a QuantStub makes int8 of what a layer reads: multiply-accumulates are those
    of int8. Transformers lose much less so than in plain int8.

    Args:
        qat: observe as training does, rather than as calibration does.
        fix_scale: keep the scales of calibration while training.

    >>> get_int8_gemm_setter().templates[1:3]
    (ConvDtypeTemplate(input_dtype='qint8', weight_dtype='qint8'), MatmulDtypeTemplate(input_dtypes=('qint8', 'qint8')))
    """
    reference = get_qconfig(TRAINING_OBSERVER if qat else None, out_dtype=qint16, fix_scale=fix_scale)
    templates = [ModuleNameTemplate({"": qint16}), ConvDtypeTemplate(qint8, qint8), MatmulDtypeTemplate(qint8)]
    return QconfigSetter(reference, templates, save_dir=None)


def rule_of(
    qconfig: QConfig, has_weight: bool, is_fixed: bool = False, products: tuple[Any, Any] | None = None
) -> dict[str, Any]:
    """The formats of a qconfig in the form that `ModuleNameTemplate` takes; scales that are given as thresholds.

    Args:
        is_fixed: let no later rule change it.
        products: formats of the products inside of attention.

    >>> rule_of(get_qconfig(out_dtype="qint16"), has_weight=True)
    {'weight': 'qint8', 'output': 'qint16'}
    """
    has_input = bool(qconfig.input) and not is_dynamic(qconfig.input)
    names = (*(["input"] if has_input else []), *(["weight"] if has_weight else []), "output")
    formats = {name: _each(getattr(qconfig, name), _format) for name in names}
    formats = {name: value for name, value in formats.items() if value is not None}
    ranges = {name: _each(getattr(qconfig, name), _threshold) for name in formats}
    ranges = {name: value for name, value in ranges.items() if value is not None}
    further: dict[str, Any] = {"dynamic": qconfig.input.kwargs} if is_dynamic(qconfig.input) else {}
    if products is not None:
        further["products"] = [str(dtype) for dtype in products]
    if is_fixed:
        further["freeze"] = True
    return {"dtype": formats, "threshold": ranges, **further} if ranges else {**formats, **further}


def _format(part: Any) -> str | None:
    """A format's name; None for an input that nobody asked for."""
    is_default = part is not None and part.is_default
    return None if is_default else str(format_of(part)).removeprefix("torch.")


def _each(part: Any, function: Callable[[Any], Any]) -> Any:
    """A function of a part, or of each where there is one for each operand; None where it gives only that."""
    if not isinstance(part, (tuple, list)):
        return function(part)
    found = [function(one) for one in part]
    return found if any(value is not None for value in found) else None


def _threshold(part: Any) -> float | None:
    """The largest magnitude, where the scale is given; scales for each channel are not told."""
    scale = None if part is None or is_cast(part) else part.kwargs.get("scale")
    if scale is None or torch.as_tensor(scale).numel() != 1:
        return None
    dtype = format_of(part)
    assert isinstance(dtype, QuantDType)
    return float(scale) * -dtype.min


show_at("quantization.qconfig_setter.setter", QconfigSetter, get_int8_gemm_setter, rule_of)
