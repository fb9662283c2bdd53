"""Programs as `torch.export` has them: its own object, and its files."""

from __future__ import annotations

import io
import os
import re
import zipfile
from typing import Any

import torch

from horizon_plugin_pytorch.errors import ExportError
from horizon_plugin_pytorch.files import write_atomically
from horizon_plugin_pytorch.program.note import value_of
from horizon_plugin_pytorch.program.program import Program

_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)")


def exported_program(program: Program) -> torch.export.ExportedProgram:
    """A program as `torch.export.export` would give it: tensors in, a tuple of tensors out, integers in float32.

    ``torch.export.export(model)`` itself cannot take a model with quantized tensors.

    >>> from horizon_plugin_pytorch.program import record_program
    >>> exported = exported_program(record_program(torch.nn.ReLU(), torch.zeros(2)))
    >>> exported.module()(torch.tensor([-1.0, 2.0]))
    (tensor([0., 2.]),)
    """
    examples = tuple(torch.zeros(value.shape, dtype=value.dtype) for value in map(value_of, program.placeholders))
    return torch.export.export(program.graph_module, examples)


def save_exported(exported: torch.export.ExportedProgram, f: Any) -> None:
    """Write what `exported_program` gives, to a path or a binary file object; a failure leaves nothing."""
    data = io.BytesIO()
    torch.export.save(exported, data)
    if isinstance(f, (str, os.PathLike)):
        write_atomically(data.getvalue(), os.fspath(f))
    else:
        f.write(data.getvalue())


def load_exported(f: Any) -> torch.export.ExportedProgram:
    """Read a file of `torch.export.save`.

    Raises:
        ExportError: it is none, or it calls an operator that is not registered, which is named.
    """
    if isinstance(f, (str, os.PathLike)):
        with open(f, "rb") as file:
            data = file.read()
    else:
        data = f.read()
    name = f"`{os.fspath(f)}`" if isinstance(f, (str, os.PathLike)) else "the file"
    missing = _missing_operators(data, name)
    if missing:
        raise ExportError(
            f"{name} calls {', '.join(f'`{operator}`' for operator in missing)}, which is not registered: import the "
            "package that has it, or export the model again with this version."
        )
    return torch.export.load(io.BytesIO(data))


def _missing_operators(data: bytes, name: str) -> list[str]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            models = [archive.read(file).decode() for file in archive.namelist() if "/models/" in file]
    except (zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise ExportError(f"{name} is no file of `torch.export.save` ({error}).") from error
    if not models:
        raise ExportError(f"{name} is no file of `torch.export.save`: there is no model in it.")
    found = dict.fromkeys(match.groups() for text in models for match in _OPERATOR.finditer(text))
    return [f"{space}::{operator}" for space, operator, overload in found if not _is_known(space, operator, overload)]


def _is_known(space: str, operator: str, overload: str) -> bool:
    return hasattr(getattr(getattr(torch.ops, space), operator, None), overload)
