"""Quantization toolkit for PyTorch models on BPU chips: calibrate, train on the integer grid, convert, export."""

# ruff: noqa: I001 - the order below matters
from horizon_plugin_pytorch._version import __version__
from horizon_plugin_pytorch.march import March, get_march, set_march

# The order matters: statistics first, operators on top of them, verbs on top of both.
from horizon_plugin_pytorch import dtype, fixed_point, march, qat_mode, qtensor
from horizon_plugin_pytorch import quantization
from horizon_plugin_pytorch import nn

__all__ = [
    "March", "__version__", "dtype", "fixed_point", "get_march", "march", "nn", "qat_mode", "qtensor", "quantization",
    "set_march",
]  # fmt: skip
