"""`QconfigSetter`: formats by templates, with a log of every change."""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from horizon_plugin_pytorch.errors import QuantizationConfigError, QuantizationWarning
from horizon_plugin_pytorch.quantization.passes.configure import check_qconfig
from horizon_plugin_pytorch.quantization.passes.graph_view import GraphView
from horizon_plugin_pytorch.quantization.qconfig import QConfig, get_qconfig, spell, unasked
from horizon_plugin_pytorch.quantization.qconfig_setter.templates import get_common_templates
from horizon_plugin_pytorch.quantization.qconfig_template import QconfigSetterBase

CHANGELOG, DTYPES = "qconfig_changelogs.txt", "qconfig_dtypes.pt"


class QconfigSetter(QconfigSetterBase):
    """A reference qconfig for every operator, then templates in their order; a later one overrides an earlier one.

    Afterwards formats that the chip does not have are corrected. ``qconfig_changelogs.txt`` says for each operator
    which rules gave it its formats, and ``qconfig_dtypes.pt`` has the formats, as strings by path.

    Args:
        reference_qconfig: where observers come from, and formats that no template gives.
        templates: `ModuleNameTemplate`, `ConvDtypeTemplate`, `MatmulDtypeTemplate`, `SensitivityTemplate`, ...
        enable_optimize: add `get_common_templates` after them.
        save_dir: where the two files go; None writes none.

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
        self.templates = (*templates, *(get_common_templates() if enable_optimize else ()))
        for template in self.templates:
            if isinstance(template, type) or not callable(getattr(template, "apply", None)):
                raise QuantizationConfigError(
                    f"QconfigSetter: {template!r} is not a template; ModuleNameTemplate({{'': qint8}}) would be one."
                )
        self.save_dir = None if save_dir is None else Path(save_dir)

    def apply(self, view: GraphView) -> None:
        for operator in view:
            view.set(operator, self.reference_qconfig, "reference_qconfig")
        for template in self.templates:
            template.apply(view, self.reference_qconfig)

    def finish(self, view: GraphView) -> None:
        if self.save_dir is None:
            return
        lines, formats = [], {}
        for operator in view:
            qconfig = view.qconfig(operator)
            lines += [f"{operator.path} ({operator.row.name})", *(f"    {step}" for step in view.steps(operator))]
            if qconfig is not None:
                names = ("input", "weight", "output") if operator.has_weight else ("input", "output")
                formats[operator.path] = {name: spell(getattr(qconfig, name)) for name in names}
        saved = io.BytesIO()
        torch.save(formats, saved)
        try:
            self.save_dir.mkdir(parents=True, exist_ok=True)
            _write(self.save_dir / CHANGELOG, "".join(f"{line}\n" for line in lines).encode())
            _write(self.save_dir / DTYPES, saved.getvalue())
        except OSError as error:
            warnings.warn(
                f"QconfigSetter could not write {CHANGELOG} and {DTYPES} into `{self.save_dir}`: {error}. Give it a "
                "save_dir, or save_dir=None to write none.",
                QuantizationWarning,
                stacklevel=2,
            )


def _write(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the whole new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp's is for its owner alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
