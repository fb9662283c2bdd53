"""Which float class a module was of, before it was fused, prepared or converted."""

from __future__ import annotations

from torch import nn

from horizon_plugin_pytorch.nn.intrinsic.fused import FusedModule
from horizon_plugin_pytorch.nn.quantized.gemm import QuantizedGemm
from horizon_plugin_pytorch.operators.table import row_of_module


def is_made_of(module: nn.Module, cls: type) -> bool:
    """Is a module of a class, or what has become of one? Fused modules are made of their layers.

    >>> from horizon_plugin_pytorch.nn.intrinsic import ConvReLU2d
    >>> is_made_of(ConvReLU2d(nn.Conv2d(1, 1, 1)), nn.Conv2d)
    True
    """
    if isinstance(module, cls):
        return True
    if isinstance(module, FusedModule):
        return issubclass(module.layer_class, cls)
    row = row_of_module(cls) if issubclass(cls, nn.Module) else None
    if row is None:
        return False
    if isinstance(module, QuantizedGemm):  # fused ones have operators of their own
        return row.quantized is not None and isinstance(module, row.quantized)
    return getattr(module, "operator", "") == row.name
