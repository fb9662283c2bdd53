"""Group normalisation on integers."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.quantized.normalization import Normalization


class GroupNorm(Normalization):
    """GroupNorm on integers."""
