"""Which class a module becomes, as dictionaries; they are read from the operator table."""

from __future__ import annotations

from horizon_plugin_pytorch.doors import show_at
from horizon_plugin_pytorch.operators.table import rows

__all__ = ["get_qat_module_mappings", "get_quantized_module_mappings"]


def get_qat_module_mappings() -> dict[type, type]:
    """Float classes, also fused ones, with the QAT class of each.

    No document defines it: the name and its use say what it gives. It is made anew at each call, so changing it changes
    nothing else.

    >>> from torch import nn
    >>> get_qat_module_mappings()[nn.Conv2d]
    <class 'horizon_plugin_pytorch.nn.qat.conv2d.Conv2d'>
    """
    return {cls: row.qat for row in rows() if row.qat is not None for cls in row.modules}


def get_quantized_module_mappings() -> dict[type, type]:
    """QAT classes with the quantized class of each, which conversion puts in its place.

    >>> from horizon_plugin_pytorch.nn import qat
    >>> get_quantized_module_mappings()[qat.Conv2d]
    <class 'horizon_plugin_pytorch.nn.quantized.conv2d.Conv2d'>
    """
    return {row.qat: row.quantized for row in rows() if row.qat is not None and row.quantized is not None}


show_at("quantization.quantization_mappings", get_qat_module_mappings, get_quantized_module_mappings)
