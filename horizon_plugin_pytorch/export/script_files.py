"""TorchScript files that know the version of this package that wrote them.

No document defines these functions; their names and their uses say what they do.
"""

from __future__ import annotations

import io
import os
from typing import Any

import torch

from horizon_plugin_pytorch._version import __version__
from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.files import write_atomically

__all__ = ["get_version_from_scriptmodule", "save_with_version"]

_NAME = "horizon_plugin_pytorch_version"


def save_with_version(m: torch.jit.ScriptModule, f: Any, _extra_files: dict[str, Any] | None = None) -> None:
    """Write a TorchScript module as `torch.jit.save` does, with the version of this package.

    The version is an attribute of the module, so it is there whoever loads the file, and a further file inside.

    Args:
        m: what `torch.jit.trace` or `torch.jit.script` gives.
        f: a path, or a binary file object.
        _extra_files: further files to put inside: names and contents.

    >>> file = io.BytesIO()
    >>> save_with_version(torch.jit.trace(torch.nn.ReLU(), torch.zeros(1)), file, {"note": "of a ReLU"})
    >>> _ = file.seek(0)
    >>> get_version_from_scriptmodule(torch.jit.load(file)) == __version__
    True
    """
    _require_script(m, "save_with_version")
    if m._c.hasattr(_NAME):
        m._c.setattr(_NAME, __version__)
    else:
        m._c._register_attribute(_NAME, torch._C.StringType.get(), __version__)
    data = io.BytesIO()
    torch.jit.save(m, data, _extra_files={**(_extra_files or {}), _NAME: __version__})
    if isinstance(f, (str, os.PathLike)):
        write_atomically(data.getvalue(), os.fspath(f))
    else:
        f.write(data.getvalue())


def get_version_from_scriptmodule(m: torch.jit.ScriptModule) -> str | None:
    """The version of this package that a TorchScript module was saved with; None if none is known.

    >>> get_version_from_scriptmodule(torch.jit.trace(torch.nn.ReLU(), torch.zeros(1))) is None
    True
    """
    _require_script(m, "get_version_from_scriptmodule")
    return m._c.getattr(_NAME) if m._c.hasattr(_NAME) else None


def _require_script(m: Any, who: str) -> None:
    if not isinstance(m, torch.jit.ScriptModule):
        raise TypeError(
            f"{who} takes a TorchScript module, as `torch.jit.trace` and `torch.jit.load` give it, got "
            f"{type(m).__name__}."
        )


show_at("utils.serialization", save_with_version, get_version_from_scriptmodule)
