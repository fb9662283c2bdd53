"""Root-mean-square normalisation on integers."""

from __future__ import annotations

from horizon_plugin_pytorch.nn.quantized.normalization import Normalization


class RMSNorm(Normalization):
    """RMSNorm on integers."""
