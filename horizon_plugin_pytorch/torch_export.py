"""`torch.export.export` for converted models, which hold tensors of a class that torch's own cannot make."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch

_CONVERTED = "horizon_plugin_pytorch.nn.quantized.module"


def take_converted_models() -> None:
    """Let `torch.export.export` take converted models, and whatever has one inside; other models are torch's.

    Importing this package does it.

    >>> torch.export.export.takes_converted_models
    True
    """
    torchs = torch.export.export
    if getattr(torchs, "takes_converted_models", False):
        return

    @functools.wraps(torchs)
    def export(mod: Any, *args: Any, **options: Any) -> Any:
        if not _is_converted(mod):
            return torchs(mod, *args, **options)
        exported = importlib.import_module("horizon_plugin_pytorch.program.exported")
        return exported.exported_model(torchs, mod, *args, **options)

    export.takes_converted_models = True  # type: ignore[attr-defined]
    torch.export.export = export


def _is_converted(mod: Any) -> bool:
    """Is there a module on integers in it? Without the class there is none."""
    module = sys.modules.get(_CONVERTED)
    is_model = isinstance(mod, torch.nn.Module) and not isinstance(mod, torch.jit.ScriptModule)
    return module is not None and is_model and any(isinstance(part, module.QuantizedModule) for part in mod.modules())
