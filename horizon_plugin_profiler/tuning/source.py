"""The answer of `tune` as Python: a file to read, to edit and to commit."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horizon_plugin_profiler.tuning.answer import TuningResult

WEIGHTS = "tuned_model.pt"
_LONGEST = 120  # characters of a line


def source_of(result: TuningResult) -> str:
    """Setters, and functions that make the answer of a float model; only what is used is imported."""
    rewriting = "".join(f"    {name}(model, batches)  # in place\n" for name in result.rewrites)
    arguments = _written(result.prepare_args)
    body = _BODY.format(
        march=_text(result.march),
        formats=_dictionary(
            row
            for path, parts in result.formats.items()
            for row in _explained(f"{_text(path)}: {{{_parts(parts)}}},", result.reasons.get(path, ""))
        ),
        thresholds=_dictionary(f"{_text(path)}: {end!r}," for path, end in result.thresholds.items()),
        arguments=_dictionary(f"{_text(name)}: {text}," for name, text in arguments.items()),
        missing="".join(
            f"# and, which cannot be written down here: {' '.join(f'{name}={value!r}'.split())}\n"
            for name, value in result.prepare_args.items()
            if name not in arguments
        ),
        kept=_KEPT if result.int8_gemms else "",
        rewriting=rewriting,
        search=f"    search_scales(prepared, batches, samples={result.searched})\n" if result.searched else "",
        learned=_LEARNED.format(rewriting=rewriting, file=WEIGHTS) if result.learned else "",
    )
    head = _HEAD.format(
        model=result.model,
        march=result.march,
        summary=_in_docstring(f"{result.summary()}."),
        notes="".join(f"{_in_docstring(note)}\n" for note in result.notes),
    )
    return f"{head}{_imports(body)}\n{body}"


def _imports(body: str) -> str:
    """The imports of what a text names."""
    known = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    lines = ["import warnings", ""]
    lines += ["import torch"] if "torch" in known else []  # one block: to a user both are packages of others
    for module, names in _NAMES.items():
        used = [name for name in names if name in known]
        line = f"from horizon_plugin_pytorch.{module} import {', '.join(used)}"
        if len(line) > _LONGEST:
            each = "".join(f"    {name},\n" for name in used)
            line = f"from horizon_plugin_pytorch.{module} import (\n{each})"
        lines += [line] if used else []
    return "\n".join(lines) + "\n"


def _dictionary(rows: Iterable[str]) -> str:
    lines = "".join(f"    {row}\n" for row in rows)
    return f"{{\n{lines}}}" if lines else "{}"


def _explained(row: str, why: str) -> list[str]:
    """A row with its reason behind it or, where that is too long for a line, above it."""
    whole = f"{row}  # {why}".removesuffix("  # ")
    if len(whole) <= _LONGEST - 4:
        return [whole]
    return [*(f"# {line}" for line in textwrap.wrap(why, _LONGEST - 6)), row]


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parts(parts: Any) -> str:
    return ", ".join(f"{_text(part)}: {dtype}" for part, dtype in parts.items())


def _written(arguments: Any) -> dict[str, str]:
    """What `prepare` must be told, as Python, as far as it can be written down."""
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in arguments.items()}
    return {name: repr(value) for name, value in plain.items() if _is_literal(value)}


def _is_literal(value: Any) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (SyntaxError, ValueError):
        return False


def _in_docstring(text: str) -> str:
    plain = text.replace("\\", "\\\\").replace('"""', "'''")
    return textwrap.fill(plain, _LONGEST, break_long_words=False, break_on_hyphens=False)


_NAMES = {
    "dtype": ("qint8", "qint16"),
    "march": ("get_march",),
    "quantization": (
        "FakeQuantState", "calibrate", "center_norms", "equalize", "get_qconfig", "prepare", "search_scales",
        "set_fake_quantize", "smooth_norms",
    ),
    "quantization.observer_v2": ("MinMaxObserver",),
    "quantization.qconfig_setter": (
        "ConvDtypeTemplate", "MatmulDtypeTemplate", "ModuleNameTemplate", "QconfigSetter",
    ),
}  # fmt: skip

_KEPT = """        ConvDtypeTemplate(qint8, qint8),  # layers and products of matrices multiply int8
        MatmulDtypeTemplate(qint8),
"""

_LEARNED = '''

def learned(model, batches, path="{file}"):
    """The answer with the weights that were learned, from the float model, a list of batches and the file of them."""
{rewriting}    prepared = prepare(model, batches[0], calibration_setter(), out_dir=None, **PREPARE_ARGS)
    prepared.load_state_dict(torch.load(path, weights_only=True))
    set_fake_quantize(prepared.eval(), FakeQuantState.VALIDATION)
    return prepared
'''

_HEAD = '''"""Number formats of {model} on {march}.

{summary}
{notes}Everything that is not named is int8. Edit it as you like: it is an ordinary setter.
Call `set_march("{march}")` before any of these functions.
"""

'''

_BODY = '''MARCH = {march}
FORMATS = {formats}
# Largest magnitudes that are known: they fix scales.
THRESHOLDS = {thresholds}
# What `prepare` is told besides: prepare(model, inputs, calibration_setter(), **PREPARE_ARGS)
PREPARE_ARGS = {arguments}
{missing}

def templates():
    """Formats, and scales that are fixed."""
    if get_march() not in (None, MARCH):
        warnings.warn(f"These formats are for {{MARCH}}, not {{get_march().value}}: tune for it.", stacklevel=3)
    fixed = {{path: {{"threshold": end}} for path, end in THRESHOLDS.items()}}
    return [
        ModuleNameTemplate(FORMATS),
{kept}        *([ModuleNameTemplate(fixed)] if fixed else []),
    ]


def calibration_setter():
    """For `prepare`, before calibration."""
    return QconfigSetter(get_qconfig(), templates(), save_dir=None)


def qat_setter(fix_scale=False):
    """For `prepare`, before training; `fix_scale` keeps the scales of calibration."""
    return QconfigSetter(get_qconfig(MinMaxObserver, fix_scale=fix_scale), templates(), save_dir=None)


def calibrated(model, batches):
    """The answer, from the float model and a list of batches."""
{rewriting}    prepared = prepare(model, batches[0], calibration_setter(), out_dir=None, **PREPARE_ARGS)
    calibrate(prepared, batches, patience=0, progress=False)
{search}    return prepared
{learned}'''
